"""``splitup-oracle``: a committee member, or the storage gateway.

Exit codes: 0 after a clean stop (SIGTERM, SIGINT), 1 when the chain, the store or a peer failed,
2 when a flag, a file or a key is wrong. One sentence on stderr states the error and the remedy.
Logs go to stderr, one line each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from splitup.cli.command import JsonOutput, as_command, start_log
from splitup.cli.console import add_version_option, ask_passphrase
from splitup.cli.service import Service, make_service_app

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A committee member, or the storage gateway, of a SplitUp network.\n\n"
    "Exit codes: 0 done, or stopped by SIGTERM or Ctrl-C; 1 the chain, the store or a peer failed; "
    "2 a flag, file or key is wrong.",
)
add_version_option(app, "splitup-oracle")

ConfigOption = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="TOML file; the help of 'run' and 'gateway' lists its settings."
    ),
]


@app.command(short_help="Serve as a committee member until SIGTERM or Ctrl-C.")
@as_command
async def run(config: ConfigOption = Path("oracle.toml")) -> None:
    """Serve as a committee member until SIGTERM or Ctrl-C.

    Required settings: rpc_url, deployment (file with the contracts' addresses), keystore,
    passphrase_file, data_dir, listen_port, gateway_urls. Optional settings with their defaults:
    listen_host (127.0.0.1), kernel_cache (data_dir/kernels), allow_loopback (false),
    metrics (where Prometheus reads; none).
    """
    from splitup_oracle.config import OracleConfig
    from splitup_oracle.member.service import run_member

    await _serve(lambda stop: run_member(OracleConfig.load(config), stop))


@app.command(short_help="Serve as the storage gateway until SIGTERM or Ctrl-C.")
@as_command
async def gateway(config: ConfigOption = Path("gateway.toml")) -> None:
    """Serve as the storage gateway until SIGTERM or Ctrl-C.

    Required settings: rpc_url, deployment (file with the contracts' addresses), s3_endpoint,
    bucket, credentials (JSON with access_key and secret_key), listen_port, data_dir. Optional
    settings with their defaults: listen_host (127.0.0.1), public_url (where it listens),
    metrics (where Prometheus reads; none), join_gateway_urls and join_rpc_url (what those who join
    are told; this gateway, and no RPC endpoint), open_models (false), open_uploads (false),
    upload_deposit_micro_usdc, upload_bytes_per_day.
    """
    from splitup.core.background import run_until
    from splitup_oracle.config import GatewayConfig
    from splitup_oracle.gateway.http_gateway import run_gateway

    await _serve(lambda stop: run_until(stop, run_gateway(GatewayConfig.load(config))))


@app.command(short_help="Make a member's key and configuration for a network.")
@as_command
async def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="A storage gateway of the network.")],
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Where everybody will reach the member.")
    ],
    data_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for all of the member's files.")
    ] = Path("splitup-member"),
    rpc_url: Annotated[
        str, typer.Option(metavar="URL", help="The chain's RPC endpoint, if not the network's.")
    ] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the member listens.")
    ] = "127.0.0.1:8700",
    *,
    output: JsonOutput,
) -> None:
    """Make a member's key and oracle.toml, and print what the network's owner needs.

    That is the text on stdout, for the owner's network.toml; it has no secrets. At a terminal it
    asks for the key's passphrase; elsewhere, or if empty, the key gets a random one.
    """
    from splitup.client.joining import join_network
    from splitup_oracle.member_setup import CONFIG_NAME, create_member

    async with join_network(url, data_dir, rpc_url) as (network, _):
        made = create_member(
            data_dir,
            network,
            endpoint=endpoint,
            listen=listen,
            passphrase=lambda: ask_passphrase("member", data_dir / CONFIG_NAME),
        )
    output.say(f"made {made.config}; for the network.toml of the network's owner:")
    output.give(made.to_dict(), lambda: print(made.compose_entry(), end=""))


@app.command(short_help="Show how each member of the committee sees the network.")
@as_command(hint="asking the chain and the members")
async def status(config: ConfigOption = Path("oracle.toml"), *, output: JsonOutput) -> None:
    """Show how each member of the committee sees the network.

    Exit code 1 if fewer than a quorum answer, or the committee has no group key.
    """
    from splitup_oracle.cli.status import fetch_status, show_status
    from splitup_oracle.config import OracleConfig

    found = await fetch_status(OracleConfig.load(config))
    output.give(found, lambda: show_status(found, output.out))
    if not found["works"]:
        raise typer.Exit(1)


@app.command(short_help="Show this member's bond, add to it, or withdraw it.")
@as_command
async def bond(
    config: ConfigOption = Path("oracle.toml"),
    amount: Annotated[
        str,
        typer.Option(metavar="USDC", help="USDC to add from the member's wallet."),
    ] = "0",
    release: Annotated[
        bool,
        typer.Option("--release", help="Request the bond back; after the wait, withdraw it."),
    ] = False,
    *,
    output: JsonOutput,
) -> None:
    """Show this member's bond, which is slashed if it signs two different things; change it.

    Only a former member can withdraw its bond: it requests that first, and withdraws after a
    waiting time.
    """
    from splitup.chain.bonds import post_bond
    from splitup.chain.client import Chain
    from splitup.client.inputs import format_usdc, parse_usdc
    from splitup.crypto.keystore import load_identity
    from splitup.messages.network import Deployment
    from splitup_oracle.config import OracleConfig

    added = parse_usdc(amount, name="--amount")
    settings = OracleConfig.load(config)
    identity = load_identity(settings.keystore, settings.passphrase_file)
    deployment = Deployment.load(settings.deployment)
    key = identity.private_key
    async with await Chain.connect(settings.rpc_url, deployment, private_key=key) as chain:
        if added:
            await post_bond(chain, added)
        until = await chain.call("bonds", "releasableAt", identity.address)
        if release:
            await chain.send("bonds", "release" if until else "requestRelease")
        held = await chain.call("bonds", "bondOf", identity.address)
    said = f"the bond of {identity.address} is {format_usdc(held)}"
    output.give(
        {"member": identity.address, "bond_micro_usdc": held}, lambda: output.out.print(said)
    )


def _check_member(config: Path) -> None:
    from splitup.crypto.keystore import load_identity
    from splitup_oracle.config import OracleConfig

    settings = OracleConfig.load(config)
    load_identity(settings.keystore, settings.passphrase_file)


def _check_gateway(config: Path) -> None:
    from splitup_oracle.config import GatewayConfig
    from splitup_oracle.gateway.presigning import Presigner

    settings = GatewayConfig.load(config)
    Presigner.open(settings.s3_endpoint, settings.bucket, settings.credentials)


MEMBER_SERVICE: Final = Service(
    "splitup-oracle", "run", "member", Path("oracle.toml"), _check_member
)
GATEWAY_SERVICE: Final = Service(
    *("splitup-oracle", "gateway", "gateway"),
    Path("gateway.toml"),
    _check_gateway,
    group="gateway-service",
)
for service in (MEMBER_SERVICE, GATEWAY_SERVICE):
    app.add_typer(make_service_app(service), name=service.group)


def main() -> None:
    """Run the command line."""
    app()


async def _serve(program: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Log to stderr and run a program, which ends when the event that it gets is set."""
    from splitup.core.event_loop import catch_signals

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    start_log(handler, logging.INFO)
    stop = asyncio.Event()
    with catch_signals(stop):
        await program(stop)
