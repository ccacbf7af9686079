"""``splitup-node unstake``: leave the network, or stay after all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account


@as_command
async def command(
    config: ConfigOption = DEFAULT_CONFIG,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stay after all.")] = False,
    *,
    output: JsonOutput,
) -> None:
    """Leave: no new work at once, the stake free after the unbonding period."""
    async with open_account(config) as account:
        done = await (account.cancel_unstake() if cancel else account.unstake())
    output.give(done, lambda: _show(config, done, output.out))


def _show(config: Path, result: dict[str, Any], console: Console) -> None:
    if not result["unbonding_at_s"]:
        console.print("The node stays.")
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(result["unbonding_at_s"]))
    console.print(
        f"The stake is free from {when}; take it then with: "
        f"splitup-node withdraw --stake --config {config}",
        soft_wrap=True,
    )
