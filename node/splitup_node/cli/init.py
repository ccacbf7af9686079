"""``splitup-node init``: make a key and a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup_node.cli.account import DEFAULT_LISTEN, EndpointOption, ListenOption


@as_command
def command(
    data_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for all of the node's files.")
    ],
    vram: Annotated[
        str, typer.Option(metavar="SIZE", help='Device memory to serve with, for example "8GB".')
    ],
    rpc_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The chain's RPC endpoint.")
    ] = None,
    deployment: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file with the contracts' addresses.")
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(metavar="URLS", help="The storage gateways' URLs, with commas.")
    ] = None,
    listen: ListenOption = DEFAULT_LISTEN,
    endpoint: EndpointOption = "",
    allow_loopback: Annotated[
        bool | None,
        typer.Option(
            "--allow-loopback/--no-allow-loopback",
            show_default=False,
            help="Accept peers on loopback and private addresses (default: as the network does).",
        ),
    ] = None,
    *,
    output: JsonOutput,
) -> None:
    """Make a key and a configuration.

    What is not given comes from the network file that 'splitup up' writes, when there is one.
    """
    from splitup.config import NetworkConfig
    from splitup_node.cli.node_setup import create_node

    network = NetworkConfig.load(None, rpc_url=rpc_url, deployment=deployment, gateway_urls=gateway)
    made = create_node(
        data_dir,
        network,
        vram=vram,
        listen=listen,
        endpoint=endpoint,
        allow_loopback=network.allow_loopback if allow_loopback is None else allow_loopback,
    )
    result = {"config": str(made.config_path), "address": made.address, "vram_gb": made.vram_gb}
    output.give(result, lambda: _show(result, output.out))


def _show(result: dict[str, Any], console: Console) -> None:
    console.print(f"Made node {result['address']} for {result['vram_gb']} GB.")
    console.print("Next: send USDC and ether to it; on a network that 'splitup up' runs, with:")
    console.print(f"  splitup fund {result['address']}", soft_wrap=True)
    console.print("Then put down the stake with:")
    console.print(f"  splitup-node stake --config {result['config']}", soft_wrap=True)
