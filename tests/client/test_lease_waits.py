"""Who waits for a lease, and for how long, by a clock that a test sets."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from splitup.client import leases
from splitup.client.leases import Lease, LeasePool
from splitup.client.queueing import Caller
from splitup.core import tuning
from splitup.core.errors import (
    ChainRejected,
    Throttled,
    Unavailable,
)
from tests.client.lease_pools import ANN, BOB, Sessions, make_pool, settle, use


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let a test say what time it is."""
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr(leases, "_now", lambda: clock.now)
    return clock


async def hold(pool: LeasePool, go: asyncio.Event, caller: Caller | None = None) -> None:
    async with pool.borrow(ANN, [1], 1, caller):
        await go.wait()


async def test_a_request_that_would_be_served_too_late_is_told_when_to_come_back(
    clock: SimpleNamespace,
) -> None:
    go = asyncio.Event()
    async with make_pool(warm=0, most=2) as (pool, _):
        running = [asyncio.create_task(hold(pool, go)) for _ in range(2)]
        await settle(lambda: len(pool.lent) == 2)
        clock.now += 8  # no request has ended, and two of them are not done in 8 s
        waits = []
        for _ in range(3):
            with pytest.raises(Throttled, match="each takes 8 s") as caught:
                await use_for(pool, Caller(4, came_at=clock.now))
            waits.append(caught.value.retry_s)
        assert waits == [4, 8, 12], "not all at once"
        patient = [asyncio.create_task(use_for(pool, Caller(20, came_at=clock.now)))]
        await settle(lambda: len(pool.waiting) == 1)
        go.set()
        await asyncio.gather(*running, *patient)
        await use_for(pool, Caller(4, came_at=clock.now))  # nothing runs: it is tried


async def test_a_client_that_does_not_say_waits_for_a_minute_at_most(
    clock: SimpleNamespace,
) -> None:
    go = asyncio.Event()
    async with make_pool(warm=0, most=1) as (pool, _):
        running = asyncio.create_task(hold(pool, go))
        await settle(lambda: len(pool.lent) == 1)
        clock.now += tuning.QUEUE_WAIT_S / 2
        waiting = asyncio.create_task(use(pool))
        await settle(lambda: len(pool.waiting) == 1)
        clock.now += 1  # the second one's turn would come after twice as long
        with pytest.raises(Throttled):
            await use(pool)
        go.set()
        await asyncio.gather(running, waiting)


async def test_fewer_run_at_once_when_clients_give_up_before_their_answers() -> None:
    """All at once would all be late; what runs in time may have company again."""
    go, inside = asyncio.Event(), Counter[str]()

    async def give_up() -> None:
        async with pool.borrow(ANN, [1], 1):
            inside[ANN] += 1
            await go.wait()

    async with make_pool(warm=0, most=4) as (pool, _):
        late = [asyncio.create_task(give_up()) for _ in range(4)]
        await settle(lambda: inside[ANN] == 4)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        asking = [asyncio.create_task(hold(pool, go)) for _ in range(4)]
        await settle(lambda: len(pool.lent) == 1)
        assert (len(pool.lent), len(pool.waiting)) == (1, 3)
        go.set()
        await asyncio.gather(*asking)
        go.clear()
        asking = [asyncio.create_task(hold(pool, go)) for _ in range(4)]
        await settle(lambda: len(pool.lent) == 3)
        assert len(pool.waiting) == 1
        go.set()
        await asyncio.gather(*asking)


async def test_s36_a_key_that_gives_up_often_slows_down_itself_alone() -> None:
    go, inside = asyncio.Event(), Counter[str]()

    async def ask(principal: str) -> None:
        async with pool.borrow(principal, [1], 1):
            inside[principal] += 1
            await go.wait()

    async with make_pool(warm=0, most=4) as (pool, _):
        late = [asyncio.create_task(ask(ANN)) for _ in range(4)]
        await settle(lambda: inside[ANN] == 4)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        asking = [asyncio.create_task(ask(who)) for who in (ANN, ANN, BOB, BOB, BOB)]
        await settle(lambda: len(pool.lent) == 4)
        await settle(lambda: inside[BOB] == 3)
        assert (inside[ANN], len(pool.waiting)) == (5, 1)
        go.set()
        await asyncio.gather(*asking)


async def test_a_full_queue_refuses_nobody_who_has_just_left() -> None:
    go = asyncio.Event()
    async with make_pool(warm=0, most=1, waiting=2) as (pool, _):
        running = asyncio.create_task(hold(pool, go))
        await settle(lambda: len(pool.lent) == 1)
        waiting = [asyncio.create_task(hold(pool, go)) for _ in range(2)]
        await settle(lambda: len(pool.waiting) == 2)
        asyncio.get_running_loop().call_soon(go.set)
        waiting[1].cancel()  # its place is free, though its task has not run yet
        async with pool.borrow(BOB, [1], 1):
            pass
        done = await asyncio.gather(running, *waiting, return_exceptions=True)
        assert [type(one) for one in done] == [type(None), type(None), asyncio.CancelledError]


