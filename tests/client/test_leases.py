"""Leases of sessions that only count: who gets which; when they open, end and are replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.client import leases
from splitup.client.leases import Lease, LeaseOptions, LeasePool
from splitup.client.queueing import Caller
from splitup.core import tuning
from splitup.core.errors import (
    ChainRejected,
    ExecutionFailed,
    Implausible,
    InvalidInput,
    Throttled,
    Unavailable,
)
from splitup.decode.step import make_causal_step
from splitup.messages.snapshots import ModelHolders
from tests.builders import HANG_S

ANN, BOB = "key ann", "key bob"


class Sessions:
    """Stands for a network: opens sessions and keeps count of them."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.ended: list[Any] = []
        self.errors: list[Exception] = []
        self.unplanned: list[ExecutionFailed] = []  # whose refunds do not come
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: ModelHolders | None = None  # by members

    async def look(self, _: str) -> ModelHolders | None:
        return self.seen

    @asynccontextmanager
    async def session(
        self,
        model: str,
        *,
        steps: int,
        deadline_s: float,
        verify: str | None,
        on_failure: Callable[[ExecutionFailed], None],
    ) -> AsyncIterator[Any]:
        if self.unplanned:
            on_failure(self.unplanned.pop(0))
            await asyncio.Event().wait()  # for the refund
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        session = SimpleNamespace(
            plan=SimpleNamespace(request=SimpleNamespace(steps=steps)),
            steps=0,
            failure=None,
            loading=set(),
            execution_id=f"0x{len(self.opened):064x}",
            manifest=SimpleNamespace(text=None),
        )
        self.opened.append(session)
        try:
            yield session
        finally:
            self.ended.append(session)


async def settle(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  (the condition has no event)
            await asyncio.sleep(0)


@asynccontextmanager
async def make_pool(
    sessions: Sessions | None = None, **options: Any
) -> AsyncIterator[tuple[LeasePool, Sessions]]:
    sessions = sessions or Sessions()
    pool = LeasePool(sessions, "model", LeaseOptions(**options))  # type: ignore[arg-type]
    pool.open()
    try:
        yield pool, sessions
    finally:
        await pool.close()
        assert len(sessions.ended) == len(sessions.opened), "every execution is ended"


async def use(
    pool: LeasePool, steps: int = 1, prompt: list[int] | None = None, principal: str = ANN
) -> Lease:
    async with pool.borrow(principal, prompt or [1], steps) as lease:
        lease.session.steps += steps
        return lease


async def test_one_execution_serves_requests_one_after_the_other() -> None:
    async with make_pool(warm=1, steps=100) as (pool, sessions):
        await settle(lambda: len(pool.idle) == 1)
        leases = {id(await use(pool, 10)) for _ in range(5)}
        assert len(leases) == len(sessions.opened) == 1


async def test_requests_at_once_have_leases_of_their_own_up_to_the_limit() -> None:
    async with make_pool(warm=0, most=2) as (pool, sessions):
        order: list[int] = []

        async def request(number: int, begun: asyncio.Event, go: asyncio.Event) -> None:
            async with pool.borrow(ANN, [1], 1):
                order.append(number)
                begun.set()
                await go.wait()

        begun = [asyncio.Event() for _ in range(4)]
        go = [asyncio.Event() for _ in range(4)]
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(request(number, begun[number], go[number])))
            await asyncio.sleep(0)
        await begun[1].wait()
        assert len(pool.lent) == 2 and len(sessions.opened) == 2 and order == [0, 1]
        go[1].set()
        await begun[2].wait()  # first come, first served
        assert order == [0, 1, 2]
        for event in go:
            event.set()
        await asyncio.gather(*tasks)
        assert len(sessions.opened) == 2


