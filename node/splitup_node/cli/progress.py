"""How far a command is, on stderr: one line drawn in place on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator
from typing import Final, TextIO

from splitup.core.printable import printable

_CLEAR: Final = "\r\x1b[K"  # back to the line's beginning, and erase it


class ProgressLine:
    """Shows one sentence after the other."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()

    def show(self, text: str) -> None:
        """Replace the sentence on a terminal, else write another line."""
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns
            self._stream.write(_CLEAR + printable(text[: columns - 1]))
        else:
            self._stream.write(printable(text) + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Leave an empty line on a terminal, for what is printed next."""
        if self._is_terminal:
            self._stream.write(_CLEAR)
            self._stream.flush()


@contextlib.contextmanager
def open_progress(stream: TextIO | None = None) -> Iterator[ProgressLine]:
    """Give a progress line on stderr, which is cleared at the end."""
    progress = ProgressLine(stream or sys.stderr)
    try:
        yield progress
    finally:
        progress.clear()


class InPlaceHandler(logging.StreamHandler[TextIO]):
    """Logs lines; on a terminal the next line replaces a record that is marked ``in_place``."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._progress = ProgressLine(stream)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self._progress.clear()
        if getattr(record, "in_place", False):
            self._progress.show(self.format(record))
        else:
            super().emit(record)
