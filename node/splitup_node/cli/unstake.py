"""``splitup-node unstake``: leave the network, or stay after all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
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
class UnstakeOptions:
    """Which node leaves; ``cancel`` if it stays after all."""

    config: Path
    cancel: bool


def unstake_command(
    config: ConfigOption = DEFAULT_CONFIG,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stay after all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Leave: no new work at once, the stake free after the unbonding period."""
    options = UnstakeOptions(config, cancel)
    run_and_print(lambda: unstake(options), partial(_show, config), as_json)


def unstake(options: UnstakeOptions) -> dict[str, Any]:
    """Begin to leave, or cancel it; return when the stake is free, 0 for never."""
    return run_with_account(
        options.config,
        lambda account: account.cancel_unstake() if options.cancel else account.unstake(),
    )


def _show(config: Path, result: dict[str, Any], console: Console) -> None:
    if not result["unbonding_at_s"]:
        console.print("The node stays.")
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result["unbonding_at_s"]))
    console.print(
        f"The stake is free from {when}; take it then with: "
        f"splitup-node withdraw --stake --config {config}",
        soft_wrap=True,
    )
