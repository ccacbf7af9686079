"""``splitup-node withdraw``: take out USDC that is ready, or the stake after unbonding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup_node.cli.command import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    run_and_print,
    run_with_account,
)


@dataclass(frozen=True, slots=True)
class WithdrawOptions:
    """What to take out of which node's account."""

    config: Path
    stake: bool
    balance: bool


def withdraw_command(
    config: ConfigOption = DEFAULT_CONFIG,
    stake: Annotated[bool, typer.Option("--stake", help="The stake, after unbonding.")] = False,
    balance: Annotated[
        bool, typer.Option("--balance", help="The USDC that is ready to withdraw.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Take out the USDC that is ready to withdraw (the default), the stake, or both."""
    options = WithdrawOptions(config, stake, balance or not stake)
    run_and_print(lambda: withdraw(options), _show, as_json)


def withdraw(options: WithdrawOptions) -> dict[str, Any]:
    """Send the transactions; return the amounts."""
    return run_with_account(
        options.config, lambda account: account.withdraw(options.stake, options.balance)
    )


def _show(result: dict[str, Any], console: Console) -> None:
    from splitup.client.inputs import format_usdc

    for name, what in (("balance", "payments"), ("stake", "stake")):
        amount = result[f"{name}_micro_usdc"]
        if amount:
            console.print(f"Withdrew {format_usdc(amount)} of {what}.")
    if not any(result.values()):
        console.print("Nothing is ready to withdraw.")
