"""A node's heartbeats over real HTTP: each names the block that its member named last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from splitup_node.committee import heartbeat_sender
from splitup_node.committee.heartbeat_sender import HeartbeatSender
from splitup_node.committee.presence import Presence, compute_pause_s
from splitup_node.tasks.placement import DemandEntry

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.completions import SignedTakeover, Takeover
from splitup.messages.snapshots import Heartbeat
from splitup.net.http import SignedClient
from splitup.net.http_server import make_app, read_message, serve_app
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.snapshots.liveness import RecentBlocks
from tests.builders import HANG_S
from tests.protocol.committees import COMMITTEE, make_committee, make_identity

NODE = make_identity(50)
BLOCKS = [f"0x{n:064x}" for n in range(9)]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a heartbeat wait for all answers, however slow the machine is."""
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", HANG_S)


@dataclass
class Member:
    """The heartbeat route, as a member with this chain answers it."""

    heads: RecentBlocks = field(default_factory=RecentBlocks)
    named: list[str] = field(default_factory=list)  # by the beats that came
    period_ms: Any = 1000
    rest_ms: int | None = None  # while it rests
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    is_registered: bool = True  # as this member's chain says
    tasks: list[Any] = field(default_factory=list)  # the demand
    replaced: list[Any] = field(default_factory=list)  # takeovers, if there are any

    def __post_init__(self) -> None:
        self.may_answer.set()

    async def on_heartbeat(self, request: web.Request) -> web.Response:
        beat = (await read_message(request, api.HEARTBEAT, audience=COMMITTEE)).message
        self.named.append(beat.block_hash)
        await self.may_answer.wait()
        if not self.is_registered:
            raise PeerFault(f"node {beat.node} is not active in the registry")
        if self.heads.is_recent(beat.block_hash, time.monotonic()):
            periods = {"period_ms": self.period_ms, "rest_ms": self.rest_ms or self.period_ms}
            told = {"replaced": self.replaced} if self.replaced else {}
            demand = {"block": self.heads.head, **periods, "tasks": self.tasks}
            return web.json_response(demand | told)
        return web.json_response({"block": self.heads.head})


@asynccontextmanager
async def serve(
    members: list[Member], heard: list[SignedTakeover] | None = None
) -> AsyncIterator[tuple[HeartbeatSender, CommitteeView]]:
    heard = [] if heard is None else heard
    _, view = make_committee()
    async with AsyncExitStack() as stack:
        seats = []
        for member, seat in zip(members, view.members, strict=True):
            app = make_app()
            app.add_routes([web.post(api.HEARTBEAT.path, member.on_heartbeat)])
            server = await serve_app(app, "127.0.0.1", 0)
            stack.push_async_callback(server.close)
            seats.append(replace(seat, endpoint=server.url))
        http = await stack.enter_async_context(SignedClient(NODE))
        sender = HeartbeatSender(http, heard.append)
        stack.push_async_callback(sender.close)
        yield sender, replace(view, members=tuple(seats))


def make_beat(sequence: int) -> Heartbeat:
    return Heartbeat(
        node=NODE.address,
        boot_id="ab" * 32,
        sequence=sequence,
        sent_at_ms=int(time.time() * 1000),
        block_hash=ZERO_BYTES32,
        queue_ms=0,
        resident=(),
        vram_free_bytes=0,
        determinism="CPU",
    )


def make_members(*heads: str) -> list[Member]:
    members = [Member() for _ in heads]
    for member, head in zip(members, heads, strict=True):
        member.heads.process_head(head, time.monotonic())
    return members


async def test_each_member_gets_the_block_that_it_named() -> None:
    """The first beat learns the block; members on different blocks each know theirs."""
    members = make_members(BLOCKS[4], BLOCKS[4], BLOCKS[3], BLOCKS[1])
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        await sender.send(make_beat(1), view)
        assert len(sender.get_demands()) == 4
        members[0].heads.process_head(BLOCKS[5], time.monotonic())
        await sender.send(make_beat(2), view)
        assert len(sender.get_demands()) == 4
    learnt = [[ZERO_BYTES32, BLOCKS[n], BLOCKS[n]] for n in (4, 4, 3, 1)]
    assert [member.named for member in members] == learnt


