"""``splitup-node join``: make a key and a configuration for the network behind one URL."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup.cli.console import ask_passphrase
from splitup_node.cli.command import (
    DEFAULT_LISTEN,
    EndpointOption,
    JsonOption,
    ListenOption,
    run_and_print,
)


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
        passphrase = ask_passphrase("node")
    options = JoinOptions(url, data_dir, vram, passphrase, rpc_url, listen, endpoint)
    run_and_print(lambda: join(options), _show, as_json)


def join(options: JoinOptions) -> dict[str, Any]:
    """Write the node's files; return where they are, and what the network is."""
    from splitup.core import event_loop
    from splitup.core.errors import ConfigurationError

    if not options.vram:
        raise ConfigurationError('name the memory to serve with, for example: --vram "8GB"')
    return event_loop.run(_join(options))


async def _join(options: JoinOptions) -> dict[str, Any]:
    from splitup.client.joining import join_network
    from splitup.protocol.planning.exposure import compute_spare
    from splitup_node.cli.node_setup import create_node

    async with join_network(options.url, options.data_dir, options.rpc_url) as (network, chain):
        made = create_node(
            options.data_dir,
            network,
            vram=options.vram,
            listen=options.listen,
            endpoint=options.endpoint,
            allow_loopback=network.allow_loopback,
            passphrase=options.passphrase,
        )
        least: int = await chain.call("nodes", "minStake", made.vram_gb)
        deployment = chain.deployment
    return {
        "config": str(made.config_path),
        "address": made.address,
        "vram_gb": made.vram_gb,
        "stake_micro_usdc": least + compute_spare(least),
        "network": asdict(deployment),
    }


def _show(result: dict[str, Any], console: Console) -> None:
    from splitup.client.inputs import format_usdc

    network = result["network"]
    console.print(f"Made node {result['address']} for {result['vram_gb']} GB.")
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
