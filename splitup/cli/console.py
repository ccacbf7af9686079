"""How the commands of users and developers print: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from splitup.core.printable import printable_lines

if TYPE_CHECKING:
    from rich.table import Table

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 the network, the chain or a peer failed, or the answer is no; "
    "2 a flag, file, key or balance is wrong; 130 interrupted."
)
_WIDEST: Final = 10_000  # characters of a table's line
_ERASE_LINE: Final = "\r\x1b[2K"
_JSON_CONTROLS: Final = re.compile("[\x7f-\x9f\ud800-\udfff]")  # that json.dumps leaves


@dataclass(slots=True)
class Output:
    """Where a command writes: data on stdout, messages on stderr.

    Messages never appear in the middle of a line: streamed text and progress are ended first.
    """

    as_json: bool
    out: Console
    log: Console
    is_text_open: bool = False  # streamed text on stdout has not reached the end of its line
    _progress: str = ""  # the line that stderr shows and that the next message replaces

    @classmethod
    def open(cls, as_json: bool = False) -> Output:
        return cls(as_json, _open_console(), _open_console(stderr=True))

    def say(self, text: str) -> None:
        """Write a message without wrapping it."""
        self._clear()
        if self.is_text_open and self.out.is_terminal and self.log.is_terminal:
            self.log.file.write("\n")  # not on stdout, which holds the text and nothing else
        self.log.print(text)

    def update(self, text: str) -> None:
        """Show progress: in place on a terminal, a line of its own elsewhere."""
        if text == self._progress:
            return
        if not self.log.is_terminal:
            self.say(text)
        else:
            shown = printable_lines(text[: self.log.width - 1])
            self.log.file.write(_ERASE_LINE + shown)
            self.log.file.flush()
        self._progress = text

    def hint(self, text: str) -> None:
        """Show what a person at a terminal is waiting for; elsewhere print nothing."""
        if self.log.is_terminal:
            self.update(text)

    def write_text(self, text: str) -> None:
        """Write a piece of streamed text to stdout, as it is unless a terminal would obey it."""
        if text:
            self._clear()
            sys.stdout.write(printable_lines(text) if self.out.is_terminal else text)
            sys.stdout.flush()
            self.is_text_open = not text.endswith("\n")

    def end_text(self) -> None:
        """End the line of streamed text, if it is open."""
        self._clear()
        if self.is_text_open:
            self.write_text("\n")

    def print_json(self, value: dict[str, Any]) -> None:
        """Write the one JSON object of a command."""
        self._clear()
        text = json.dumps(value, ensure_ascii=False)
        text = _JSON_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        sys.stdout.write(text + "\n")

    def give(self, value: dict[str, Any], show: Callable[[], None]) -> None:
        """Write a command's result: as one JSON object if that is wanted, else by ``show``."""
        if self.as_json:
            self.print_json(value)
        else:
            self._clear()
            show()

    def _clear(self) -> None:
        if self._progress and self.log.is_terminal:
            self.log.file.write(_ERASE_LINE)
            self.log.file.flush()
        self._progress = ""


def print_table(console: Console, table: Table) -> None:
    """Print a table without cutting a cell: they are copied, and a terminal wraps long lines."""
    table.width = table.__rich_measure__(console, console.options.update(max_width=_WIDEST)).maximum
    console.print(table)


class _PlainConsole(Console):
    """A console whose terminal obeys Rich alone, and nothing in the texts that it prints."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


def _open_console(*, stderr: bool = False) -> Console:
    """Open a console that prints text as it is: "[b]" is no markup, and a long line stays one."""
    return _PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def ask(question: str, **options: Any) -> str:
    """Ask at the terminal as ``typer.prompt`` does; Ctrl-C and Ctrl-D raise KeyboardInterrupt.

    In a coroutine the first Ctrl-C would only cancel the task, which is waiting for the answer.
    """
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:  # on stderr: stdout is the result's, which may be JSON
        return str(typer.prompt(question, err=True, **options))
    except typer.Abort:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, handler)


def ask_passphrase(whose: str, config: Path) -> str:
    """Ask at the terminal, if stdin is one, for the passphrase of a new key; "" for a random one.

    ``config`` is the file that names it, and lies beside it.
    """
    if not sys.stdin.isatty():
        return ""
    typer.echo(
        f"The passphrase is kept in {config.parent / 'passphrase'}, where the key's programs read "
        f"it. To keep it elsewhere, move that file and name its new place in {config}.",
        err=True,
    )
    question = f"Passphrase of the {whose}'s key (leave it empty for a random one)"
    hidden = {"default": "", "show_default": False, "hide_input": True}
    while (answer := ask(question, **hidden)) and ask("The same again", **hidden) != answer:
        typer.echo("These are not the same; once more.", err=True)
    return answer


def add_version_option(app: typer.Typer, program: str) -> None:
    """Give a program the option ``--version``."""

    def print_version(is_wanted: bool) -> None:
        if is_wanted:
            from importlib.metadata import version

            typer.echo(f"{program} {version('splitup')}")
            raise typer.Exit

    option = typer.Option(
        False,
        "--version",
        callback=print_version,
        is_eager=True,
        help="Print the version and exit.",
    )

    @app.callback()
    def read_common_options(version: bool = option) -> None:
        """Take the options that stand before a command."""
