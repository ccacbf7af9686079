"""Places of a limited number, and turns, that groups of holders share fairly."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

H = TypeVar("H", bound=Hashable)
D = TypeVar("D")
T = TypeVar("T")


class Places(Generic[H]):
    """Places for holders, each of a group (an address, a key), of which nobody can take all.

    When every place is taken, a newcomer gets the place of the newest holder of the largest group,
    unless that group would then be no larger than the newcomer's: then the newcomer is refused. So
    a group that floods loses its own newest holders, and one that holds little always gets in.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken = 0
        self._groups: dict[str, dict[H, None]] = {}  # holders, oldest first

    def __len__(self) -> int:
        return self._taken

    def take(self, group: str, holder: H) -> tuple[str, H] | None:
        """Give ``holder`` a place; return who has none now: None, another one, or the newcomer."""
        shed = None
        if self._taken >= self._count:
            largest = max(self._groups, key=lambda name: len(self._groups[name]), default=group)
            if len(self._groups.get(largest, ())) <= len(self._groups.get(group, ())) + 1:
                return group, holder
            shed = largest, next(reversed(self._groups[largest]))
            self.leave(*shed)
        self._groups.setdefault(group, {})[holder] = None
        self._taken += 1
        return shed

    def leave(self, group: str, holder: H) -> None:
        """Free the place of ``holder``, if it has one."""
        holders = self._groups.get(group, {})
        if holder in holders:
            del holders[holder]
            self._taken -= 1
            if not holders:
                del self._groups[group]


@contextmanager
def hold_place(places: Places[asyncio.Task[Any]], group: str, refusal: Exception) -> Iterator[None]:
    """Hold a place for the current task; raise ``refusal``, or cancel another group's task."""
    task = asyncio.current_task()
    assert task is not None
    shed = places.take(group, task)
    if shed == (group, task):
        raise refusal
    if shed is not None:
        shed[1].cancel()
    try:
        yield
    finally:
        places.leave(group, task)


class RestingTurns:
    """One turn at a time for each group, which rests after it for a multiple of what it took."""

    def __init__(self, rest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest, self._clock = rest, clock
        self._locks: dict[str, asyncio.Lock] = {}
        self._rests_until: dict[str, float] = {}

    @asynccontextmanager
    async def hold(self, group: str) -> AsyncIterator[None]:
        """Wait for the turn of ``group``, and hold it for a block."""
        async with self._locks.setdefault(group, asyncio.Lock()):
            await asyncio.sleep(self._rests_until.get(group, 0.0) - self._clock())
            yield

    def take(self, group: str, work: Callable[[D], T], data: D) -> T:
        """Return ``work(data)``, within a turn of ``group``; what it took is rested for."""
        began = self._clock()
        try:
            return work(data)
        finally:
            now = self._clock()
            self._rests_until[group] = now + self._rest * (now - began)


class FairLock:
    """A lock that goes round by group; within a group, first come is first served.

    Up to ``count`` hold it at once. Whoever waits, waits for one holder of each other group at
    most, however many a group sends.
    """

    def __init__(self, count: int = 1) -> None:
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def hold(self, group: str) -> AsyncIterator[None]:
        """Hold the lock for a block."""
        if not self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(group, deque()).append(turn)
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._pass_on()  # the turn had come
                raise
        else:
            self._free -= 1
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the lock to the first of the next group that still waits."""
        while self._waiting:
            group, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[group] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)  # held on, until it runs
                return
        self._free += 1
