"""``splitup join``: a key and a configuration of one's own for the network behind one URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output, ask_passphrase
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME, NETWORK_FILE


@as_command
async def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="A storage gateway of the network.")],
    directory: DirFlag = DEFAULT_HOME,
    rpc_url: Annotated[
        str, typer.Option(metavar="URL", help="The chain's RPC endpoint, if not the network's.")
    ] = "",
    *,
    output: JsonOutput,
) -> None:
    """Make a key and a configuration for the network of a storage gateway.

    At a terminal it asks for the key's passphrase; elsewhere, or if empty, the key gets a random
    one. The network decides where your money goes: take the URL from its operator.
    """
    from splitup.client.joining import join_network
    from splitup.storage.private_files import create_party

    async with join_network(url, directory, rpc_url) as (network, _):
        values = network.model_dump(mode="json", include={"rpc_url", "gateway_urls"})
        values |= {
            "allow_loopback": network.allow_loopback,
            "deployment": network.deployment.name,
            "user_keystore": "keystore.json",
            "user_passphrase_file": "passphrase",
        }
        text = json.dumps(values, indent=2) + "\n"
        identity = create_party(
            directory,
            NETWORK_FILE,
            text,
            passphrase=lambda: ask_passphrase("account", directory / NETWORK_FILE),
            option="--dir",
        )
    made = {"config": str(directory / NETWORK_FILE), "address": identity.address}
    fund = f" (on a network of your own: splitup fund {identity.address})"
    is_local = network.allow_loopback
    output.give(made, lambda: _show(output, directory, identity.address, fund if is_local else ""))


def _show(output: Output, directory: Path, address: str, fund: str) -> None:
    option = "" if directory == DEFAULT_HOME else f" --config {directory}"
    for line in (
        f"Made account {address}; its key is {directory / 'keystore.json'}.",
        f"Next: send it USDC, and ether for gas{fund}. Then put USDC into the market, and use it:",
        f"  splitup deposit 5{option}",
        f"  splitup generate MODEL --prompt TEXT{option}",
    ):
        output.out.print(line)
