"""Throughput, measured as an exponentially weighted average."""

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
