"""What the shell does when a reorganisation takes back a handover or what members posted."""

from __future__ import annotations

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
