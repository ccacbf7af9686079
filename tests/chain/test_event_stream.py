from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from splitup.chain.client import Chain
from splitup.chain.event_stream import BlockId, BlockPace, ChainEvent, Trail
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable
from tests.builders import HANG_S, find_free_port
from tests.chain.conftest import (
    MNEMONIC,
    MODEL,
    PRICE_MICRO_USDC,
    Network,
    deploy_market,
    open_network,
)
from tests.chain.lagging import LaggingRpc
from tests.chain.proxy import Proxy
from tests.local_chain import mine, start_anvil

# ---- the trail, without a chain ----------------------------------------------------------------


def make_event(block: BlockId, index: int = 0) -> ChainEvent:
    return ChainEvent("E", {}, block.number, block.hash, index, "0x", "market")


def test_trail_takes_back_what_a_reorganisation_undoes_latest_first() -> None:
    blocks = [BlockId(number, f"a{number}") for number in range(6)]
    trail = Trail(1, [blocks[0]])
    told = (make_event(blocks[1]), make_event(blocks[3]), make_event(blocks[3], 1))
    trail.advance(blocks[4], told)
    trail.advance(blocks[5], (make_event(blocks[5]),))
    assert trail.next_block == 6
    reverted = trail.rewind(blocks[1])
    assert [(e.block_number, e.log_index, e.removed) for e in reverted] == [
        (5, 0, True),
        (3, 1, True),
        (3, 0, True),
    ]
    assert trail.next_block == 2
    assert trail.checkpoints == [blocks[1], blocks[0]]


def test_f15_trail_refuses_to_undo_deeper_than_its_reach() -> None:
    trail = Trail(1, [BlockId(0, "a0")])
    with pytest.raises(ChainUnavailable, match="reorganised by more than 64 blocks"):
        trail.rewind(None)


@given(st.lists(st.booleans(), min_size=1, max_size=400))
def test_trail_is_bounded_and_always_reaches_back_far_enough(has_event: list[bool]) -> None:
    trail = Trail(1, [BlockId(0, "a0")])
    for number, present in enumerate(has_event, start=1):
        block = BlockId(number, f"a{number}")
        trail.advance(block, (make_event(block),) if present else ())
    checkpoints = trail.checkpoints
    assert len(checkpoints) <= tuning.REORG_BLOCKS + 2
    assert checkpoints[0].number == len(has_event)
    assert checkpoints[-1].number <= max(0, len(has_event) - tuning.REORG_BLOCKS)


POLL_S = 0.05


def follow(times: list[float]) -> tuple[int, list[float]]:
    """Return how often a follower asks, and how late it sees each block that comes at a time."""
    pace, now, asked, seen = BlockPace(POLL_S), times[0], 0, 0
    late = []
    while seen < len(times):
        asked += 1
        present = sum(at <= now for at in times)
        late += [now - at for at in times[seen:present]]
        if present > seen:
            pace.note_block(present, now)
            seen = present
        now += pace.compute_pause(now)
    return asked, late


@pytest.mark.parametrize(("interval_s", "most"), [(0.25, 3), (1.0, 5), (2.0, 9), (12.0, 24)])
def test_a_steady_chain_is_asked_seldom_and_its_blocks_are_seen_at_once(
    interval_s: float, most: float
) -> None:
    asked, late = follow([interval_s * number for number in range(200)])
    assert max(late) <= POLL_S + 1e-9
    assert asked <= most * 200 + interval_s / POLL_S  # the first interval is not known yet


@given(st.lists(st.floats(0.001, 15.0), min_size=2, max_size=60))
def test_blocks_without_a_pace_are_seen_within_a_second_and_late_ones_sooner(
    pauses: list[float],
) -> None:
    _, late = follow([sum(pauses[:number]) for number in range(len(pauses))])
    assert max(late) <= tuning.BLOCK_POLL_MAX_S


# ---- on a chain --------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rpc_url() -> AsyncIterator[str]:
    """A chain of our own: Anvil goes back to no state before a reorganisation."""
    async with start_anvil(find_free_port(), mnemonic=MNEMONIC, accounts=12) as anvil:
        yield anvil.url


@pytest_asyncio.fixture
async def network(rpc_url: str) -> AsyncIterator[Network]:
    async with open_network(rpc_url, await deploy_market(rpc_url)) as network:
        yield network


