"""``splitup-node join``: make a key and a configuration for the network behind one URL."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import ask_passphrase
from splitup_node.cli.account import DEFAULT_LISTEN, EndpointOption, ListenOption


@as_command
async def command(
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
    *,
    output: JsonOutput,
) -> None:
    """Make a key and a configuration for the network of a storage gateway.

    Everything but the memory and a passphrase comes from there. Without a terminal the key gets a
    random passphrase. The network decides where your stake goes: take the URL from its operator.
    """
    from splitup.client.joining import join_network
    from splitup.core.errors import ConfigurationError
    from splitup.protocol.planning.exposure import compute_spare
    from splitup_node.cli.node_setup import create_node

    is_terminal = sys.stdin.isatty()
    if not (vram or is_terminal):
        raise ConfigurationError('name the memory to serve with, for example: --vram "8GB"')
    async with join_network(url, data_dir, rpc_url) as (network, chain):
        if is_terminal:
            vram = vram or typer.prompt("Device memory to serve with, such as 8GB", err=True)
        passphrase = ask_passphrase("node") if is_terminal else ""
        made = create_node(
            data_dir,
            network,
            vram=vram,
            listen=listen,
            endpoint=endpoint,
            allow_loopback=network.allow_loopback,
            passphrase=passphrase,
        )
        least: int = await chain.call("nodes", "minStake", made.vram_gb)
        deployment = chain.deployment
    result = {
        "config": str(made.config_path),
        "address": made.address,
        "vram_gb": made.vram_gb,
        "stake_micro_usdc": least + compute_spare(least),
        "network": asdict(deployment),
    }
    output.give(result, lambda: _show(result, output.out))


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
