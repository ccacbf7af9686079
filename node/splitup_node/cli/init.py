"""``splitup-node init``: make a key and a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup_node.cli.command import (
    DEFAULT_LISTEN,
    EndpointOption,
    JsonOption,
    ListenOption,
    run_and_print,
)


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The options of ``splitup-node init``; None means: as the network's file says."""

    data_dir: Path
    vram: str
    rpc_url: str | None = None
    deployment: Path | None = None
    gateway: str | None = None
    listen: str = DEFAULT_LISTEN
    endpoint: str = ""
    allow_loopback: bool | None = None


def init_command(
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
    as_json: JsonOption = False,
) -> None:
    """Make a key and a configuration.

    What is not given comes from the network file that 'splitup up' writes, when there is one.
    """
    options = InitOptions(
        data_dir, vram, rpc_url, deployment, gateway, listen, endpoint, allow_loopback
    )
    run_and_print(lambda: init(options), _show, as_json)


def init(options: InitOptions) -> dict[str, Any]:
    """Write the node's files; return where they are and whose key it is."""
    from splitup.config import NetworkConfig
    from splitup_node.cli.node_setup import create_node

    network = NetworkConfig.load(
        None,
        rpc_url=options.rpc_url,
        deployment=options.deployment,
        gateway_urls=options.gateway,
    )
    allow_loopback = options.allow_loopback
    made = create_node(
        options.data_dir,
        network,
        vram=options.vram,
        listen=options.listen,
        endpoint=options.endpoint,
        allow_loopback=network.allow_loopback if allow_loopback is None else allow_loopback,
    )
    return {"config": str(made.config_path), "address": made.address, "vram_gb": made.vram_gb}


def _show(result: dict[str, Any], console: Console) -> None:
    console.print(f"Made node {result['address']} for {result['vram_gb']} GB.")
    console.print("Next: send USDC and ether to it; on a network that 'splitup up' runs, with:")
    console.print(f"  splitup fund {result['address']}", soft_wrap=True)
    console.print("Then put down the stake with:")
    console.print(f"  splitup-node stake --config {result['config']}", soft_wrap=True)