async def take(events: AsyncIterator[ChainEvent], until: str) -> list[ChainEvent]:
    found = []
    async with asyncio.timeout(HANG_S):
        async for event in events:
            found.append(event)
            if event.name == until and not event.removed:
                break
    return found


async def test_events_arrive_in_order_from_the_past_into_the_present(network: Network) -> None:
    head = await network.owner.fetch_head()
    first = head.number - 20
    async with contextlib.aclosing(network.owner.events(from_block=max(0, first))) as events:
        past = await take(events, "Deposited")
        positions = [(event.block_number, event.log_index) for event in past]
        assert positions == sorted(positions)
        assert {"MembersSet", "NodeRegistered", "ModelRegistered"} <= {e.name for e in past}
        assert all(event.contract != "usdc" for event in past)

        request = await network.request()
        (asked,) = await take(events, "RequestNodeSelections")
    assert asked.args["executionId"] == request.execution_id
    assert asked.args["client"] == network.client.address
    assert asked.args["inputsDigest"] == "0x" + "aa" * 32
    assert asked.args["maxPrice"] == PRICE_MICRO_USDC


async def test_who_follows_no_events_is_told_of_every_head(network: Network) -> None:
    async with await Chain.connect(network.url, network.deployment) as chain:
        head = await chain.fetch_head()
        assert await chain.wait_for_head("") == head

        async def follow() -> None:
            async for _ in chain.events(from_block=head.number + 1):
                pass

        following = asyncio.ensure_future(follow())
        await network.rpc.request("anvil_mine", "0x1")
        mined = await asyncio.wait_for(chain.wait_for_head(head.hash), HANG_S)
        assert mined.number == head.number + 1
        await network.rpc.request("anvil_mine", "0x1")
        head = await asyncio.wait_for(chain.wait_for_head(mined.hash), HANG_S)
        assert head.number == mined.number + 1
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def test_who_may_be_late_asks_seldom_until_it_is_woken(network: Network) -> None:
    start = (await network.owner.fetch_head()).number + 1
    wake, looks = asyncio.Event(), asyncio.Event()

    def get_least_s() -> float:
        looks.set()
        return 10 * HANG_S

    async with await Chain.connect(network.url, network.deployment) as chain:
        following = chain.events(from_block=start, wake=wake, get_least_s=get_least_s)
        async with contextlib.aclosing(following) as events:
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.wait_for(looks.wait(), HANG_S)
            await network.request(nonce=3)
            asked = chain.count_requests()
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done and chain.count_requests() == asked
            wake.set()
            event = await asyncio.wait_for(waiting, HANG_S)
            assert event.name == "RequestNodeSelections"


async def test_confirmations_hold_events_back(network: Network) -> None:
    start = (await network.owner.fetch_head()).number + 1
    async with contextlib.aclosing(
        network.owner.events(from_block=start, confirmations=3)
    ) as events:
        await network.request()
        waiting = asyncio.ensure_future(anext(events))
        for _ in range(2):
            await network.rpc.request("anvil_mine", "0x1")
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await network.rpc.request("anvil_mine", "0x1")
        assert (await asyncio.wait_for(waiting, HANG_S)).name == "RequestNodeSelections"


async def test_f14_reorganised_events_are_taken_back_and_told_anew(network: Network) -> None:
    start = (await network.owner.fetch_head()).number + 1
    async with contextlib.aclosing(network.owner.events(from_block=start)) as events:
        await network.request(nonce=2)
        (told,) = await take(events, "RequestNodeSelections")
        await network.rpc.request("anvil_mine", "0x2")
        await network.rpc.request("anvil_reorg", 3, [])
        async with asyncio.timeout(HANG_S):  # its sender sees that it is gone, and sends it again
            seen = [await anext(events) for _ in range(2)]
    assert [event.removed for event in seen] == [True, False]
    assert {event.args["executionId"] for event in seen} == {told.args["executionId"]}
    assert seen[0].block_hash == told.block_hash != seen[1].block_hash


