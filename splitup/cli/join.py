"""``splitup join``: a key and a configuration of one's own for the network behind one URL."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from splitup.cli.console import Output, ask_passphrase, run_command
from splitup.cli.options import DirFlag, JsonFlag
from splitup.config import DEFAULT_HOME, NETWORK_FILE


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="A storage gateway of the network.")],
    directory: DirFlag = DEFAULT_HOME,
    rpc_url: Annotated[
        str,
        typer.Option(
            "--rpc-url", metavar="URL", help="The chain's RPC endpoint, if not the network's."
        ),
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Make a key and a configuration for the network of a storage gateway.

    At a terminal it asks for the key's passphrase; elsewhere, or if empty, the key gets a random
    one. The network decides where your money goes: take the URL from its operator.
    """
    output = Output.open(as_json)

    def run() -> None:
        from splitup.client.joining import join_network
        from splitup.core import event_loop
        from splitup.core.errors import ConfigurationError
        from splitup.crypto.keystore import create_identity, create_passphrase
        from splitup.devnet.state import write_json

        async def join() -> str:
            files = {
                "user_keystore": directory / "keystore.json",
                "user_passphrase_file": directory / "passphrase",
            }
            for path in (directory / NETWORK_FILE, *files.values()):
                if path.exists():
                    raise ConfigurationError(
                        f"{path} exists already; use it, or choose another directory with --dir"
                    )
            passphrase = ask_passphrase("account") if sys.stdin.isatty() else ""
            async with join_network(url, directory, rpc_url) as (network, _):
                create_passphrase(files["user_passphrase_file"], passphrase)
                identity = create_identity(files["user_keystore"], files["user_passphrase_file"])
                values = network.model_dump(mode="json", include={"rpc_url", "gateway_urls"})
                values["allow_loopback"] = network.allow_loopback
                paths = {"deployment": network.deployment} | files
                values |= {name: path.name for name, path in paths.items()}
                write_json(directory / NETWORK_FILE, values)
            return identity.address

        address = event_loop.run(join())
        if as_json:
            output.print_json({"config": str(directory / NETWORK_FILE), "address": address})
            return
        option = "" if directory == DEFAULT_HOME else f" --config {directory}"
        for line in (
            f"Made account {address}; its key is {directory / 'keystore.json'}.",
            "Next: send it USDC, and ether for gas. Then put USDC into the market, and use it:",
            f"  splitup deposit 5{option}",
            f"  splitup generate MODEL --prompt TEXT{option}",
        ):
            output.out.print(line, soft_wrap=True)

    run_command(output, run)
