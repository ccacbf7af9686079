"""Leases of sessions that only count: who gets which; when they open, end and are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.client import leases
from splitup.client.leases import LeaseOptions, LeasePool
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
from tests.client.lease_pools import ANN, BOB, Sessions, make_pool, settle, use


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