async def test_a_request_gets_the_lease_that_holds_most_of_its_prompt() -> None:
    async with make_pool(warm=2, most=2) as (pool, _):
        await settle(lambda: len(pool.idle) == 2)
        async with (
            pool.borrow(ANN, [1, 2, 3], 1) as first,
            pool.borrow(ANN, [7, 8, 9], 1) as second,
        ):
            first.contents.feed(make_causal_step([1, 2, 3], 0))
            second.contents.feed(make_causal_step([7, 8, 9], 0))
        for _ in range(2):
            async with pool.borrow(ANN, [7, 8, 1], 1) as found:
                assert found is second
            async with pool.borrow(ANN, [1, 2, 3, 4], 1) as found:
                assert found is first


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), min_size=1, max_size=5)),
        max_size=30,
    ),
    most=st.integers(1, 3),
)
async def test_s21_what_is_cached_tells_of_ones_own_prompts_alone(
    asked: list[tuple[str, list[int]]], most: int
) -> None:
    """Whatever others ask, nobody sees more cached than of prompts that were its own."""
    own: dict[str, list[list[int]]] = {}
    used: dict[str, set[str]] = {}
    async with make_pool(warm=1, most=most, steps=1_000) as (pool, _):
        for principal, prompt in asked:
            async with asyncio.timeout(HANG_S), pool.borrow(principal, prompt, 1) as lease:
                cached = lease.contents.count_common(prompt)
                lease.contents.feed(make_causal_step(prompt, 0))
            used.setdefault(lease.session.execution_id, set()).add(principal)
            earlier = own.setdefault(principal, [])
            assert cached <= max((count_equal(prompt, each) for each in earlier), default=0)
            earlier.append(prompt)
        for execution, principals in used.items():
            assert len(principals) == 1
            for principal in "abc":
                assert pool.is_of(execution, principal) == (principal in principals)


