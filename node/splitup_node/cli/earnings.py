"""``splitup-node earnings``: what the node was paid, and what it lost, by day."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account

if TYPE_CHECKING:
    from rich.table import Table

_MOST_DAYS: Final = 92
_COLUMNS: Final = ("executions", "paid", "rewards", "slashed")


@as_command
async def command(
    config: ConfigOption = DEFAULT_CONFIG,
    days: Annotated[
        int, typer.Option(metavar="N", min=1, max=_MOST_DAYS, help="How many days up to today.")
    ] = 7,
    *,
    output: JsonOutput,
) -> None:
    """Show what the node was paid, and what it lost, by day (UTC).

    The figures come from the chain: of settled executions, when they were settled.
    """
    async with open_account(config) as account:
        found = await account.fetch_earnings(days, time.time())
    output.give(found, lambda: _show(found, output.out))


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