async def test_one_that_gives_up_alone_changes_nothing() -> None:
    async with make_pool(warm=0, most=2) as (pool, _):
        for _ in range(3):
            alone = asyncio.create_task(hold(pool, asyncio.Event()))
            await settle(lambda: len(pool.lent) == 1)
            alone.cancel()
            await asyncio.gather(alone, return_exceptions=True)
        go = asyncio.Event()
        both = [asyncio.create_task(hold(pool, go)) for _ in range(2)]
        await settle(lambda: len(pool.lent) == 2)
        go.set()
        await asyncio.gather(*both)


async def test_s36_a_key_that_floods_waits_for_its_own_requests() -> None:
    served: list[str] = []
    go = asyncio.Event()

    async def ask(principal: str) -> None:
        async with pool.borrow(principal, [1], 1):
            served.append(principal)
            await go.wait()

    async with make_pool(warm=0, most=1, waiting=4) as (pool, _):
        flood = [asyncio.create_task(ask(ANN))]
        await settle(lambda: len(pool.lent) == 1)
        flood += [asyncio.create_task(ask(ANN)) for _ in range(4)]
        await settle(lambda: len(pool.lent) == 1 and len(pool.waiting) == 4)
        other = [asyncio.create_task(ask(BOB))]
        await settle(flood[4].done)
        pool.check(BOB)
        with pytest.raises(Throttled):
            pool.check(ANN)
        other.append(asyncio.create_task(ask(BOB)))
        await settle(flood[3].done)
        go.set()
        done = await asyncio.gather(*flood, *other, return_exceptions=True)
    assert [type(one) for one in done if one is not None] == [Throttled, Throttled]
    assert served == [ANN, BOB, ANN, BOB, ANN], "turns go round"


async def test_s36_who_is_refused_often_makes_nobody_else_come_later(
    clock: SimpleNamespace,
) -> None:
    go = asyncio.Event()
    async with make_pool(warm=0, most=1) as (pool, _):
        running = asyncio.create_task(hold(pool, go))
        await settle(lambda: len(pool.lent) == 1)
        clock.now += 8
        for principal, count in ((ANN, 6), (BOB, 1)):
            for _ in range(count):
                with pytest.raises(Throttled) as caught:
                    pool.check(principal, Caller(4, came_at=clock.now))
            assert caught.value.retry_s == 8 * count
        go.set()
        await running


async def use_for(pool: LeasePool, caller: Caller) -> Lease:
    async with pool.borrow(ANN, [1], 1, caller) as lease:
        return lease


async def test_work_that_nobody_waits_for_keeps_its_place_and_does_not_start() -> None:
    go = asyncio.Event()
    async with make_pool(warm=0, most=1) as (pool, sessions):
        running = asyncio.create_task(hold(pool, go))
        await settle(lambda: len(pool.lent) == 1)
        caller = Caller()
        first = asyncio.create_task(use_for(pool, caller))
        second = asyncio.create_task(use_for(pool, Caller()))
        await settle(lambda: len(pool.waiting) == 2)
        caller.leave()
        go.set()
        await asyncio.gather(running, second)
        assert len(pool.idle) == 1 and len(pool.waiting) == 1 and not first.done()
        caller.come(0.0, None)
        await first
        assert not caller.on_return and len(sessions.opened) == 1


class SmallBalance(Sessions):
    """Opens no session of more than 100 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def session(self, model: str, *, steps: int, **options: Any) -> Any:
        self.asked.append(steps)
        if steps > 100:
            self.errors.append(ChainRejected("the balance is too small"))
        return super().session(model, steps=steps, **options)


async def test_s87_who_needs_more_steps_than_can_be_paid_fails_alone() -> None:
    sessions = SmallBalance()
    async with make_pool(sessions, warm=0, steps=100) as (pool, _):
        with pytest.raises(Unavailable):
            await use(pool, 5_000)
        pool.check(BOB)
        asking = [asyncio.create_task(use(pool, 5_000)) for _ in range(2)]
        asking.insert(1, asyncio.create_task(use(pool, principal=BOB)))
        done = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(one) for one in done] == [Unavailable, Lease, Unavailable]
    assert sorted(sessions.asked) == [100, 5_000, 5_000, 5_000]


async def test_s87_nobody_waits_for_the_large_lease_of_who_has_left() -> None:
    sessions = SmallBalance()
    async with make_pool(sessions, warm=0, steps=100) as (pool, _):
        sessions.gate.clear()
        large = asyncio.create_task(use(pool, 5_000))
        await settle(lambda: sessions.asked == [5_000])
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)
        other = asyncio.create_task(use(pool, principal=BOB))
        await settle(lambda: sessions.asked == [5_000, 100])
        sessions.gate.set()
        await other


async def test_s88_a_keys_long_texts_refuse_nobody_elses_short_ones(clock: SimpleNamespace) -> None:
    go = asyncio.Event()
    async with make_pool(warm=0, most=2) as (pool, _):
        for _ in range(2):
            left = asyncio.create_task(hold(pool, asyncio.Event()))
            await settle(lambda: len(pool.lent) == 1)
            clock.now += 100
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        running = asyncio.create_task(hold(pool, go))
        await settle(lambda: len(pool.lent) == 1)
        clock.now += 100
        with pytest.raises(Throttled):
            pool.check(ANN, Caller(60, came_at=clock.now))
        pool.check(BOB, Caller(60, came_at=clock.now))  # a lease is free for it
        go.set()
        await running
