"""``splitup down``: stop the network of a directory."""

from __future__ import annotations

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME


@as_command
def command(directory: DirFlag = DEFAULT_HOME, *, output: Output) -> None:
    """Stop the network of a directory; its chain, objects and keys are kept."""
    from splitup.devnet.commands import down

    down(directory, output.say)
