"""Whether a member rests: nothing is open, and nothing has changed for a while.

A member that rests asks for fewer heartbeats, repeats its votes and its snapshots less often, and
looks at the chain less often. Whatever happens ends that at once. Members need not agree about it.
"""

from __future__ import annotations

import math

from splitup.core import limits


class Activity:
    """When a member last had something to do. It is busy until ``note`` was called once."""

    def __init__(self) -> None:
        self.busy_at = math.inf
        self._woken_at = -math.inf

    def note(self, now: float) -> None:
        """Record that there is something to do."""
        if self.is_resting(now):
            self._woken_at = now
        self.busy_at = now

    def is_resting(self, now: float) -> bool:
        """Return whether there has been nothing to do for ``REST_AFTER_S``."""
        return now >= self.busy_at + limits.REST_AFTER_S

    def has_rested(self, now: float, within_s: float) -> bool:
        """Return whether we rest, or did so ``within_s`` ago: then others may, too."""
        return self.is_resting(now) or now - self._woken_at < within_s
