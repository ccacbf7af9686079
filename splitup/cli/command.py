"""One decorator makes a function a command: its flags, its output, its errors and exit codes."""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_type_hints

import typer

from splitup.cli.console import Output
from splitup.core.errors import InvalidInput, SplitUpError
from splitup.core.extras import find_extras
from splitup.core.log_limit import WarningLimit
from splitup.core.printable import OneLine

if TYPE_CHECKING:
    from splitup.client.private.final_states import AdapterChoice

JsonOutput = Annotated[Output, "--json"]  # of a command whose result may be one JSON object
_JSON_FLAG: Final = Parameter(
    "as_json",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")],
)


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


def as_command(
    function: Callable[..., Any] | None = None, *, hint: str = "", interrupted: str = "interrupted"
) -> Callable[..., Any]:
    """Return what Typer takes for a function, which may be a coroutine's.

    Its parameters are flags and arguments. A frozen dataclass stands for its fields, and they for
    theirs. ``Output`` is opened; ``JsonOutput`` adds the flag ``--json``. A terminal shows ``hint``
    while the command loads and asks. An error becomes one sentence and exit code 1 or 2, Ctrl-C
    ``interrupted`` and 130.
    """
    if function is None:
        return partial(as_command, hint=hint, interrupted=interrupted)
    parameters = inspect.signature(function).parameters
    hints = {
        name: find_adapter_flags() if kind is AdapterFlags else kind
        for name, kind in get_type_hints(function, include_extras=True).items()
        if name in parameters
    }
    flags = [flag for name, kind in hints.items() for flag in _list_flags(kind, parameters[name])]
    if has_json := JsonOutput in hints.values():
        flags.append(_JSON_FLAG)

    def command(**values: Any) -> None:
        output = Output.open(has_json and values["as_json"])
        if hint:
            output.hint(hint)

        def run() -> None:
            taken = {
                name: output if kind in (Output, JsonOutput) else _fill(kind, name, values)
                for name, kind in hints.items()
            }
            done = function(**taken)
            if inspect.iscoroutine(done):
                try:
                    from splitup.core import event_loop

                    event_loop.run(done)
                finally:
                    done.close()  # Python warns of one that Ctrl-C kept from its start

        run_command(output, run, interrupted=interrupted)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}
    command.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    return command


def _list_flags(kind: Any, parameter: Parameter) -> Iterator[Parameter]:
    if kind in (Output, JsonOutput):
        return
    if not is_dataclass(kind):
        yield parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind)
        return
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default = Parameter.empty if field.default is MISSING else field.default
        inner = Parameter(field.name, Parameter.KEYWORD_ONLY, default=default)
        yield from _list_flags(hints[field.name], inner)


def _fill(kind: Any, name: str, values: dict[str, Any]) -> Any:
    """Return the value of a parameter, which may be an object made of several flags."""
    if not is_dataclass(kind):
        return values[name]
    hints = get_type_hints(kind)
    made: Callable[..., Any] = kind  # type: ignore[assignment]
    return made(**{one.name: _fill(hints[one.name], one.name, values) for one in fields(kind)})


class _Warnings(logging.Handler):
    """Prints what the library logs as warnings the way the command prints its own messages."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(WarningLimit())
        self.addFilter(OneLine())
        self._output = output
        self._said = ""

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()) != self._said:  # several calls wait for one server
            self._output.say(message)
        self._said = message


def start_log(handler: logging.Handler, level: int) -> None:
    """Log to a handler from now on, for programs that run for long; print no warnings beside it.

    Of equal warnings a few are logged, and each message is one line.
    """
    handler.addFilter(WarningLimit())
    handler.addFilter(OneLine())
    logger = logging.getLogger("splitup")
    for printing in [one for one in logger.handlers if isinstance(one, _Warnings)]:
        logger.removeHandler(printing)
    logging.basicConfig(level=level, handlers=[handler])


def run_command(
    output: Output, run: Callable[[], None], *, interrupted: str = "interrupted"
) -> None:
    """Run; an error becomes one sentence and exit code 1 or 2, Ctrl-C ``interrupted`` and 130."""
    atexit.register(gc.freeze)  # else the interpreter looks for garbage in all modules: 0.3 s
    logger, warnings = logging.getLogger("splitup"), _Warnings(output)
    logger.addHandler(warnings)
    try:
        run()
    except SplitUpError as error:
        output.end_text()
        if output.as_json:
            output.print_json({"error": str(error)})
        else:
            output.say(f"error: {error}")
        raise typer.Exit(2 if isinstance(error, InvalidInput) else 1) from None
    except KeyboardInterrupt:
        output.end_text()
        output.say(interrupted)
        raise typer.Exit(130) from None
    finally:
        output.end_text()
        logger.removeHandler(warnings)
