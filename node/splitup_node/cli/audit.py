"""``splitup-node audit``: does this machine compute correctly?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import print_table
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption


@as_command
async def command(
    config: ConfigOption = DEFAULT_CONFIG,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Name or id; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run without a stake: before the node registers.")
    ] = False,
    *,
    output: JsonOutput,
) -> None:
    """Does this machine compute correctly? Run as many tasks as it can hold, and compare outputs.

    Those come first that most operators hold; of the models that you name, all that fit. Tasks run
    on seeded inputs; their outputs are compared with those that their models were registered with.
    Nothing is served meanwhile. Exit code 1 when this machine must not serve one
    of the tasks: its stake would be slashed.
    """
    from splitup_node.config import NodeConfig
    from splitup_node.settlement.account import check_registration
    from splitup_node.tasks.audit import audit_node

    check = None if dry_run else check_registration
    report = await audit_node(
        NodeConfig.load(config), tuple(models or ()), check, on_progress=output.update
    )
    result = {
        "determinism_class": report.device["determinism_class"],
        "may_serve": all(row.may_serve for row in report.rows),
        "tasks": [asdict(row) for row in report.rows],
    }
    output.give(result, lambda: _show(result, output.out))
    if not result["may_serve"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"This machine is {result['determinism_class']}."))
    if not result["tasks"]:
        console.print("No registered task fits into its memory.")
        return
    table = Table("model", "task", "verdict", "why", box=None)
    for row in result["tasks"]:
        name = f"{row['index']} {row['label']}"
        verdict = row["verdict"] or "not tried"
        table.add_row(row["model_id"][:10], Text(name), verdict, Text(row["detail"]))
    print_table(console, table)
    refused = sum(not row["may_serve"] for row in result["tasks"])
    if refused:
        console.print(
            f"{refused} of {len(result['tasks'])} tasks must not be served from this machine."
        )
    else:
        console.print("This machine computes correctly; no stake would be lost.")