def count_equal(left: list[int], right: list[int]) -> int:
    """Return how long the common beginning is."""
    return next(
        (place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


async def test_s21_others_leases_make_room_and_nobody_waits_for_ever() -> None:
    """One principal always has a request that waits; the other one is served in its turn."""
    async with make_pool(warm=0, most=1) as (pool, sessions):
        held = asyncio.Event()

        async def hold() -> None:
            async with pool.borrow(ANN, [1], 1):
                held.set()
                await go.wait()

        go = asyncio.Event()
        first = asyncio.create_task(hold())
        await held.wait()
        other = asyncio.create_task(use(pool, principal=BOB))
        await asyncio.sleep(0)
        later = asyncio.create_task(use(pool, principal=ANN))
        await asyncio.sleep(0)
        go.set()
        await settle(other.done)
        assert other.result().principal == BOB and not later.done()
        assert (await later).principal == ANN
        await first
        assert len(sessions.opened) == 3, "an execution for each change of hands"


async def test_a_request_whose_lease_is_there_overtakes_one_that_waits_for_its_own() -> None:
    async with make_pool(warm=0, most=2) as (pool, sessions):
        anns = await use(pool, principal=ANN)
        sessions.gate.clear()
        other = asyncio.create_task(use(pool, principal=BOB))
        await asyncio.sleep(0)
        assert await use(pool, principal=ANN) is anns and not other.done()
        sessions.gate.set()
        assert await other is not anns


async def test_a_worn_lease_is_replaced_before_it_is_used_up() -> None:
    async with make_pool(warm=1, most=1, steps=8) as (pool, sessions):
        await settle(lambda: len(pool.idle) == 1)
        old = await use(pool, 7)
        await settle(lambda: len(sessions.opened) == 2 and len(pool.idle) == 1)
        assert await use(pool, 1) is not old
        await settle(lambda: len(sessions.ended) == 1)
        assert sessions.ended == [old.session]


async def test_a_request_too_large_for_what_is_open_gets_an_execution_of_its_size() -> None:
    async with make_pool(warm=1, most=1, steps=8) as (pool, sessions):
        await settle(lambda: len(pool.idle) == 1)
        lease = await use(pool, 50)
        assert lease.session.plan.request.steps == 50 and len(sessions.opened) == 2


async def test_a_failed_execution_is_not_lent_again() -> None:
    async with make_pool(warm=0) as (pool, sessions):
        with pytest.raises(ExecutionFailed):
            async with pool.borrow(ANN, [1], 1) as lease:
                lease.session.failure = SimpleNamespace()  # type: ignore[assignment]
                raise ExecutionFailed("a node failed", execution_id="0x")
        assert await use(pool) is not lease
        assert len(sessions.opened) == 2


async def test_who_waits_hears_why_no_execution_can_be_opened() -> None:
    async with make_pool(warm=0) as (pool, sessions):
        sessions.errors = [Unavailable("no chain answers")]
        with pytest.raises(Unavailable, match="no chain answers"):
            await use(pool)
        assert (await use(pool)).session in sessions.opened


@pytest.mark.parametrize("kind", [InvalidInput, ChainRejected])
async def test_what_the_account_lacks_is_told_to_the_log_and_to_no_client(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async with make_pool(warm=0) as (pool, sessions):
        sessions.errors = [kind("account 0x12 lacks 5 USDC")]
        with pytest.raises(Unavailable, match=r"cannot be run now; the server's log says why$"):
            await use(pool)
    assert "account 0x12 lacks 5 USDC" in caplog.text


async def test_a_warm_lease_that_cannot_be_opened_is_tried_again_for_the_next_request() -> None:
    async with make_pool(warm=1) as (pool, sessions):
        sessions.errors = [Unavailable("no chain")]
        await settle(lambda: not sessions.errors)
        assert (await use(pool)).session is sessions.opened[0]


async def test_a_full_queue_is_an_error_at_once() -> None:
    async with make_pool(warm=0, most=1, waiting=2) as (pool, sessions):
        sessions.gate.clear()
        waiting = [asyncio.create_task(use(pool)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Throttled, match="2 requests wait"):
            await use(pool)
        sessions.gate.set()
        await asyncio.gather(*waiting)


async def test_a_request_that_is_cancelled_leaves_its_place_and_its_lease() -> None:
    async with make_pool(warm=0, most=1) as (pool, sessions):
        sessions.gate.clear()
        gone = asyncio.create_task(use(pool))
        stays = asyncio.create_task(use(pool))
        await asyncio.sleep(0)
        gone.cancel()
        sessions.gate.set()
        lease = await stays
        assert len(pool.lent) == 0 and lease.session is sessions.opened[0]

        async def hold() -> None:
            async with pool.borrow(ANN, [1], 1):
                await asyncio.Event().wait()

        holder = asyncio.create_task(hold())
        await settle(lambda: len(pool.lent) == 1)
        holder.cancel()
        await settle(lambda: len(pool.lent) == 0)
        assert await use(pool) is lease


async def test_leases_beyond_the_warm_ones_end_when_nobody_uses_them() -> None:
    async with make_pool(warm=1, most=3, idle_s=0.01) as (pool, sessions):
        async with pool.borrow(ANN, [1], 1), pool.borrow(ANN, [1], 1), pool.borrow(ANN, [1], 1):
            assert len(pool.lent) == 3
        await settle(lambda: len(sessions.ended) == 2)
        assert len(pool.idle) == 1


async def test_a_lease_begins_no_request_in_the_second_half_of_its_time() -> None:
    async with make_pool(warm=0, seconds=0.02) as (pool, sessions):
        first = await use(pool)
        await settle(lambda: len(sessions.ended) == 1)  # by the timer
        assert await use(pool) is not first


@pytest.mark.parametrize("values", [{"warm": 3, "most": 2}, {"most": 0, "warm": 0}, {"steps": 0}])
def test_options_that_cannot_be_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        LeaseOptions(**values)  # type: ignore[arg-type]


async def test_a_server_that_stops_does_not_wait_for_a_refund(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("splitup.client.leases.CLOSE_S", 0.01)

    class Stuck(Sessions):
        @asynccontextmanager
        async def session(self, model: str, **terms: Any) -> AsyncIterator[Any]:
            async with super().session(model, **terms) as session:
                yield session
                await asyncio.Event().wait()

    pool = LeasePool(Stuck(), "model", LeaseOptions())  # type: ignore[arg-type]
    pool.open()
    await settle(lambda: len(pool.idle) == 1)
    await pool.close()
    assert "not waiting for the end of execution 0x000" in caplog.text


async def test_no_request_waits_behind_an_opening_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "LEASE_WAIT_S", 0.02)
    async with make_pool(most=2, warm=1) as (pool, sessions):
        sessions.gate.clear()  # as when all nodes have stopped: no plan, and no refusal
        with pytest.raises(Unavailable, match="no nodes could be found for model model"):
            await use(pool)
        await settle(lambda: all(one.is_stalled for one in pool._openings))
        assert pool._openings
        monkeypatch.setattr(tuning, "LEASE_WAIT_S", HANG_S)
        hanging, sessions.gate = sessions.gate, asyncio.Event()
        sessions.gate.set()  # nodes are back; what was asked for before is never planned
        await use(pool)
        assert len(pool.idle) >= 1 and not any(one.is_stalled for one in pool._openings)
        hanging.set()


async def test_a_pool_serves_until_its_leases_fail_and_none_opens() -> None:
    async with make_pool(warm=1) as (pool, sessions):
        assert pool.is_serving
        await settle(lambda: len(pool.idle) == 1)
        sessions.opened[0].failure = SimpleNamespace()
        sessions.errors = [Unavailable("the chain does not answer")]
        pool._adjust()
        await settle(lambda: not pool.is_serving)
        await use(pool)  # nodes are back
        assert pool.is_serving


async def test_no_request_waits_for_the_refund_of_an_execution_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "FAILED_CLOSE_S", 0.01)
    async with make_pool(warm=0) as (pool, sessions):
        sessions.unplanned = [ExecutionFailed("no live node serves task 0", execution_id="0x")]
        async with asyncio.timeout(tuning.LEASE_WAIT_S / 2):
            with pytest.raises(Unavailable, match=r"cannot be run now; the server's log says why$"):
                await use(pool)
            await use(pool)  # nodes are back
            await pool.close()


async def test_a_model_that_no_node_holds_or_loads_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "HOLDERS_POLL_S", 0.001)
    async with make_pool(warm=0) as (pool, sessions):
        sessions.gate.clear()
        sessions.seen = see(loading=0)
        async with asyncio.timeout(tuning.LEASE_WAIT_S / 2):
            with pytest.raises(Unavailable, match="none is loading it"):
                await use(pool)
        assert "loading 3 of 12 tasks of model: no node is live" in caplog.text
        with pytest.raises(Unavailable, match="none is loading it"):
            pool.check(ANN)
        refused_at, _ = pool._failure
        await settle(lambda: pool._failure[0] > refused_at)  # for streams, which begin at once
        sessions.seen = None
        sessions.gate.set()
        await use(pool)
        pool.check(ANN)


async def test_who_leaves_as_all_are_refused_does_not_keep_the_others_waiting() -> None:
    async with make_pool(warm=0) as (pool, sessions):
        sessions.gate.clear()
        leaving, waiting = (asyncio.create_task(use(pool)) for _ in range(2))
        await asyncio.sleep(0)
        assert len(pool.waiting) == 2
        leaving.cancel()  # it has not run since
        pool._refuse_all()
        with pytest.raises(Unavailable, match="none is loading it"):
            await waiting
        with pytest.raises(asyncio.CancelledError):
            await leaving
        sessions.gate.set()


async def test_a_model_that_nodes_load_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "HOLDERS_POLL_S", 0.001)
    monkeypatch.setattr(tuning, "LEASE_WAIT_S", 0.05)
    async with make_pool(warm=0) as (pool, sessions):
        sessions.gate.clear()
        sessions.seen = see(loading=1)
        waiting = asyncio.create_task(use(pool))
        await asyncio.sleep(4 * tuning.LEASE_WAIT_S)
        assert not waiting.done()
        sessions.gate.set()
        await waiting


def see(loading: int) -> ModelHolders:
    figures = {"held": 12, "reported": 3, "loading": loading, "able": 0, "live": loading}
    return ModelHolders(model_id="0x" + "11" * 32, tasks=12, **figures)


async def test_an_opening_that_hung_serves_when_it_comes_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "LEASE_WAIT_S", 0.02)
    async with make_pool(most=1, warm=0) as (pool, sessions):
        sessions.gate.clear()
        with pytest.raises(Unavailable):
            await use(pool)
        sessions.gate.set()
        await settle(lambda: len(pool.idle) == 1)
        await use(pool)
        assert len(sessions.opened) == 1


