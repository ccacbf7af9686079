"""``splitup-node status``: what the chain knows of the node, and what the node is doing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from splitup_node.cli.command import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    run_and_print,
    run_with_account,
)


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
    from splitup_node.config import NodeConfig
    from splitup_node.obstacles import list_obstacles
    from splitup_node.status_file import read_status

    config = NodeConfig.load(options.config)
    chain = run_with_account(options.config, lambda account: account.fetch())
    node = read_status(config.data_dir)
    obstacles = list_obstacles(chain, node, options.config)
    return {"chain": chain, "node": node.to_dict(), "obstacles": obstacles}


def _show(config: Path, result: dict[str, Any], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from splitup.client.inputs import format_usdc
    from splitup_node.status_file import NodeStatus

    chain, node = result["chain"], NodeStatus.from_dict(result["node"])
    table = Table(show_header=False, box=None)
    table.add_row("address", chain["address"])
    state = "active" if chain["active"] else "not registered"
    if chain["stake_micro_usdc"] and not chain["active"]:
        state = "leaving" if chain["unbonding_at_s"] else "inactive"
    locked = chain["locked_micro_usdc"]
    locks = f", {format_usdc(locked)} locked" if locked else ""
    table.add_row("stake", f"{format_usdc(chain['stake_micro_usdc'])} ({state}{locks})")
    if chain["unbonding_at_s"]:
        left_s = max(0, chain["unbonding_at_s"] - int(time.time()))
        table.add_row("unbonding", f"{left_s} s left" if left_s else "done")
    table.add_row("ready to withdraw", format_usdc(chain["balance_micro_usdc"]))
    table.add_row("wallet", format_usdc(chain["wallet_micro_usdc"]))
    table.add_row("daemon", Text(node.describe(config)))
    for sentence in node.values.get("warnings", []):
        table.add_row("warning", Text(sentence))
    for sentence in result["obstacles"]:
        table.add_row("no work", Text(sentence))
    if node.is_running:
        for name, text in node.list_rows(time.time()):
            table.add_row(name, Text(text))
    console.print(table)
