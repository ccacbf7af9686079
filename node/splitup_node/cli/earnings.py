"""``splitup-node earnings``: what the node was paid, and what it lost, by day."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from splitup_node.cli.command import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    run_and_print,
    run_with_account,
)

if TYPE_CHECKING:
    from rich.table import Table

_MOST_DAYS: Final = 92
_COLUMNS: Final = ("executions", "paid", "rewards", "slashed")


@dataclass(frozen=True, slots=True)
class EarningsOptions:
    """Which node, and how many days up to today."""

    config: Path
    days: int


def earnings_command(
    config: ConfigOption = DEFAULT_CONFIG,
    days: Annotated[
        int, typer.Option(metavar="N", min=1, max=_MOST_DAYS, help="How many days up to today.")
    ] = 7,
    as_json: JsonOption = False,
) -> None:
    """Show what the node was paid, and what it lost, by day (UTC).

    The figures come from the chain: of settled executions, when they were settled.
    """
    options = EarningsOptions(config, days)
    run_and_print(lambda: fetch_earnings(options), _show, as_json)


def fetch_earnings(options: EarningsOptions) -> dict[str, Any]:
    """Return the days, the earliest first, and what is ready to withdraw, in micro-USDC."""
    return run_with_account(
        options.config, lambda account: account.fetch_earnings(options.days, time.time())
    )


def _show(result: dict[str, Any], console: Console) -> None:
    from splitup_node.owner_facts import describe_money

    if any(day[column] for day in result["days"] for column in _COLUMNS):
        console.print(make_earnings_table(result["days"]))
    else:
        console.print(f"nothing was earned or lost since {result['days'][0]['date']}")
    console.print(f"ready to withdraw: {describe_money(result)}", soft_wrap=True)


def make_earnings_table(days: Sequence[dict[str, Any]]) -> Table:
    """Return the days and their sum as a table for a terminal."""
    from rich.table import Table

    from splitup.client.inputs import format_usdc

    table = Table(box=None)
    table.add_column("day")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    total = {column: sum(day[column] for day in days) for column in _COLUMNS}
    for row in [*days, {"date": "together", **total}]:
        amounts = (format_usdc(row[column]) for column in _COLUMNS[1:])
        table.add_row(row["date"], f"{row['executions']:,}", *amounts)
    return table