async def test_f14_a_reorganisation_between_two_questions_is_not_overlooked(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = network.owner
    start = (await chain.fetch_head()).number + 1
    ask, is_due = chain._ask_for_logs, False

    async def reorganise_first(*range_: Any) -> Any:
        nonlocal is_due
        if is_due:
            is_due = False
            await network.rpc.request("anvil_reorg", 3, [])
        return await ask(*range_)

    monkeypatch.setattr(chain, "_ask_for_logs", reorganise_first)
    async with contextlib.aclosing(chain.events(from_block=start)) as events:
        await network.request(nonce=2)
        (told,) = await take(events, "RequestNodeSelections")
        waiting = asyncio.ensure_future(anext(events))
        is_due = True
        await network.rpc.request("anvil_mine", "0x1")
        removed = await asyncio.wait_for(waiting, HANG_S)
    assert removed.removed and removed.block_hash == told.block_hash


async def test_f12_events_go_on_from_the_cursor_after_the_endpoint_was_down(
    network: Network,
) -> None:
    target = int(network.url.rpartition(":")[2])
    port = find_free_port()
    start = (await network.owner.fetch_head()).number + 1
    proxy = await Proxy.open(port, target)
    url = f"http://127.0.0.1:{port}"
    async with await Chain.connect(url, network.deployment) as chain:
        async with contextlib.aclosing(chain.events(from_block=start)) as events:
            await network.client.send("market", "withdraw", 1)
            assert [e.name for e in await take(events, "Withdrawn")] == ["Withdrawn"]
            waiting = asyncio.ensure_future(anext(events))
            await proxy.close()
            await network.client.send("market", "withdraw", 2)
            await network.request()
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
            proxy = await Proxy.open(port, target)
            assert (await asyncio.wait_for(waiting, HANG_S)).args["amount"] == 2
            assert (await anext(events)).args["modelId"] == MODEL
    await proxy.close()


@pytest_asyncio.fixture
async def lagging(network: Network) -> AsyncIterator[LaggingRpc]:
    endpoint = LaggingRpc(network.url)
    await endpoint.open()
    yield endpoint
    await endpoint.close()


WORDS = (  # of Alchemy, Infura, QuickNode, Ankr and Chainstack
    "You can make eth_getLogs requests with up to a 10 block range",
    "query returned more than 10000 results. Try with this block range [0x1, 0x2]",
    "eth_getLogs is limited to a 5 range",
    "block range is too wide",
    "Block range limit exceeded. See more details in our docs",
)


SPANS = list(zip((1, 5, 10, 60, 125), WORDS, strict=True))


@pytest.mark.parametrize(
    ("most", "words"),
    [*(pytest.param(*span, marks=pytest.mark.long) for span in SPANS[1:]), SPANS[0]],
)
async def test_ranges_shrink_to_what_an_endpoint_answers(
    network: Network, lagging: LaggingRpc, most: int, words: str
) -> None:
    await network.request()
    await mine(network.rpc, 200)
    await network.request(nonce=2)
    head, wanted = await network.client.fetch_head(), await network.client.fetch_events("market")
    assert len([event for event in wanted if event.name == "RequestNodeSelections"]) >= 2
    lagging.most_blocks, lagging.words = most, words
    async with await Chain.connect(lagging.url, network.deployment) as chain:
        assert await chain.fetch_events("market", last=head.number) == wanted
        start = wanted[-1].block_number
        async with contextlib.aclosing(chain.events(from_block=start)) as events:
            await take(events, "RequestNodeSelections")
    assert sum(blocks > most for blocks in lagging.ranges) <= 12  # refusals are few


async def test_events_come_from_an_endpoint_that_answers_no_batches(
    network: Network, lagging: LaggingRpc
) -> None:
    await network.request()
    await mine(network.rpc, 20)
    wanted = await network.client.fetch_events("market")
    lagging.answers_batches = False
    async with await Chain.connect(lagging.url, network.deployment) as chain:
        assert await chain.fetch_events("market") == wanted


async def test_f13_no_event_is_missed_where_backends_lag_behind(
    network: Network, lagging: LaggingRpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend without the last blocks says that they have no logs, and not that it lags."""
    monkeypatch.setattr(tuning, "RPC_BACKOFF_S", 0.0)
    start = (await network.owner.fetch_head()).number + 1
    lagging.chances = random.Random(1)
    async with await Chain.connect(lagging.url, network.deployment) as chain:
        async with contextlib.aclosing(chain.events(from_block=start)) as events:
            seen = []
            for amount in range(1, 13):
                lagging.at_block = (await network.owner.fetch_head()).number
                await network.client.send("market", "withdraw", amount)
                await mine(network.rpc, 3)
                waiting = asyncio.ensure_future(take(events, "Withdrawn"))
                await asyncio.wait([waiting], timeout=0.2)
                lagging.at_block = None  # it has caught up
                seen += await waiting
    assert [event.args["amount"] for event in seen if event.name == "Withdrawn"] == [*range(1, 13)]
