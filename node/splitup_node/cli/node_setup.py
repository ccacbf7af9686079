"""``splitup-node init`` and ``join``: a key, its passphrase and a commented configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import ask, ask_passphrase

if TYPE_CHECKING:
    from splitup.config import NetworkConfig

CONFIG_NAME: Final = "node.toml"
_DEFAULT_LISTEN: Final = "127.0.0.1:7700"
_DataDirOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Directory for all of the node's files.")
]
_VramOption = Annotated[
    str, typer.Option(metavar="SIZE", help='Device memory to serve with, for example "8GB".')
]
_ListenOption = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")]
_EndpointOption = Annotated[
    str,
    typer.Option(metavar="URL", help="How others reach the node, if it is not what it listens on."),
]


def create_node(
    directory: Path,
    network: NetworkConfig,
    *,
    passphrase: Callable[[], str] = str,
    **settings: str | bool,
) -> dict[str, Any]:
    """Write node.toml, keystore.json and passphrase into ``directory``; see ``create_party``.

    ``settings`` are vram, listen, endpoint and allow_loopback. Returns the configuration's path,
    the address, and the gigabytes to stake for. Raises ConfigurationError also when a value is not
    usable.
    """
    from splitup.storage.private_files import create_party
    from splitup_node.config import NodeConfig, format_config
    from splitup_node.preflight import check_settings

    path = directory / CONFIG_NAME
    text = format_config(
        path,
        {
            "rpc_url": network.rpc_url,
            # a name where it lies beside node.toml: the directory may move to another place
            "deployment": os.path.abspath(network.deployment).removeprefix(
                os.path.abspath(directory) + os.sep
            ),
            "gateway_urls": network.gateway_urls,
            "keystore": "keystore.json",
            "passphrase_file": "passphrase",
            "data_dir": "data",
            **settings,
        },
    )

    def check(draft: Path) -> None:
        check_settings(NodeConfig.load(draft, from_flags=True), from_flags=True)

    identity = create_party(directory, path.name, text, passphrase=passphrase, check=check)
    vram_gb = NodeConfig.load(path).vram_gb
    return {"config": str(path), "address": identity.address, "vram_gb": vram_gb}


@as_command
def init(
    data_dir: _DataDirOption,
    vram: _VramOption,
    rpc_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The chain's RPC endpoint.")
    ] = None,
    deployment: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file with the contracts' addresses.")
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(metavar="URLS", help="The storage gateways' URLs, with commas.")
    ] = None,
    listen: _ListenOption = _DEFAULT_LISTEN,
    endpoint: _EndpointOption = "",
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

    At a terminal it asks for the key's passphrase; elsewhere, or if empty, the key gets a random
    one. What is not given comes from the network file that 'splitup up' writes, when there is one.
    """
    from splitup.config import NetworkConfig

    network = NetworkConfig.load(None, rpc_url=rpc_url, deployment=deployment, gateway_urls=gateway)
    result = create_node(
        data_dir,
        network,
        vram=vram,
        listen=listen,
        endpoint=endpoint,
        allow_loopback=network.allow_loopback if allow_loopback is None else allow_loopback,
        passphrase=lambda: ask_passphrase("node", data_dir / CONFIG_NAME),
    )
    output.give(result, lambda: _show_made(result, output.out))


def _show_made(result: dict[str, Any], console: Console) -> None:
    console.print(f"Made node {result['address']} for {result['vram_gb']} GB.")
    _show_fund(result["address"], "Next: send USDC and ether to it", console)
    console.print("Then put down the stake with:")
    console.print(f"  splitup-node stake --config {result['config']}")


def _show_fund(address: str, step: str, console: Console) -> None:
    console.print(f"{step}; on a network that 'splitup up' runs, with:")
    console.print(f"  splitup fund {address}")


@as_command
async def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="A storage gateway of the network.")],
    data_dir: _DataDirOption = Path("splitup-node"),
    vram: _VramOption = "",
    rpc_url: Annotated[
        str, typer.Option(metavar="URL", help="The chain's RPC endpoint, if not the network's.")
    ] = "",
    listen: _ListenOption = _DEFAULT_LISTEN,
    endpoint: _EndpointOption = "",
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
    from splitup.storage.private_files import check_unused

    check_unused(data_dir, CONFIG_NAME)
    if not (vram or sys.stdin.isatty()):
        raise ConfigurationError('name the memory to serve with, for example: --vram "8GB"')
    async with join_network(url, data_dir, rpc_url) as (network, chain):
        vram = vram or ask("Device memory to serve with, such as 8GB")
        made = create_node(
            data_dir,
            network,
            vram=vram,
            listen=listen,
            endpoint=endpoint,
            allow_loopback=network.allow_loopback,
            passphrase=lambda: ask_passphrase("node", data_dir / CONFIG_NAME),
        )
        least: int = await chain.call("nodes", "minStake", made["vram_gb"])
        deployment = chain.deployment
    result = {
        **made,
        "stake_micro_usdc": least + compute_spare(least),
        "network": deployment.model_dump(),
    }
    output.give(result, lambda: _show_joined(result, network.allow_loopback, output.out))


def _show_joined(result: dict[str, Any], is_local: bool, console: Console) -> None:
    from splitup.client.inputs import format_usdc

    network = result["network"]
    console.print(f"Made node {result['address']} for {result['vram_gb']} GB.")
    console.print(
        f"Network: chain {network['chain_id']}, nodes' stakes in contract {network['nodes']}",
    )
    needed = f"{format_usdc(result['stake_micro_usdc'])} for its stake, and ether for gas"
    if is_local:
        _show_fund(result["address"], f"Next: send it {needed}", console)
    else:
        console.print(f"Next: send it {needed}.")
    console.print("Then put down the stake, and serve:")
    for verb in ("stake", "run"):
        console.print(f"  splitup-node {verb} --config {result['config']}")
