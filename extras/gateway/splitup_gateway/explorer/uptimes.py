"""How much of the time each node was on the committee's list, as this server saw it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

HOURS: Final = 24  # that are remembered


@dataclass(slots=True)
class _Hour:
    number: int  # since the epoch
    samples: int = 0
    seen: Counter[str] = field(default_factory=Counter)


class Uptimes:
    """Counts, hour by hour, in how many samples each node was listed. In memory."""

    def __init__(self) -> None:
        self._hours: deque[_Hour] = deque(maxlen=HOURS)

    def add(self, nodes: Iterable[str], now_s: float) -> None:
        """Add a sample: the nodes that are live now."""
        number = int(now_s // 3600)
        if not self._hours or self._hours[-1].number != number:
            self._hours.append(_Hour(number))
        hour = self._hours[-1]
        hour.samples += 1
        hour.seen.update(nodes)

    def get_share(self, node: str, now_s: float) -> float | None:
        """Return in which part of the last day's samples a node was listed, None without any."""
        first = int(now_s // 3600) - HOURS
        hours = [hour for hour in self._hours if hour.number > first]
        samples = sum(hour.samples for hour in hours)
        return sum(hour.seen[node] for hour in hours) / samples if samples else None
