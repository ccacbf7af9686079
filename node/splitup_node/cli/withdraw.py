"""``splitup-node withdraw``: take out USDC that is ready, or the stake after unbonding."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account


@as_command
async def command(
    config: ConfigOption = DEFAULT_CONFIG,
    stake: Annotated[bool, typer.Option("--stake", help="The stake, after unbonding.")] = False,
    balance: Annotated[
        bool, typer.Option("--balance", help="The USDC that is ready to withdraw.")
    ] = False,
    *,
    output: JsonOutput,
) -> None:
    """Take out the USDC that is ready to withdraw (the default), the stake, or both."""
    async with open_account(config) as account:
        taken = await account.withdraw(stake, balance or not stake)
    output.give(taken, lambda: _show(taken, output.out))


def _show(result: dict[str, Any], console: Console) -> None:
    from splitup.client.inputs import format_usdc

    for name, what in (("balance", "payments"), ("stake", "stake")):
        amount = result[f"{name}_micro_usdc"]
        if amount:
            console.print(f"Withdrew {format_usdc(amount)} of {what}.")
    if not any(result.values()):
        console.print("Nothing is ready to withdraw.")
