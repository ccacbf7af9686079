"""Flags that several verbs share, and frozen dataclasses whose fields are flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from splitup.client import defaults
from splitup.config import HOME_VARIABLE
from splitup.core import tuning

DirFlag = Annotated[
    Path,
    typer.Option("--dir", metavar="DIR", envvar=HOME_VARIABLE, help="Directory of the network."),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="Network file or directory (default: $SPLITUP_HOME, .splitup).",
    ),
]
KeysFlag = Annotated[
    str | None,
    typer.Option(
        "--keys",
        metavar="URL",
        help="Database of API keys (default: api-keys.sqlite beside the network's file).",
    ),
]
IndexFlag = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="URL",
        help="Database of the explorer (default: explorer.sqlite beside the network's file).",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
VerifyFlag = Annotated[
    str | None,
    typer.Option(
        "--verify",
        metavar="SHARE",
        help="Share of the tasks that are verified and paid for, such as 50% (default, and least: "
        "the network's).",
    ),
]
ExecutionArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Id of an execution, 0x and 64 digits.")
]


def find_database_url(url: str | None, config: Path | None, name: str) -> str:
    """Return the URL of a database, in SQLAlchemy's form: by default a file of this name."""
    from splitup.config import find_network_file

    return url or f"sqlite:///{find_network_file(config).absolute().parent / name}"


def find_keys_url(keys: str | None, config: Path | None) -> str:
    """Return the URL of the database of API keys."""
    return find_database_url(keys, config, "api-keys.sqlite")


@dataclass(frozen=True, slots=True)
class PaymentOptions:
    """What an execution may cost, and how long its money may be locked."""

    max_price: Annotated[
        str | None,
        typer.Option(
            "--max-price", metavar="USDC", help="Most USDC to pay (default: what it costs)."
        ),
    ] = None
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=10.0,
            help="Seconds after which the money for what was not computed comes back. Nodes stop "
            f"{tuning.STOP_MARGIN_S:g} s before. By default {defaults.DEADLINE_S:g}, and "
            f"{defaults.DEADLINE_STEP_S:g} for each step, up to {defaults.MAX_DEADLINE_S:g}.",
        ),
    ] = None
    verify: VerifyFlag = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take frozen dataclasses: their fields become its flags."""
    hints = get_type_hints(command, include_extras=True)
    flags: list[Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            changes: dict[str, Any] = {"kind": Parameter.KEYWORD_ONLY, "annotation": kind}
            flags.append(parameter.replace(**changes))
            continue
        groups[name] = kind
        annotations = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = Parameter.empty if field.default is MISSING else field.default
            annotation = annotations[field.name]
            flag = Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            flags.append(flag)

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    run.__doc__ = command.__doc__
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    run.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    return run
