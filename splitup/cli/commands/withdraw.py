"""``splitup withdraw``: USDC from the market back into the wallet."""

from __future__ import annotations

from typing import Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.options import ConfigFlag


@as_command
async def command(
    amount: Annotated[
        str | None,
        typer.Argument(metavar="[AMOUNT]", help="USDC to take out (default: all of the deposit)."),
    ] = None,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Move USDC of your deposit from the market back into your wallet.

    What open executions have locked stays there until they are settled. What a command that was
    killed left locked is fetched back first, once its deadline and the time for its settlement are
    over.
    """
    from splitup.client.connection import SplitUp
    from splitup.client.inputs import format_usdc

    async with SplitUp.connect(config) as net:
        taken = await net.withdraw(amount)
    output.give(
        {"withdrawn_micro_usdc": taken},
        lambda: output.out.print(f"{format_usdc(taken)} withdrawn into your wallet"),
    )
