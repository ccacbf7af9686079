"""``splitup-node join``: make a key and a configuration for the network behind one URL."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console

from splitup_node.cli.command import (
    DEFAULT_LISTEN,
    EndpointOption,
    JsonOption,
    ListenOption,
    run_and_print,
)

if TYPE_CHECKING:
    from splitup.chain.deployment import Deployment
    from splitup.messages.network import NetworkDescription


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The options of ``splitup-node join``; "" for a passphrase makes a random one."""

    url: str
    data_dir: Path
    vram: str
    passphrase: str = ""
    rpc_url: str = ""
    listen: str = DEFAULT_LISTEN
    endpoint: str = ""


def join_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="A storage gateway of the network.")],
    data_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for all of the node's files.")
    ] = Path("splitup-node"),
    vram: Annotated[
        str, typer.Option(metavar="SIZE", help='Device memory to serve with, for example "8GB".')
    ] = "",
    rpc_url: Annotated[
        str, typer.Option(metavar="URL", help="The chain's RPC endpoint, if not the network's.")
    ] = "",
    listen: ListenOption = DEFAULT_LISTEN,
    endpoint: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make a key and a configuration for the network of a storage gateway.

    Everything but the memory and a passphrase comes from there. Without a terminal the key gets a
    random passphrase. The network decides where your stake goes: take the URL from its operator.
    """
    passphrase = ""
    if sys.stdin.isatty():
        vram = vram or typer.prompt("Device memory to serve with, such as 8GB", err=True)
        passphrase = typer.prompt(
            "Passphrase of the node's key (leave it empty for a random one)",
            default="",
            show_default=False,
            hide_input=True,
            confirmation_prompt="The same again",
            err=True,  # stdout is the result's, which may be JSON
        )
    options = JoinOptions(url, data_dir, vram, passphrase, rpc_url, listen, endpoint)
    run_and_print(lambda: join(options), _show, as_json)


def join(options: JoinOptions) -> dict[str, Any]:
    """Write the node's files; return where they are, and what the network is."""
    from splitup.core import event_loop
    from splitup.core.errors import ConfigurationError

    url = options.url.rstrip("/")
    is_local = _is_local(url)
    if not is_local and not url.startswith("https://"):
        raise ConfigurationError(
            f"{url:.200} is not an https:// URL; over plain HTTP anybody on the way could name "
            "other contracts for your stake"
        )
    if not options.vram:
        raise ConfigurationError('name the memory to serve with, for example: --vram "8GB"')
    return event_loop.run(_join(url, options, is_local))


async def _join(url: str, options: JoinOptions, is_local: bool) -> dict[str, Any]:
    from splitup.chain.client import Chain
    from splitup.chain.deployment import Deployment
    from splitup.config import NetworkConfig
    from splitup_node.cli.node_setup import create_node

    told = await _fetch_description(url)
    rpc_url = options.rpc_url or check_rpc_url(url, told, is_local=is_local)
    deployment = Deployment.from_message(told.contracts)
    async with await Chain.connect(rpc_url, deployment) as chain:
        with _save(deployment, options.data_dir) as file:
            made = create_node(
                options.data_dir,
                NetworkConfig(rpc_url=rpc_url, deployment=file, gateway_urls=told.gateway_urls),
                vram=options.vram,
                listen=options.listen,
                endpoint=options.endpoint,
                allow_loopback=is_local,
                passphrase=options.passphrase,
            )
        stake: int = await chain.call("nodes", "minStake", made.vram_gb)
    return {
        "config": str(made.config_path),
        "address": made.address,
        "vram_gb": made.vram_gb,
        "stake_micro_usdc": stake,
        "network": asdict(deployment),
    }


def check_rpc_url(url: str, told: NetworkDescription, *, is_local: bool) -> str:
    """Return the RPC endpoint that a network names; raise ConfigurationError for an unsafe one."""
    from splitup.core.errors import ConfigurationError

    if not told.rpc_url:
        raise ConfigurationError(
            f"the network at {url} names no RPC endpoint of its chain "
            f"{told.contracts.chain_id}; give one with --rpc-url"
        )
    if not is_local and not told.rpc_url.startswith(("https://", "wss://")):
        raise ConfigurationError(
            f"the network at {url} names the RPC endpoint {told.rpc_url:.200}, whose answers "
            "anybody on the way could change; give another one with --rpc-url"
        )
    return told.rpc_url


async def _fetch_description(url: str) -> NetworkDescription:
    from splitup.messages import api
    from splitup.messages.network import NetworkDescription
    from splitup.net.http import SignedClient

    async with SignedClient() as http:
        return NetworkDescription.from_value(await http.get_json(api.NETWORK.url(url)))


@contextmanager
def _save(deployment: Deployment, directory: Path) -> Iterator[Path]:
    """Write the deployment's file; take it away again when the rest fails."""
    from splitup.chain.deployment import Deployment
    from splitup.core.errors import ConfigurationError

    file = directory / "deployment.json"
    if file.exists():
        if Deployment.load(file) != deployment:
            raise ConfigurationError(f"{file} is of another network; choose another --data-dir")
        yield file
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        deployment.save(file)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to {directory} ({error.strerror}); choose another --data-dir"
        ) from None
    try:
        yield file
    except BaseException:
        file.unlink()
        raise


def _is_local(url: str) -> bool:
    """Return whether a URL names this machine, or a private network's."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not address.is_unspecified


def _show(result: dict[str, Any], console: Console) -> None:
    from splitup.client.inputs import format_usdc

    network = result["network"]
    console.print(f"Made node [bold]{result['address']}[/] for {result['vram_gb']} GB.")
    console.print(
        f"Network: chain {network['chain_id']}, nodes' stakes in contract {network['nodes']}",
        soft_wrap=True,
    )
    console.print(
        f"Next: send it {format_usdc(result['stake_micro_usdc'])} for its stake, and ether for gas."
    )
    console.print("Then put down the stake, and serve:")
    for verb in ("stake", "run"):
        console.print(f"  splitup-node {verb} --config {result['config']}", soft_wrap=True)
