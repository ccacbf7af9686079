"""``splitup fund``: test money of a network on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME


@as_command
def command(
    account: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address of the account, 0x and 40 digits.")
    ],
    amount: Annotated[
        str, typer.Option("--usdc", metavar="AMOUNT", help="Test USDC to give.")
    ] = "2000",
    directory: DirFlag = DEFAULT_HOME,
    *,
    output: Output,
) -> None:
    """Give an account test USDC, and ether for gas if it has none, on a network of this machine.

    A node of your own can stake it there. On a real network USDC and ether have to be bought.
    """
    from splitup.client.inputs import parse_usdc
    from splitup.devnet.commands import fund

    fund(directory, account, parse_usdc(amount, name="--usdc"))
    output.say(f"{account} received {amount} test USDC and has ether for gas")
