"""``splitup up``, ``down``, ``fund`` and ``status``: a whole network on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output, print_table
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME
from splitup.core.garbage_collection import pause_garbage_collection

if TYPE_CHECKING:
    from splitup.devnet.commands import NetworkStatus


@as_command(hint="starting the network", interrupted="stopped before the network was ready")
def up(
    nodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of nodes, 1 to 64 (default: 6, or as before)."),
    ] = None,
    directory: DirFlag = DEFAULT_HOME,
    members: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Committee members: 3f + 1 tolerate f faulty ones, so 4, 7, 10 … 31 "
            "(default: 4, or as before).",
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory per node: 1GB, 900MB (default: 1GB; fixed at the first start).",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is ready; it keeps running.")
    ] = False,
    *,
    output: Output,
) -> None:
    """Start a whole network on this machine, or resume the one in the directory."""
    from splitup.devnet import commands
    from splitup.devnet.network import DevnetOptions

    vram_bytes = None if vram is None else _parse_size(vram)
    options = DevnetOptions(directory, nodes, vram_bytes, members=members)
    if detach:
        commands.up_detached(options, output.say, output.update)
    else:
        commands.up(options, output.say, output.update)


def _parse_size(text: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    from splitup.config import MemoryField
    from splitup.core.errors import InvalidInput

    try:
        return int(TypeAdapter(MemoryField).validate_python(text))
    except ValidationError:
        raise InvalidInput(
            f"--vram {text} is no size, or too little; write for example 1GB or 900MB"
        ) from None


@as_command(hint="stopping the network")
def down(directory: DirFlag = DEFAULT_HOME, *, output: Output) -> None:
    """Stop the network of a directory; its chain, objects and keys are kept."""
    from splitup.devnet import commands

    commands.down(directory, output.say)


@as_command(hint="sending test money")
def fund(
    account: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address of the account, 0x and 40 digits.")
    ],
    amount: Annotated[
        str, typer.Option("--usdc", metavar="AMOUNT", help="Test USDC to give.")
    ] = "2000",
    directory: DirFlag = DEFAULT_HOME,
    *,
    output: Output,
) -> None:
    """Give an account test USDC, and ether for gas if it has none, on a network of this machine.

    A node of your own can stake it there. On a real network USDC and ether have to be bought.
    """
    from splitup.client.inputs import format_usdc, parse_usdc
    from splitup.devnet import commands

    micro_usdc = parse_usdc(amount, name="--usdc")
    commands.fund(directory, account, micro_usdc)
    output.say(f"{account} received {format_usdc(micro_usdc)} of test money and has ether for gas")


@as_command(hint="asking the chain, the committee and the nodes")
def status(directory: DirFlag = DEFAULT_HOME, *, output: JsonOutput) -> None:
    """Show processes, committee and nodes of a network; exit code 1 when it is not ready."""
    with pause_garbage_collection():
        from splitup.devnet.commands import fetch_status

    found = fetch_status(directory)
    output.give(found.to_dict(), lambda: _show_status(output, found))
    if found.health is None or not found.health.is_ready():
        raise typer.Exit(1)


def _show_status(output: Output, status: NetworkStatus) -> None:
    from rich.table import Table

    from splitup.client.inputs import format_usdc
    from splitup.devnet.status import read_loading

    running = f"process {status.supervisor}" if status.supervisor is not None else "not running"
    output.out.print(f"network in {status.directory}: {running}")
    if status.processes:
        table = Table("process", "pid", "state", box=None, pad_edge=False)
        for name, pid, alive in status.processes:
            state = "no answer" if status.health and name in status.health.silent else "running"
            table.add_row(name, str(pid), state if alive else "ended")
        print_table(output.out, table)
    if status.health is None:
        output.out.print(status.problem)
        return
    output.out.print(status.health.describe())
    loading = read_loading(status.directory)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("node", "endpoint", "stake", "tasks", "state"):  # 79 columns on one machine
        table.add_column(column)
    for node in status.health.nodes:
        stake = format_usdc(node.stake_micro_usdc).removesuffix(" USDC")
        endpoint = node.endpoint.removeprefix("http://")
        state = "live" if node.in_snapshot else "not live"
        if node.address in loading:
            state = "loading"
        table.add_row(node.address, endpoint, stake, str(len(node.tasks)), state)
    print_table(output.out, table)
    if status.health.gateways:
        output.out.print(f"nodes and users join at: {status.health.gateways[0]}")
