"""How many warnings and errors of one kind a log takes, since strangers may cause them at will."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from splitup.core import tuning


@dataclass(slots=True)
class _Kind:
    """What one line of code logged in the present period."""

    since_s: float
    lines: int = 0
    left_out: int = 0


class WarningLimit(logging.Filter):
    """Passes at most ``LOG_WARNINGS`` records of a kind in ``LOG_PERIOD_S``; counts the others.

    A kind is the line of code that logs: a program has few, and no message makes another. Errors
    with a traceback count too, since whoever finds a fault may repeat it. The first record of a
    kind in a later period says how many were left out. Lines below WARNING pass always.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; add the number of lines that were not."""
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        kind = self._kinds.setdefault((record.pathname, record.lineno), _Kind(now))
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
