"""The chain's time, by which deadlines are measured, whatever this machine's clock says."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from splitup.core import limits, tuning


@dataclass(frozen=True, slots=True)
class _Look:
    number: int
    at_s: float


class ChainClock:
    """An estimate of the chain's time: the wall clock at the start, corrected by blocks. No I/O.

    It runs on the monotonic clock, so that setting the machine's clock moves no deadline. A block
    bounds the chain's time from below by its timestamp, and, when it was not there at the look
    before, from above by the timestamp and ``tuning.BLOCK_DELAY_S``. A chain without new blocks
    gives the lower bound only.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._guess_s = wall() - monotonic()
        self._low_s = -math.inf  # bounds of the chain's time minus the monotonic clock
        self._high_s = math.inf
        self._last: _Look | None = None
        self._blocks: deque[tuple[int, int]] = deque(maxlen=tuning.REORG_BLOCKS)

    def now_s(self) -> float:
        """Return the chain's time, Unix seconds."""
        return self._monotonic() + min(max(self._guess_s, self._low_s), self._high_s)

    @property
    def skew_s(self) -> float:
        """Return by how much the machine's clock is ahead of the chain's time now."""
        return self._wall() - self.now_s()

    def observe(self, number: int, timestamp_s: int) -> None:
        """Correct the estimate by the chain's latest block."""
        now_s, last = self._monotonic(), self._last
        if last is not None and number < last.number:
            return  # from an endpoint that lags behind
        low_s, high_s = timestamp_s - now_s, math.inf
        if last is not None and number > last.number:
            high_s = timestamp_s - last.at_s + tuning.BLOCK_DELAY_S
        self._last = _Look(number, now_s)
        if not self._blocks or number > self._blocks[-1][0]:
            self._blocks.append((number, timestamp_s))
        self._low_s, self._high_s = max(self._low_s, low_s), min(self._high_s, high_s)
        if self._low_s > self._high_s:  # the chain was set to another time, or the clocks drift
            self._low_s, self._high_s = low_s, max(low_s, high_s)

    @property
    def block_time_s(self) -> float:
        """Return the shortest time between two of the last blocks, 0 while it is not known.

        A chain leaves out blocks at times; the shortest is what it does when it does not.
        """
        times = [(b - a) / (m - n) for (n, a), (m, b) in pairwise(self._blocks)]
        return max(0.0, min(times, default=0.0))

    def describe_skew(self) -> str:
        """Return a sentence when the machine's clock is too far off for signed requests, or ""."""
        skew_s = round(self.skew_s)
        if abs(skew_s) <= limits.CLOCK_SKEW_S:
            return ""
        side = "ahead of" if skew_s > 0 else "behind"
        return (
            f"this machine's clock is {abs(skew_s)} s {side} the chain's; others refuse what it "
            "signs; set it with: timedatectl set-ntp true"
        )