async def test_a_spoiled_lease_serves_nobody_any_more() -> None:
    async with make_pool(most=2, warm=0) as (pool, sessions):
        async with pool.borrow(ANN, [1, 2], 1) as lease:
            lease.session.plan.executors = lambda: ("0xa", "0xb", "0xa")
            lease.spoil(Implausible("NaN"))
        assert await use(pool, prompt=[1, 2]) is not lease
        await settle(lambda: sessions.ended == [lease.session])


async def test_a_server_that_stops_does_not_wait_for_refunds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a failed execution locked comes back after its deadline, minutes later."""
    monkeypatch.setattr(leases, "FAILED_CLOSE_S", 0.1)
    sessions, refunded = Sessions(), asyncio.Event()
    opened, said = sessions.session, []

    @asynccontextmanager
    async def refund_late(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async with opened(*arguments, **options) as session:
            yield session
            said.append(session)
            await refunded.wait()

    sessions.session = refund_late  # type: ignore[method-assign]
    pool = LeasePool(sessions, "model", LeaseOptions(warm=0))  # type: ignore[arg-type]
    pool.open()
    async with pool.borrow(ANN, [1], 1) as lease:
        lease.session.failure = SimpleNamespace()  # type: ignore[assignment]
    async with asyncio.timeout(HANG_S / 4):
        await pool.close()
    assert not refunded.is_set() and said == sessions.ended == [lease.session]


# ---- who waits, and for how long -----------------------------------------------------------------


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
