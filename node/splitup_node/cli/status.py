"""``splitup-node status``: what the chain knows of the node, and what the node is doing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """Which node to look at."""

    config: Path


def status_command(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show what the chain knows of the node, and what the node is doing."""
    options = StatusOptions(config)
    run_and_print(lambda: fetch_status(options), partial(_show, config), as_json)


def fetch_status(options: StatusOptions) -> dict[str, Any]:
    """Return what the chain and the status file say."""
    from splitup_node.owner_facts import fetch_facts

    return run_with_account(options.config, lambda account: fetch_facts(account, options.config))


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
