"""``splitup up``: start, or resume, a whole network on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME


@as_command
def command(
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", metavar="N", help="Number of nodes, 1 to 64 (default: 6, or as before)."
        ),
    ] = None,
    directory: DirFlag = DEFAULT_HOME,
    members: Annotated[
        int | None,
        typer.Option(
            "--members",
            metavar="N",
            help="Committee members: 3f + 1 tolerate f faulty ones, so 4, 7, 10 … 31 "
            "(default: 4, or as before).",
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            "--vram",
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
    from splitup.devnet.commands import up, up_detached
    from splitup.devnet.network import DevnetOptions

    vram_bytes = None if vram is None else _parse_size(vram)
    options = DevnetOptions(directory, nodes, vram_bytes, members=members)
    if detach:
        output.hint("starting the network")
        up_detached(options, output.say)
    else:
        up(options, output.say, output.update)


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