async def test_a_restarted_member_gets_a_block_it_knows_at_once() -> None:
    members = make_members(*BLOCKS[1:5])
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        await sender.send(make_beat(1), view)
        members[0].heads = RecentBlocks()
        members[0].heads.process_head(BLOCKS[6], time.monotonic())
        await sender.send(make_beat(2), view)
        assert len(sender.get_demands()) == 4
    assert members[0].named[-2:] == [BLOCKS[1], BLOCKS[6]]


async def test_demand_that_is_told_again_is_read_once() -> None:
    def make_row(holders: int) -> dict[str, Any]:
        entry = DemandEntry(
            model_id=ZERO_BYTES32,
            task=0,
            task_id="ab" * 32,
            vram_bytes=1,
            weights_bytes=1,
            price_nano_usdc=1,
            holders=holders,
        )
        return entry.model_dump(mode="json")

    members = make_members(*BLOCKS[1:5])
    for member in members:
        member.tasks = [make_row(3)]
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        await sender.send(make_beat(1), view)
        first = sender.get_demands()
        assert len(first) == 4 and len({id(demand) for demand in first}) == 1
        members[0].tasks, members[1].tasks = [make_row(2)], [make_row(2) | {"holders": -1}]
        await sender.send(make_beat(2), view)
        assert sorted(rows[0].holders for rows in sender.get_demands()) == [2, 3, 3]


async def test_failures_are_listed_when_all_members_refuse() -> None:
    """Members without a chain cost at most two requests a heartbeat."""
    members = [Member() for _ in range(4)]
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        await sender.send(make_beat(1), view)
        assert sender.get_demands() == []
        refusals = sender.list_failures(view)
        assert len(refusals) == 4 and all("has seen no block" in said for said in refusals)
        members[0].heads.process_head(BLOCKS[1], time.monotonic())
        await sender.send(make_beat(2), view)
        assert sender.list_failures(view) == set()
        assert len(sender.get_demands()) == 1
    assert all(len(member.named) <= 4 for member in members)


async def test_s69_members_tell_a_node_by_whom_it_was_replaced() -> None:
    """One that tells it more than an answer may hold is not listened to."""
    takeover = Takeover(execution_id=BLOCKS[1], task=0, candidate=1, first_step=0)
    signed = SignedTakeover(takeover=takeover, signature="0x" + "11" * 64)
    members, heard = make_members(*BLOCKS[1:5]), list[SignedTakeover]()
    members[0].replaced = [signed.model_dump(mode="json")]
    members[1].replaced = members[0].replaced * (limits.MAX_TOLD_TAKEOVERS + 1)
    members[2].replaced = [{}]
    async with asyncio.timeout(HANG_S), serve(members, heard) as (sender, view):
        await sender.send(make_beat(1), view)
        assert heard == [signed] and len(sender.get_demands()) == 2


async def test_f11_a_member_that_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the next heartbeat when it has answered, and not all that it missed."""
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", 0.1)
    monkeypatch.setattr(limits, "HEARTBEAT_TIMEOUT_S", HANG_S)
    members = make_members(*BLOCKS[1:5])
    members[0].may_answer.clear()
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        sequence = 0
        while min(len(member.named) for member in members[1:]) < 4:
            await sender.send(make_beat(sequence := sequence + 1), view)
            await asyncio.sleep(0)  # it returns at once while no member has answered
        assert len(members[0].named) == 1
        members[0].may_answer.set()
        while len(sender.get_demands()) < 4:
            await sender.send(make_beat(sequence := sequence + 1), view)
            await asyncio.sleep(0)  # it returns at once while no member has answered


class Clock:
    """The sender's clock, moved by hand; the event loop's goes on, or its timeouts would end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(heartbeat_sender, "time", clock)


async def count_beats(
    sender: HeartbeatSender, view: CommitteeView, clock: Clock, member: Member, seconds: int
) -> int:
    """Return how many heartbeats a member gets when one may be due each second."""
    before = len(member.named)
    for _ in range(seconds):
        clock.now_s += 1.0
        await sender.send(make_beat(int(clock.now_s)), view, only_due=True)
    return len(member.named) - before


