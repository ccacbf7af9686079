"""Flags that several verbs share, and frozen dataclasses whose fields are flags."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from splitup.client import defaults
from splitup.config import HOME_VARIABLE
from splitup.core import tuning
from splitup.core.errors import InvalidInput

DirFlag = Annotated[
    Path,
    typer.Option("--dir", metavar="DIR", envvar=HOME_VARIABLE, help="Directory of the network."),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Network file or directory (default: $SPLITUP_HOME, .splitup)."
    ),
]
VerifyFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the tasks that are verified and paid for, such as 50% (default, and least: "
        "the network's).",
    ),
]
ExecutionArgument = Annotated[
    str,
    typer.Argument(metavar="ID", help="Id of an execution, which --json of what ran it prints."),
]


def read_text(text: str) -> str:
    """Return a text; "-" is what standard input holds.

    Raises InvalidInput if that is empty or not UTF-8.
    """
    if text != "-":
        return text
    try:
        found = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"standard input is not UTF-8: {error}") from None
    if not found:
        raise InvalidInput("standard input is empty; it must hold the text")
    return found


@dataclass(frozen=True, slots=True)
class PaymentOptions:
    """What an execution may cost, and how long its money may be locked."""

    max_price: Annotated[
        str | None, typer.Option(metavar="USDC", help="Most USDC to pay (default: what it costs).")
    ] = None
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=10.0,
            help="Seconds after which the money for what was not computed comes back. Nodes stop "
            f"{tuning.STOP_MARGIN_S:g} s before. By default {defaults.DEADLINE_S:g}, and "
            f"{defaults.DEADLINE_STEP_S:g} for each step, up to {defaults.MAX_DEADLINE_S:g}.",
        ),
    ] = None
    verify: VerifyFlag = None
