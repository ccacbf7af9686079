"""What the commands share: their common options, how they print, and access to the node's account.

Modules of this package import the rest of the node inside their functions: ``--help`` must not load
the chain's and the crypto libraries, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from rich.console import Console

from splitup.cli.console import Output, run_command

if TYPE_CHECKING:
    from splitup_node.settlement.account import Account

T = TypeVar("T")

DEFAULT_CONFIG: Final = Path("node.toml")
CONFIG_VARIABLE: Final = "SPLITUP_NODE_CONFIG"

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        help="The node's configuration.",
    ),
]
DEFAULT_LISTEN: Final = "127.0.0.1:7700"
ListenOption = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")]
EndpointOption = Annotated[
    str,
    typer.Option(metavar="URL", help="How others reach the node, if it is not what it listens on."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def run_and_print(
    work: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    as_json: bool,
) -> dict[str, Any]:
    """Do the work, print and return its result; an error is one sentence and an exit code."""
    output, results = Output.open(as_json), []

    def run() -> None:
        results.append(work())
        if as_json:
            output.print_json(results[0])
        else:
            show(results[0], output.out)

    run_command(output, run, interrupted="interrupted")
    return results[0]


def run_with_account(path: Path, action: Callable[[Account], Coroutine[Any, Any, T]]) -> T:
    """Open the account of the node with this configuration, and act on it."""
    from splitup.core import event_loop
    from splitup_node.config import NodeConfig
    from splitup_node.settlement.account import Account

    async def act() -> T:
        async with await Account.open(NodeConfig.load(path)) as account:
            return await action(account)

    return event_loop.run(act())
