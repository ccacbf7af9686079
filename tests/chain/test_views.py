"""Endpoints that lag behind, or disagree: nobody acts on the older view."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from splitup.chain.client import Chain
from splitup.chain.committee_reader import fetch_committee
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable
from tests.builders import HANG_S
from tests.chain.conftest import MODEL, Network
from tests.chain.lagging import LaggingRpc


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "RPC_BACKOFF_S", 0.001)


@pytest_asyncio.fixture
async def rpc(network: Network) -> AsyncIterator[LaggingRpc]:
    lagging = LaggingRpc(network.url)
    await lagging.open()
    yield lagging
    await lagging.close()


@pytest_asyncio.fixture
async def chain(network: Network, rpc: LaggingRpc) -> AsyncIterator[Chain]:
    async with await Chain.connect(rpc.url, network.deployment) as opened:
        yield opened


async def test_f13_head_never_goes_back(network: Network, rpc: LaggingRpc, chain: Chain) -> None:
    head = await chain.fetch_head()
    rpc.at_block = head.number - 3
    with pytest.raises(ChainUnavailable, match=f"block {head.number - 3} after block"):
        await chain.fetch_head()
    rpc.alternate = True  # two endpoints behind one URL
    for _ in range(4):
        assert await chain.fetch_head() == head


async def test_f13_values_are_read_at_the_block_that_was_seen_or_not_at_all(
    network: Network, rpc: LaggingRpc, chain: Chain
) -> None:
    older = await chain.fetch_head()
    await network.owner.send("usdc", "mint", MODEL[:42], 5)
    head = await chain.fetch_head()
    rpc.at_block = older.number
    assert await chain.call("usdc", "balanceOf", MODEL[:42]) == 0  # what the endpoint knows
    assert await chain.call("usdc", "balanceOf", MODEL[:42], at=older) == 0
    with pytest.raises(ChainUnavailable, match="header not found"):
        await chain.call("usdc", "balanceOf", MODEL[:42], at=head)
    rpc.at_block = None
    assert await chain.call("usdc", "balanceOf", MODEL[:42], at=head) == 5
    assert await chain.call("usdc", "balanceOf", MODEL[:42], at=older) == 0


async def test_f13_committee_is_that_of_one_block(
    network: Network, rpc: LaggingRpc, chain: Chain
) -> None:
    view = await fetch_committee(chain)
    rpc.at_block = (await chain.fetch_head()).number
    await network.owner.send("usdc", "mint", MODEL[:42], 1)
    rpc.alternate = True  # its calls meet both endpoints, of which one lags a block behind
    with contextlib.suppress(ChainUnavailable):
        assert await fetch_committee(chain) == view
    rpc.at_block = None
    assert await fetch_committee(chain) == view


async def test_f13_events_neither_go_back_nor_come_twice(
    network: Network, rpc: LaggingRpc, chain: Chain
) -> None:
    start = (await chain.fetch_head()).number
    async with contextlib.aclosing(chain.events(from_block=start + 1, poll_s=0.001)) as events:
        seen = []
        for nonce in range(4):
            request = await network.request(nonce)
            async with asyncio.timeout(HANG_S):
                event = await anext(events)
            assert event.args["executionId"] == request.execution_id
            seen.append(event)
            rpc.at_block, rpc.alternate = start + nonce // 2, True
        assert not any(event.removed for event in seen)
        assert [event.block_number for event in seen] == sorted(e.block_number for e in seen)
