"""``splitup status``: processes, committee and nodes of a network on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME

if TYPE_CHECKING:
    from splitup.devnet.commands import NetworkStatus


@as_command
def command(directory: DirFlag = DEFAULT_HOME, *, output: JsonOutput) -> None:
    """Show processes, committee and nodes of a network; exit code 1 when it is not ready."""
    from splitup.devnet.commands import fetch_status

    status = fetch_status(directory)
    output.give(status.to_dict(), lambda: _show(output, status))
    if status.health is None or not status.health.is_ready():
        raise typer.Exit(1)


def _show(output: Output, status: NetworkStatus) -> None:
    from rich.table import Table

    from splitup.client.inputs import format_usdc
    from splitup.devnet.status import read_loading

    running = f"process {status.supervisor}" if status.supervisor is not None else "not running"
    output.out.print(f"network in {status.directory}: {running}")
    if status.processes:
        table = Table("process", "pid", "state", box=None, pad_edge=False)
        for name, pid, alive in status.processes:
            table.add_row(name, str(pid), "running" if alive else "ended")
        output.out.print(table)
    if status.health is None:
        output.out.print(status.problem, soft_wrap=True)
        return
    output.out.print(status.health.describe())
    loading = read_loading(status.directory)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("node", "endpoint", "stake", "tasks", "state"):  # 79 columns on one machine
        table.add_column(column, no_wrap=column in ("node", "state"))
    for node in status.health.nodes:
        stake = format_usdc(node.stake_micro_usdc).removesuffix(" USDC")
        endpoint = node.endpoint.removeprefix("http://")
        state = "live" if node.in_snapshot else "not live"
        if node.address in loading:
            state = "loading"
        table.add_row(node.address, endpoint, stake, str(len(node.tasks)), state)
    output.out.print(table)
