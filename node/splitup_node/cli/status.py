"""``splitup-node status``: what the chain knows of the node, and what the node is doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account

if TYPE_CHECKING:
    from rich.table import Table


@as_command
async def command(config: ConfigOption = DEFAULT_CONFIG, *, output: JsonOutput) -> None:
    """Show what the chain knows of the node, and what the node is doing."""
    from splitup_node.owner_facts import fetch_facts

    async with open_account(config) as account:
        facts = await fetch_facts(account, config)
    output.give(facts, lambda: _show(config, facts, output.out))


def _show(config: Path, result: dict[str, Any], console: Console) -> None:
    from splitup_node.owner_facts import list_rows

    rows = list_rows(result, config, time.time())
    width = max(len(name) for name, _ in rows)
    for name, text in rows:  # without wrapping: commands in it are copied
        console.print(f" {name:<{width}}  {text}", soft_wrap=True)


def make_status_table(config: Path, facts: dict[str, Any]) -> Table:
    """Return the facts as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    from splitup_node.owner_facts import list_rows

    table = Table(show_header=False, box=None)
    for name, text in list_rows(facts, config, time.time()):
        table.add_row(name, Text(text))
    return table
