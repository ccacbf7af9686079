"""``splitup deposit``: USDC from the wallet into the market."""

from __future__ import annotations

from typing import Annotated

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, JsonFlag


def command(
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="USDC to move from your wallet into the market.")
    ],
    freeze: Annotated[
        float | None,
        typer.Option(
            "--freeze",
            metavar="SECONDS",
            help="Reserve the balance for signed requests for so many seconds.",
        ),
    ] = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Move USDC into the market for later executions.

    With --freeze executions start without waiting for a block; until it ends the balance can
    neither be withdrawn nor spent otherwise.
    """
    output = Output.open(as_json)

    def run() -> None:
        from splitup.client.connection import SplitUp
        from splitup.client.inputs import parse_usdc
        from splitup.core import event_loop

        async def deposit() -> int | None:
            async with SplitUp.connect(config) as net:
                if parse_usdc(amount, name="AMOUNT") or freeze is None:
                    await net.deposit(amount)
                return None if freeze is None else await net.freeze(freeze)

        until = event_loop.run(deposit())
        if output.as_json:
            output.print_json({"deposited_usdc": amount, "frozen_until": until})
        else:
            kept = "" if freeze is None else f"; the balance is frozen for {freeze:g} s"
            output.out.print(f"{amount} USDC deposited in the market{kept}")

    run_command(output, run)
