"""Who waits for a lease, how long that takes by what was measured, and what texts took."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from splitup.core import tuning

_FEWER: Final = 0.75  # run at once after a client gave up
MEASURED: Final = 32  # uses of leases: enough for a mean, and few enough to follow the network


@dataclass(eq=False, slots=True)
class Caller:
    """Who asked: whether somebody still waits for the answer, and for how long.

    ``patience_s`` is what the client said that it waits for the whole answer, None if it did not.
    """

    patience_s: float | None = None
    is_there: bool = True
    came_at: float = 0.0  # on the event loop's clock; a retry comes anew
    on_return: set[Callable[[], None]] = field(default_factory=set)  # of pools that it waits for

    def come(self, now: float, patience_s: float | None) -> None:
        """Note that a client begins to wait, and tell the pools if it was away."""
        self.patience_s, self.came_at = patience_s, now
        was_away, self.is_there = not self.is_there, True
        if was_away:
            for tell in tuple(self.on_return):
                tell()

    def leave(self) -> None:
        """Note that nobody waits; the request keeps its place, and does not start."""
        self.is_there = False


@dataclass(slots=True)
class HoldTimes:
    """How long requests hold a lease, by those that did lately, and when to come back.

    Requests that run at once slow each other down where nodes have no more to give; then all may be
    late together. So of a principal whose clients gave up fewer than ``most`` run at once, and
    slowly more again.
    """

    most: int
    _fitting: dict[str, float] = field(default_factory=dict)  # by principal, where below ``most``
    _holds: deque[tuple[str, float, bool]] = field(default_factory=lambda: deque(maxlen=MEASURED))
    _due: dict[str, deque[float]] = field(default_factory=dict)  # when who was refused comes back

    def get_at_once(self, principal: str) -> int:
        """Return how many requests of a principal should run at once."""
        return int(self._fitting.get(principal, self.most))

    def note(self, principal: str, seconds: float, *, is_served: bool, at_once: int) -> None:
        """Count a use of a lease; one that its client ended early took longer than it did.

        ``at_once`` requests of the principal ran when it ended.
        """
        self._holds.append((principal, seconds, is_served))
        fitting = self._fitting.pop(principal, float(self.most))
        if is_served:
            fitting += 1 / fitting
        elif at_once > 1:
            fitting = max(1.0, _FEWER * fitting)
        if fitting < self.most:
            self._fitting[principal] = fitting

    def estimate_hold(
        self, running: Iterable[tuple[str | None, float]], principal: str | None = None
    ) -> float:
        """Return the seconds that a request holds a lease; 0 while nothing is known.

        With a ``principal``, until one of its requests is served: others' say nothing about that.
        ``running`` says whose requests hold one, and how long they have had it: none is expected to
        be faster than they were so far.
        """
        uses = [use for use in self._holds if principal in (None, use[0])]
        count = sum(is_served or principal is None for *_, is_served in uses)
        measured = sum(seconds for _, seconds, _ in uses) / max(count, 1)
        ages = [age for who, age in running if principal in (None, who)]
        return max(measured, sum(ages) / len(ages) if ages else 0.0)

    def book(self, principal: str, now: float, wait_s: float, every_s: float) -> int:
        """Return in how many seconds one who is refused should come back.

        That is once those who wait are served, and after all of the same principal who were told
        the same before, in its share of the leases; those who do not listen are not counted for
        longer than ``tuning.QUEUE_WAIT_S``.
        """
        for name, times in tuple(self._due.items()):
            while times and times[0] <= now:
                times.popleft()
            if not times:
                del self._due[name]
        due = self._due.get(principal, deque())
        principals = len(self._due.keys() | {principal})
        at = max(now + wait_s, due[-1] + every_s * principals if due else 0.0)
        if at > now + max(wait_s, tuning.QUEUE_WAIT_S):
            at = now + wait_s
        else:
            due.append(at)
            self._due[principal] = due
        return max(1, math.ceil(at - now))


@dataclass(slots=True)
class Totals:
    """What all texts of a model took since the server was started."""

    texts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_micro_usdc: int = 0
