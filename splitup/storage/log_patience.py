"""Until when readers wait for logs that are too short."""

from __future__ import annotations

import time
from collections.abc import Callable

from splitup.core import tuning
from splitup.messages.base import CLIENT
from splitup.messages.plans import Request
from splitup.protocol.execution.task_queue import PortId


class LogPatience:
    """How long one party waits for the logs of an execution: once, for all that it reads of them.

    After the draw (``is_drawn``) only clients' logs are waited for, since executors store theirs
    before they commit. What a killed client has not stored never comes: soon after the deadline, by
    the chain's time that ``now_s`` returns, no reader waits any more. A client that stores a little
    at a time gains no time by that.
    """

    def __init__(
        self,
        *,
        is_drawn: bool,
        now_s: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_drawn = is_drawn
        self._now_s = now_s
        self._monotonic = monotonic
        self._ends: dict[str, float] = {}  # by execution

    def begin(self, request: Request, source: PortId) -> Callable[[], bool]:
        """Begin to read a log of an execution; return what says whether it is still waited for."""
        ends = self._ends.setdefault(request.execution_id, self._monotonic() + tuning.LOG_LATE_S)
        if len(self._ends) > tuning.MAX_FINISHED:
            del self._ends[next(iter(self._ends))]
        if self._is_drawn and source[0] != CLIENT:
            return lambda: False
        last_s = request.deadline + tuning.LOG_LATE_S
        return lambda: self._monotonic() < ends and self._now_s() < last_s
