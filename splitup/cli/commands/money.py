"""``splitup deposit`` and ``withdraw``: USDC between the wallet and the market."""

from __future__ import annotations

from typing import Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.options import ConfigFlag


@as_command(hint="asking the chain")
async def deposit(
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="USDC to move from your wallet into the market.")
    ],
    freeze: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Reserve the balance for signed requests for so many seconds."
        ),
    ] = None,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Move USDC into the market for later executions.

    With --freeze executions start without waiting for a block; until it ends the balance can
    neither be withdrawn nor spent otherwise.
    """
    from splitup.client.connection import SplitUp
    from splitup.client.inputs import parse_usdc

    async with SplitUp.connect(config) as net:
        if parse_usdc(amount, name="AMOUNT") or freeze is None:
            await net.deposit(amount)
        until = None if freeze is None else await net.freeze(freeze)
    kept = "" if freeze is None else f"; the balance is frozen for {freeze:g} s"
    output.give(
        {"deposited_usdc": amount, "frozen_until": until},
        lambda: output.out.print(f"{amount} USDC deposited in the market{kept}"),
    )


@as_command(hint="asking the chain")
async def withdraw(
    amount: Annotated[
        str | None,
        typer.Argument(metavar="AMOUNT", help="USDC to take out (default: all of the deposit)."),
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
