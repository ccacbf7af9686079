"""The explorer's index: right after reorganisations, restarts, and whatever strangers register."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from splitup_gateway.explorer.event_index import PAGE, EventIndex, EventPlace
from splitup_gateway.explorer.follower import Follower

from splitup.chain.event_stream import ChainEvent
from splitup.chain.mentions import IGNORED, MAX_AMOUNT
from splitup.core.errors import ConfigurationError
from splitup.crypto.quorum import Payment, Settlement, pack_word
from tests.builders import HANG_S
from tests.chain.conftest import MODEL, PRICE_MICRO_USDC, Network

HOSTILE = "<img src=x onerror=alert(1)>\0\ud7ff'\";--"


@contextlib.asynccontextmanager
async def follow(network: Network, url: str) -> AsyncIterator[EventIndex]:
    index = EventIndex.open(url, network.deployment)
    task = asyncio.create_task(Follower(network.owner, index).run())
    try:
        yield index
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        index.close()


async def wait_until(condition: Callable[[], Any]) -> None:
    """Poll a database, which announces nothing."""
    async with asyncio.timeout(HANG_S):
        while True:
            if await asyncio.to_thread(condition):
                return
            await asyncio.sleep(0.02)


def get_place(event: ChainEvent) -> tuple[int, str, int]:
    return event.block_number, event.block_hash, event.log_index


async def list_places(network: Network) -> list[tuple[int, str, int]]:
    """Return where all events stand that the index should hold, as the chain says now."""
    events: list[ChainEvent] = []
    for contract in ("committee", "nodes", "models", "market"):
        events += await network.owner.fetch_events(contract)
    return sorted(get_place(event) for event in events if event.name not in IGNORED)


def dump(index: EventIndex, *subjects: str) -> list[object]:
    return [
        (subject, index.sum_roles(subject), [e.name for e in index.list_events(subject)])
        for subject in subjects
    ]


async def test_what_a_reorganisation_reverts_is_gone_and_a_rebuilt_index_is_the_same(
    network: Network, url: str
) -> None:
    await network.confirm_key()
    async with follow(network, url) as index:
        kept = await network.request(nonce=1)
        await network.submit_plan(kept, executors=2)
        node = network.nodes[0].address
        payments = (Payment(node, 900_000), Payment(network.nodes[1].address, 120_000))
        settled = Settlement(steps=1, evidence_root="0x" + "ee" * 32, payments=payments, slashes=())
        await network.settle(kept.execution_id, settled)
        reverted = await network.request(nonce=2)
        await wait_until(lambda: index.list_of_executions([reverted.execution_id]).popitem()[1])
        await network.rpc.request("anvil_reorg", 1, [])
        again = await network.request(nonce=3)
        expected = await list_places(network)
        assert (reverted.block_hash, 0) not in [place[1:] for place in expected]
        await wait_until(
            lambda: sorted(map(get_place, index.list_events(limit=10_000))) == expected
        )

        names = [event.name for event in index.list_of_executions([kept.execution_id]).popitem()[1]]
        assert names == ["RequestNodeSelections", "PlanAccepted", "Settled"]
        assert index.sum_roles(node)["payout"].amount == 900_000
        assert index.sum_costs(MODEL) >= 1_020_000
        followed = dump(index, MODEL, node, network.client.address, again.execution_id)
        last = index.find_last_block()

    other = EventIndex.open(url, network.deployment.model_copy(update={"market": "0x" + "77" * 20}))
    assert other.find_last_block() is None, "an index of another chain is emptied"
    other.close()
    async with follow(network, url) as index:
        await wait_until(lambda: index.find_last_block() == last)
        assert dump(index, MODEL, node, network.client.address, again.execution_id) == followed


def make_event(number: int, event: str, contract: str, /, **args: Any) -> ChainEvent:
    return ChainEvent(event, args, number, f"0x{number:064x}", 0, "0x" + "ab" * 32, contract)


def register(number: int, name: str) -> ChainEvent:
    return make_event(
        number,
        "ModelRegistered",
        "models",
        modelId=f"0x{number:064x}",
        developer="0x" + "11" * 20,
        name=name,
        dagRoot="0x" + "22" * 32,
        tasks=[],
        edges=[],
    )


async def test_strangers_words_neither_stop_the_index_nor_pass_for_others(
    network: Network, url: str
) -> None:
    index = EventIndex.open(url, network.deployment)
    account = "0x" + "aa" * 20
    index.apply(
        [
            register(1, HOSTILE),
            register(2, account),
            register(3, "100%_sure"),
            make_event(4, "StakeAdded", "nodes", account=account, amount=2**95, stake=2**96 - 1),
            make_event(5, "GroupKeySet", "committee", configuration=1, groupKey=b"\0" * 256),
        ]
    )
    index.apply([register(1, HOSTILE)])  # a second server writes the same
    assert [event.args["name"] for event in index.list_events(names=["ModelRegistered"])] == [
        "100%_sure",
        account,
        HOSTILE,
    ]
    assert index.sum_roles(account)["node"].amount == MAX_AMOUNT
    assert dict(index.find_subjects(account)) == {account: "node", f"0x{2:064x}": "model"}
    assert index.find_subjects("<img") == [(f"0x{1:064x}", "model")]
    assert index.find_subjects("100%") == [(f"0x{3:064x}", "model")]
    for odd in ("%", "_", "0x\0", "\0"):
        assert index.find_subjects(odd) == []
    index.apply([replace(register(1, HOSTILE), removed=True)])
    assert index.find_subjects("<img") == []
    index.delete_from(0)
    index.close()


async def test_pages_follow_each_other_without_gaps(network: Network, url: str) -> None:
    index = EventIndex.open(url, network.deployment)
    index.delete_from(0)
    index.apply([register(number, f"model-{number}") for number in range(1, 2 * PAGE + 3)])
    seen: list[int] = []
    before = None
    while page := index.list_events(names=["ModelRegistered"], before=before):
        seen += [event.block_number for event in page]
        before = EventPlace(page[-1].block_number, page[-1].log_index)
    assert seen == list(range(2 * PAGE + 2, 0, -1))
    index.close()


def test_a_database_that_cannot_be_opened_is_named(network: Network) -> None:
    with pytest.raises(ConfigurationError, match="explorer's database sqlite:////no/where"):
        EventIndex.open("sqlite:////no/where/x.sqlite", network.deployment)


def test_a_thousand_executions_are_indexed_and_read(network: Network, tmp_path: Any) -> None:
    """As many as a page of the explorer asks for, and sums over all of them."""
    index = EventIndex.open(f"sqlite:///{tmp_path / 'x.sqlite'}", network.deployment)
    nodes = [f"0x{number:040x}" for number in range(1, 201)]
    for number in range(1_000):
        execution_id = f"0x{number + 1:064x}"
        payouts = ["0x" + pack_word(nodes[(number + i) % 200], 1_000).hex() for i in range(5)]
        asked = {"modelId": MODEL, "client": nodes[0], "maxPrice": PRICE_MICRO_USDC, "steps": 1}
        result = {"paid": 5_000, "fee": 50, "refunded": 0, "slashed": 0, "steps": 1}
        index.apply(
            [
                make_event(
                    2 * number,
                    "RequestNodeSelections",
                    "market",
                    executionId=execution_id,
                    **asked,
                ),
                make_event(
                    2 * number + 1,
                    "Settled",
                    "market",
                    executionId=execution_id,
                    evidenceRoot="0x",
                    payouts=payouts,
                    **result,
                ),
            ]
        )
    assert index.sum_costs(MODEL) == 1_000 * 5_050
    assert index.sum_roles(nodes[7])["payout"].count == 25
    requests = index.list_events(names=["RequestNodeSelections"])
    histories = index.list_of_executions([event.args["executionId"] for event in requests])
    assert len(histories) == PAGE and all(len(events) == 2 for events in histories.values())
    assert json.dumps(requests[0].args)
    index.close()
