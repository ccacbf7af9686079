"""When a process that ended is started again: after a pause that grows. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FIRST_PAUSE_S: Final = 1.0  # doubles with every end, up to the longest
LONGEST_PAUSE_S: Final = 60.0
HEALTHY_S: Final = 60.0  # a process that ran this long begins again with the first pause


@dataclass(slots=True)
class _History:
    pause_s: float  # before the next start
    started_at: float | None = None  # by us, None while it is down
    due_at: float = 0.0


@dataclass(slots=True)
class Restarts:
    """The restarts of all processes of a network, by name. ``now`` is in seconds on any clock."""

    _histories: dict[str, _History] = field(default_factory=dict)

    def process_end(self, name: str, now: float) -> float:
        """Note that a process has ended; return after how many seconds it is started again."""
        known = self._histories.get(name)
        if known is None or (known.started_at is not None and now - known.started_at >= HEALTHY_S):
            known = self._histories[name] = _History(FIRST_PAUSE_S)
        pause_s = known.pause_s
        known.due_at, known.started_at = now + pause_s, None
        known.pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s

    def list_due(self, now: float) -> list[str]:
        """Return the processes to start now."""
        return [
            name
            for name, known in self._histories.items()
            if known.started_at is None and known.due_at <= now
        ]

    def process_start(self, name: str, now: float) -> None:
        """Note that a process was started again."""
        self._histories[name].started_at = now
