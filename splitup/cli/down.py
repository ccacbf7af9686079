"""``splitup down``: stop the network of a directory."""

from __future__ import annotations

from splitup.cli.console import Output, run_command
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME


def command(directory: DirFlag = DEFAULT_HOME) -> None:
    """Stop the network of a directory; its chain, objects and keys are kept."""
    output = Output.open()

    def run() -> None:
        from splitup.devnet.commands import down

        down(directory, output.say)

    run_command(output, run)
