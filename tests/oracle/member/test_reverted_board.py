"""What the shell does when a reorganisation takes back a handover or what members posted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_oracle.member.service import BoardReverted, EventSource

from splitup.chain.event_stream import ChainEvent
from splitup.core import tuning
from splitup.protocol.committee.events import RequestSeen
from splitup.storage.journal import Journal
from tests.builders import HANG_S

MEMBERS_SET = ChainEvent(
    "MembersSet", {"configuration": 2, "members": ()}, 100, "0xaa", 3, "0x01", "committee"
)
REQUEST = ChainEvent(
    "RequestNodeSelections",
    {
        "executionId": "0x" + "11" * 32,
        "modelId": "0x" + "12" * 32,
        "client": "0x" + "13" * 20,
        "clientKey": "0x" + "14" * 32,
        "steps": 1,
        "maxPrice": 5,
        "deadline": 6,
        "snapshotSequence": 1,
        "snapshotRoot": "0x" + "15" * 32,
        "inputsDigest": "0x" + "16" * 32,
        "nonce": 1,
        "verifyBps": 800,
    },
    101,
    "0x" + "ab" * 32,
    0,
    "0x02",
    "market",
)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path) as opened:
        yield opened


def make_source(journal: Journal, fed: list[Any]) -> EventSource:
    deployment = SimpleNamespace(chain_id=1, market="0x" + "0a" * 20)
    chain = SimpleNamespace(deployment=deployment)
    machine = SimpleNamespace(is_open=lambda execution_id: False)
    member: Any = SimpleNamespace(
        chain=chain, journal=journal, feed=fed.append, machine=machine, retired=set()
    )
    return EventSource(member)


def test_a_request_belongs_to_the_configuration_of_the_chain_that_holds_it(
    journal: Journal,
) -> None:
    fed: list[Any] = []
    source = make_source(journal, fed)
    source._feed_event(MEMBERS_SET)
    source._feed_event(REQUEST)
    source._feed_event(replace(REQUEST, removed=True))
    source._feed_event(replace(MEMBERS_SET, removed=True))
    source._feed_event(replace(REQUEST, block_hash="0x" + "ac" * 32))
    requests = [event for event in fed if isinstance(event, RequestSeen)]
    assert [request.configuration for request in requests] == [2, 0]


def test_a_member_reads_the_chain_again_when_a_handover_it_acted_on_is_gone(
    journal: Journal,
) -> None:
    source = make_source(journal, [])
    source._seen_block, source._board_block = 105, 104
    with pytest.raises(BoardReverted, match="MembersSet in block 100"):
        source._feed_event(replace(MEMBERS_SET, removed=True))
    source._store_cursor()
    assert journal.get("cursor", "") == {"block": 100 - tuning.REORG_BLOCKS}


async def test_a_head_that_arrives_as_the_member_stops_does_not_keep_it(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that saw a reorganisation too deep for it did not end, and followed no events."""
    changed = asyncio.Event()

    async def wait_for_head(_: str) -> SimpleNamespace:
        await changed.wait()
        changed.clear()
        return SimpleNamespace(hash="0x")

    async def read_nothing(_: EventSource) -> None: ...

    source: Any = make_source(journal, [])
    source._chain.wait_for_head = wait_for_head
    monkeypatch.setattr(EventSource, "_read_board", read_nothing)
    monkeypatch.setattr(EventSource, "_rests", lambda _: False)
    following = asyncio.ensure_future(source._follow_board())
    for _ in range(3):
        await asyncio.sleep(0)  # it waits for a head
    changed.set()
    await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait([following], timeout=HANG_S)
    assert following.cancelled()
