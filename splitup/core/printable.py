"""Strangers' words for terminals and logs, which obey some characters instead of showing them."""

from __future__ import annotations

import logging
import re
from typing import Final

_SHOWN: Final = "\N{REPLACEMENT CHARACTER}"
# what terminals obey, ESC and CSI among them, and what no stream can encode; not \n and \t
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a name or a line without characters that control a terminal, or begin another line."""
    return "".join(c if c.isprintable() else _SHOWN for c in text)


def printable_lines(text: str) -> str:
    """Return a text without characters that control a terminal; its lines and tabs stay."""
    return _CONTROLS.sub(_SHOWN, text)


class OneLine(logging.Filter):
    """Makes a record one line, whatever words of strangers it holds; a traceback is indented.

    So nobody else begins a line of a log, or controls the terminal that shows it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, and keep it."""
        record.msg, record.args = printable(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            trace = logging.Formatter().formatException(record.exc_info).split("\n")
            record.exc_text = "\n".join(f"  {printable(line)}" for line in trace)
        return True
