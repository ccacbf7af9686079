"""Flags that several verbs share, and frozen dataclasses whose fields are flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from splitup.client import defaults
from splitup.config import HOME_VARIABLE
from splitup.core import tuning
from splitup.core.extras import find_extras

if TYPE_CHECKING:
    from splitup.client.private.final_states import AdapterChoice

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


@dataclass(frozen=True, slots=True)
class AdapterFlags:
    """Flags that name an adapter of hidden states: those of an extra, none without it."""

    def read(self) -> AdapterChoice | None:
        """Return the adapter that was named, None without any; raise InvalidInput."""
        return None


def find_adapter_flags() -> type[AdapterFlags]:
    """Return the flags of the installed extra that offers adapters."""
    for extra in find_extras().values():
        if extra.adapter_flags:
            module, _, name = extra.adapter_flags.partition(":")
            return cast("type[AdapterFlags]", getattr(import_module(module), name))
    return AdapterFlags


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take frozen dataclasses: their fields become its flags."""
    hints = get_type_hints(command, include_extras=True)
    flags: list[Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in signature(command).parameters.items():
        kind = find_adapter_flags() if hints[name] is AdapterFlags else hints[name]
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
