"""How many warnings of one kind a daemon's log takes, since strangers may cause them at will."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from splitup.core import tuning


@dataclass(slots=True)
class _Kind:
    """What was logged with one format string in the present period."""

    since_s: float
    lines: int = 0
    left_out: int = 0


class WarningLimit(logging.Filter):
    """Passes at most ``LOG_WARNINGS`` warnings of a kind in ``LOG_PERIOD_S``; counts the others.

    A kind is a logger and a format string, of which a program has few. The first line of a kind in
    a later period says how many were left out. Lines below WARNING and errors with a traceback pass
    always: they are the daemon's own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; add the number of lines that were not."""
        if record.levelno < logging.WARNING or record.exc_info:
            return True
        now = self._clock()
        kind = self._kinds.setdefault((record.name, str(record.msg)), _Kind(now))
        if now - kind.since_s >= tuning.LOG_PERIOD_S:
            if kind.left_out:
                record.msg = f"{record.getMessage()} ({kind.left_out} such lines were left out)"
                record.args = None
            kind.since_s, kind.lines, kind.left_out = now, 0, 0
        if kind.lines >= tuning.LOG_WARNINGS:
            kind.left_out += 1
            return False
        kind.lines += 1
        return True