async def test_each_member_gets_heartbeats_in_the_period_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member that names a long period, or none, changes nothing for the others."""
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", 1.0)
    members = make_members(*BLOCKS[1:5])
    for member, period_ms in zip(members, (1000, 5000, 10**9, "5"), strict=True):
        member.period_ms = period_ms
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        clock = Clock(monkeypatch)
        await sender.send(make_beat(1), view)
        counts = []
        for member in members:
            counts.append(await count_beats(sender, view, clock, member, 20))
        assert counts == [20, 4, 20, 20], "what names no valid period is a failure: tried again"
        before = len(members[1].named)
        assert await sender.send(make_beat(5000), view), "a changed statement waits for no period"
        assert len(members[1].named) == before + 1


async def test_a_ping_ends_the_long_period_of_a_member_that_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", 1.0)
    members = make_members(*BLOCKS[1:5])
    members[0].rest_ms = 15_000
    members[1].period_ms, members[1].rest_ms = 5_000, 15_000  # of many nodes
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        clock = Clock(monkeypatch)
        await sender.send(make_beat(1), view)
        assert await count_beats(sender, view, clock, members[0], 10) == 0
        before = [len(member.named) for member in members[:2]]
        pinged_at = clock.now_s
        for second in range(4):
            clock.now_s += 1.0
            await sender.send(make_beat(100 + second), view, only_due=True, pinged_at=pinged_at)
        assert [len(member.named) for member in members[:2]] == [before[0] + 1, before[1] + 1]
        for second in range(4):  # whoever pings all the time gets no more than the usual period
            clock.now_s += 1.0
            beat = make_beat(200 + second)
            await sender.send(beat, view, only_due=True, pinged_at=clock.now_s)
        assert [len(member.named) for member in members[:2]] == [before[0] + 5, before[1] + 2]


async def test_only_the_refusal_of_all_members_makes_heartbeats_less_frequent() -> None:
    members = make_members(*BLOCKS[1:5])
    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        for number, member in enumerate(members, start=1):
            member.is_registered = False
            await sender.send(make_beat(number), view)
            assert sender.is_refused(view) == (number == len(members))
        members[2].is_registered = True
        await sender.send(make_beat(5), view)
        assert not sender.is_refused(view)


@pytest.mark.parametrize("is_leaving", [False, True])
async def test_whoever_leaves_is_not_warned_that_members_refuse(is_leaving: bool) -> None:
    """Its owner asked for that; one that was slashed, or is not known yet, is warned."""
    members = make_members(*BLOCKS[1:5])
    warned: list[set[str]] = []

    async def ask_chain() -> bool:
        return is_leaving

    async with asyncio.timeout(HANG_S), serve(members) as (sender, view):
        for member in members:
            member.is_registered = False
        step_loop = SimpleNamespace(queue_ms=0, speed_mflops=1)
        presence = Presence(
            NODE,
            cast(Any, None),
            cast(Any, SimpleNamespace(step_loop=step_loop)),
            cast(Any, SimpleNamespace(tasks=[], free_bytes=0, loading="", keep_listed=set)),
            cast(Any, SimpleNamespace(bandwidth_kbps=1)),
            cast(Any, SimpleNamespace(trouble="", note_heartbeats=lambda *a: warned.append(a[0]))),
            get_committee=lambda: view,
            get_determinism=lambda: "CPU",
            is_leaving=ask_chain,
        )
        presence._heartbeat_sender = sender
        await presence._send_heartbeat()
    [problems] = warned
    assert bool(problems) is not is_leaving


def test_pauses_grow_behind_the_time_that_a_registration_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", 1.0)
    pauses = [compute_pause_s(refusals) for refusals in range(40)]
    assert pauses[: tuning.HEARTBEAT_REFUSALS + 3] == [1.0] * 6 + [2.0, 4.0]
    assert pauses == sorted(pauses) and pauses[-1] == tuning.HEARTBEAT_REFUSED_S
    assert compute_pause_s(10**6) == tuning.HEARTBEAT_REFUSED_S
