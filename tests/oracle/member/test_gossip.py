"""Large messages between two members, whose requests are calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from splitup_oracle.member import gossip
from splitup_oracle.member.gossip import CHUNKED_MESSAGE_KIND, GossipTransport

from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.codec import encode_canonical
from splitup.net.chunked_messages import ChunkedMessage
from splitup.protocol.committee.commands import Gossip
from splitup.protocol.committee.events import Event, GossipReceived
from splitup.protocol.committee.peer_messages import GossipMessage, encode_gossip
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from tests.builders import HANG_S
from tests.protocol.committee.test_settlement_proposals import make_proposal
from tests.protocol.committees import make_committee


class Wire:
    """Stands for both members' HTTP: a post is noted, a chunk is read from the sender."""

    def __init__(self) -> None:
        self.posted: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sender: GossipTransport

    async def post_signed(self, _: Any, endpoint: str, account: str, body: dict[str, Any]) -> None:
        self.posted.put_nowait(body)

    async def get_bytes(self, url: str, *, max_bytes: int, timeout_s: float) -> bytes:
        digest, index = url.split("/")[-2:]
        data = self.sender.chunked_messages.find_chunk(digest, int(index))
        assert data is not None and len(data) <= max_bytes
        return data


async def test_s42_large_settlements_arrive_in_chunks_each_time_they_are_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GOSSIP_BYTES", 2_000)
    monkeypatch.setattr(limits, "MESSAGE_CHUNK_BYTES", 100)
    monkeypatch.setattr(tuning, "LARGE_MESSAGE_REST", 0.0)
    _, view = make_committee()
    ours, theirs = view.members[:2]
    wire, background = Wire(), BackgroundTasks()
    heard: asyncio.Queue[Event] = asyncio.Queue()
    transports = [
        GossipTransport(wire, background, heard.put_nowait, heard.put_nowait)  # type: ignore[arg-type]
        for _ in range(2)
    ]
    sender, receiver = transports
    wire.sender = sender
    sender.set_peers([theirs])
    receiver.set_peers([ours])

    async def pass_on(proposals: list[SettlementProposal]) -> list[Event]:
        for proposal in proposals:
            sender.send(Gossip(None, proposal), [theirs.account])
        async with asyncio.timeout(HANG_S):
            for body in [await wire.posted.get() for _ in proposals]:
                assert body["kind"] == CHUNKED_MESSAGE_KIND
                announced = ChunkedMessage.from_value(body["message"])
                receiver.receive_chunked_message(ours.account, announced)
            return [await heard.get() for _ in proposals]

    proposals = [make_proposal(tasks) for tasks in range(8, 8 + tuning.MAX_CHUNKED_MESSAGES)]
    try:
        for _ in range(2):  # the answer to the first was lost
            events = await pass_on(proposals)
            assert all(GossipReceived(ours.account, one) in events for one in proposals)
        sender.send(Gossip(None, make_proposal(1, 1)), [theirs.account])
        small = await wire.posted.get()
        assert small["kind"] == "settlement-proposal", "at once"
    finally:
        await background.close()


@pytest.mark.parametrize("is_second_late", [False, True])
async def test_s49_who_sends_large_messages_one_after_the_other_waits_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, is_second_late: bool
) -> None:
    """Each may take seconds and half a gigabyte to read: one is read at a time, then others'."""
    monkeypatch.setattr(tuning, "LARGE_MESSAGE_REST", 1e9)
    _, view = make_committee()
    flooder, other = view.members[:2]
    wire, background = Wire(), BackgroundTasks()
    heard: asyncio.Queue[Event] = asyncio.Queue()
    receiver = GossipTransport(wire, background, heard.put_nowait, heard.put_nowait)  # type: ignore[arg-type]
    wire.sender = receiver
    receiver.set_peers([flooder, other])
    reading, most, read = 0, 0, gossip._read

    def watch(announced: ChunkedMessage, packed: bytes) -> tuple[GossipMessage, int]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        try:
            return read(announced, packed)
        finally:
            reading -= 1

    monkeypatch.setattr(gossip, "_read", watch)
    proposals = [make_proposal(tasks) for tasks in (8, 9, 10)]
    announced = [
        receiver.chunked_messages.offer(encode_canonical(encode_gossip(one, 1)))
        for one in proposals
    ]
    try:
        events = []
        async with asyncio.timeout(HANG_S):
            receiver.receive_chunked_message(flooder.account, announced[0])
            if is_second_late:  # the first was read, and its sender rests
                events.append(await heard.get())
            receiver.receive_chunked_message(flooder.account, announced[1])
            receiver.receive_chunked_message(other.account, announced[2])
            while len(events) < 2:
                events.append(await heard.get())
        assert GossipReceived(flooder.account, proposals[0], 1) in events
        assert GossipReceived(other.account, proposals[2], 1) in events
        assert heard.empty() and most == 1
    finally:
        await background.close()
