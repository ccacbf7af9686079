"""A worker's sessions: at most so many, and none for ever.

The least recently used one goes first, of those of the caller that has the most.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from splitup.core.errors import InvalidInput, Refused, SplitUpError, Throttled

_MAX_ID: Final = 64  # characters
_log = logging.getLogger("splitup.workers")


class Ending(Protocol):
    """What a session holds; ``end`` frees it."""

    async def end(self) -> None:
        """Free the model's cache."""


S = TypeVar("S", bound=Ending)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions a worker keeps, and for how long one that nobody uses."""

    most: int = 8
    ttl_s: float = 300.0


@dataclass(eq=False, slots=True)
class _Entry(Generic[S]):
    content: S
    used_at: float
    owner: str
    users: int = 0


def refuse_step(message: str) -> Refused:
    """Return the error of a caller that is out of step with its session."""
    return Refused(f"out of step: {message}; begin again at 0", status=409)


class WorkerSessions(Generic[S]):
    """The sessions of one worker, by the ids that callers choose and keep to themselves."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._entries: OrderedDict[str, _Entry[S]] = OrderedDict()  # least recent first
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def use(self, name: str, make: Callable[[], S] | None, owner: str = "") -> Iterator[S]:
        """Lend a session, which is not evicted meanwhile; ``make`` a missing one, if it is given.

        A session is forgotten when its use ends by an error of the model, or by cancellation:
        nobody knows what its cache holds. Raises Refused for a missing one, Throttled when all are
        in use.
        """
        if not 1 <= len(name) <= _MAX_ID:
            raise InvalidInput(f"a session's id has 1 to {_MAX_ID} characters, not {len(name)}")
        entry = self._entries.get(name)
        if entry is None:
            if make is None:
                raise refuse_step("there is no such session here")
            self._make_room()
            entry = self._entries[name] = _Entry(make(), _now(), owner)
        entry.users += 1
        try:
            yield entry.content
        except BaseException as error:
            is_harmless = type(error) in (InvalidInput, Refused)  # the request was not begun
            if not is_harmless and self._entries.get(name) is entry:
                self.end(name)
            raise
        finally:
            entry.users -= 1
            entry.used_at = _now()
            if self._entries.get(name) is entry:
                self._entries.move_to_end(name)
            self._expire()

    def end(self, name: str) -> None:
        """Forget a session, if there is one, and free what it holds."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            task = asyncio.create_task(_end(entry.content))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all."""
        if self._timer is not None:
            self._timer.cancel()
        for name in tuple(self._entries):
            self.end(name)
        await asyncio.gather(*self._ending)

    def _make_room(self) -> None:
        if len(self._entries) < self._limits.most:
            return
        unused = [name for name, entry in self._entries.items() if not entry.users]
        if not unused:
            raise Throttled(f"all {self._limits.most} sessions of this worker are in use")
        counts = Counter(entry.owner for entry in self._entries.values())
        self.end(max(unused, key=lambda name: counts[self._entries[name].owner]))  # oldest first

    def _expire(self) -> None:
        """End sessions that nobody has used for long; look again when the next one may be due."""
        if self._timer is not None:
            self._timer.cancel()
        now, ttl_s = _now(), self._limits.ttl_s
        unused = {name: entry for name, entry in self._entries.items() if not entry.users}
        for name, entry in unused.items():
            if now >= entry.used_at + ttl_s:
                self.end(name)
        times = [entry.used_at + ttl_s for name, entry in unused.items() if name in self._entries]
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(min(times), self._expire) if times else None


async def _end(content: Ending) -> None:
    try:
        await content.end()
    except SplitUpError as error:
        _log.warning("a session has not ended well: %s", error)


def _now() -> float:
    return asyncio.get_running_loop().time()
