"""``splitup-node status``, ``earnings`` and ``top``: how the node is, and what it was paid."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console, Group

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output, print_table
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account

if TYPE_CHECKING:
    from rich.table import Table

    from splitup_node.settlement.account import Account

_MOST_DAYS: Final = 92
_COLUMNS: Final = ("executions", "paid", "rewards", "slashed")
_PERIOD_S: Final = 1.0  # in which the daemon writes its status
_EARNINGS_S: Final = 30.0  # they take several requests to the chain
_DAYS: Final = 7


@as_command(hint="asking the chain")
async def status(config: ConfigOption = DEFAULT_CONFIG, *, output: JsonOutput) -> None:
    """Show what the chain knows of the node, and what the node is doing."""
    from splitup_node.owner_facts import fetch_facts

    async with open_account(config) as account:
        facts = await fetch_facts(account, config)
    output.give(facts, lambda: _show_status(config, facts, output.out))


def _show_status(config: Path, result: dict[str, Any], console: Console) -> None:
    from splitup_node.owner_facts import list_rows

    rows = list_rows(result, config, time.time())
    width = max(len(name) for name, _ in rows)
    for name, text in rows:  # without wrapping: commands in it are copied
        console.print(f" {name:<{width}}  {text}")


def make_status_table(config: Path, facts: dict[str, Any]) -> Table:
    """Return the facts as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    from splitup_node.owner_facts import list_rows

    table = Table(show_header=False, box=None)
    for name, text in list_rows(facts, config, time.time()):
        table.add_row(name, Text(text))
    return table


@as_command(hint="asking the chain")
async def earnings(
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
    output.give(found, lambda: _show_earnings(found, output.out))


def _show_earnings(result: dict[str, Any], console: Console) -> None:
    from splitup_node.owner_facts import describe_money

    if any(day[column] for day in result["days"] for column in _COLUMNS):
        print_table(console, make_earnings_table(result["days"]))
    else:
        console.print(f"nothing was earned or lost since {result['days'][0]['date']}")
    console.print(f"ready to withdraw: {describe_money(result)}")


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


@as_command(hint="asking the chain")
def top(config: ConfigOption = DEFAULT_CONFIG, *, output: Output) -> None:
    """Show what status and earnings say, live, until Ctrl-C."""
    from splitup.core import event_loop
    from splitup.core.errors import InvalidInput

    if not output.out.is_terminal or output.out.is_dumb_terminal:
        raise InvalidInput(
            "top needs a terminal that it can redraw (TERM is not 'dumb'); elsewhere use: "
            "splitup-node status --json"
        )

    async def watch() -> None:
        async with open_account(config) as account:
            await _watch(account, config, output.out)

    with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
        event_loop.run(watch())


async def _watch(account: Account, config: Path, console: Console) -> None:
    """Redraw without end; while the chain is silent what it said last stays."""
    from rich.live import Live
    from rich.text import Text

    from splitup.core.errors import Unavailable
    from splitup_node.owner_facts import fetch_facts

    facts: dict[str, Any] = {}
    days: list[dict[str, Any]] = []
    asked_s = -_EARNINGS_S
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            problem = ""
            try:
                facts = await fetch_facts(account, config)
                if time.monotonic() - asked_s >= _EARNINGS_S:
                    days = (await account.fetch_earnings(_DAYS, time.time()))["days"]
                    asked_s = time.monotonic()
            except Unavailable as error:
                problem = f"{error}; these figures are old"
            now = time.strftime("%H:%M:%S")
            head = Text(problem, "bold red") if problem else Text(f"{now}, Ctrl-C: leave", "dim")
            parts = [make_earnings_table(days)] if days else []
            parts += [make_status_table(config, facts)] if facts else []  # the longest, cut below
            live.update(Group(head, *parts), refresh=True)
            await asyncio.sleep(_PERIOD_S)
