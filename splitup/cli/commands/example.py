"""``splitup example``: the example model, as files to register, to read and to change."""

from __future__ import annotations

from pathlib import Path

import typer

from splitup.cli.command import as_command


@as_command
def command() -> None:
    """Write the example model into examples/packages-4m of this directory; print that path."""
    from splitup.demo.models import MODEL, write_example

    typer.echo(write_example(Path("examples") / MODEL))
