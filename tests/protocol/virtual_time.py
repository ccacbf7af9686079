"""A clock that jumps from one action to the next; equal seeds give equal histories."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualTime:
    """The time, and what is due when; of two actions due at once the first one that was said."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, action))

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def advance(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Act on all that is due up to a time, in order, until ``is_over`` before an action."""
        while self._queue and self._queue[0][0] <= until_s and not is_over():
            due, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, due)
            action()
