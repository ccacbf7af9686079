"""``splitup withdraw``: USDC from the market back into the wallet."""

from __future__ import annotations

from typing import Annotated

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, JsonFlag


def command(
    amount: Annotated[
        str | None,
        typer.Argument(metavar="[AMOUNT]", help="USDC to take out (default: all of the deposit)."),
    ] = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Move USDC of your deposit from the market back into your wallet.

    What open executions have locked stays there until they are settled. What a command that was
    killed left locked is fetched back first, once its deadline and the time for its settlement are
    over.
    """
    output = Output.open(as_json)

    def run() -> None:
        from splitup.client.connection import SplitUp
        from splitup.client.inputs import format_usdc
        from splitup.core import event_loop

        async def withdraw() -> int:
            async with SplitUp.connect(config) as net:
                return await net.withdraw(amount)

        taken = event_loop.run(withdraw())
        if output.as_json:
            output.print_json({"withdrawn_micro_usdc": taken})
        else:
            output.out.print(f"{format_usdc(taken)} withdrawn into your wallet")

    run_command(output, run)
