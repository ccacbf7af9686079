"""Throughput, measured as an exponentially weighted average, and limited by a token bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_KEPT: Final = 8  # each sample weighs 7/8 of the one after it


@dataclass(slots=True)
class Rate:
    """Amounts divided by the time they took; large samples weigh more than small ones."""

    amount: int = 0
    took_ns: int = 0

    def add(self, amount: int, took_ns: int) -> None:
        """Add a sample; one without an amount or a duration is ignored."""
        if amount > 0 and took_ns > 0:
            self.amount += amount - self.amount // _KEPT
            self.took_ns += took_ns - self.took_ns // _KEPT

    def per_ms(self, maximum: int) -> int:
        """Return the amount per millisecond, rounded down, 0 before the first sample."""
        return min(maximum, self.amount * 1_000_000 // self.took_ns) if self.took_ns else 0


class Allowance:
    """A token bucket: a rate with a burst. Pure: the caller passes the time."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at_s = burst, 0.0

    def get_left(self, now_s: float) -> float:
        """Return the part of the burst that is left, 0 to 1; below 0 when it is spent ahead."""
        self._refill(now_s)
        return self._left / self._burst

    def spend(self, amount: float, now_s: float) -> float:
        """Take ``amount``, even in advance; return the seconds until the rate allows it."""
        self._refill(now_s)
        self._left -= amount
        return max(0.0, -self._left / self._per_s)

    def get_wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until ``amount`` can be taken, if nobody takes any before."""
        self._refill(now_s)
        return max(0.0, (amount - self._left) / self._per_s)

    def take(self, amount: float, now_s: float) -> bool:
        """Take ``amount`` if the rate allows it now; return whether it does."""
        self._refill(now_s)
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def _refill(self, now_s: float) -> None:
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
