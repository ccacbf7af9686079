"""Thousands of nodes in one snapshot: four members' shells over real HTTP, without a chain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_oracle.member.http_server import MemberServer
from splitup_oracle.member.shell import Member

from splitup.chain.client import TransactionReceipt
from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.crypto.keys import Identity
from splitup.messages import api
from splitup.messages.snapshots import Heartbeat
from splitup.net.http import SignedClient
from splitup.net.http_server import Server, serve_app
from splitup.protocol.committee.certificates import MemberView
from splitup.protocol.committee.events import (
    BlockSeen,
    ConfigurationSeen,
    HeartbeatReceived,
    NodeRecord,
    NodesSeen,
    RttMeasured,
    SnapshotAccepted,
    Tick,
)
from splitup.storage.journal import Journal
from tests.builders import COMMON_CLASS, HANG_S, address, task_id
from tests.protocol.committees import CHAIN_ID, COMMITTEE, make_committee
from tests.protocol.simulator import GRACE_S, VERIFY_NONE

HEAD = "0x" + "01" * 32
RESIDENT = tuple(sorted(task_id(n) for n in range(2)))


class Board:
    """Takes what members bring to the chain, and tells them of the first snapshot."""

    deployment = SimpleNamespace(chain_id=CHAIN_ID, committee=COMMITTEE, confirmations=0)
    clock = SimpleNamespace(now_s=time.time)

    def __init__(self) -> None:
        self.roots: list[str] = []

    async def send(self, contract: str, function: str, *arguments: Any) -> TransactionReceipt:
        if function == "submitSnapshot":
            self.roots.append(arguments[2])
        return TransactionReceipt("0x" + "00" * 32, 1, "0x" + "00" * 32, 0)


def make_events(members: list[MemberView], nodes: int) -> list[Any]:
    records = tuple(NodeRecord(address(n), f"0x{n:064x}", "http://n", 10**9) for n in range(nodes))
    beats = [
        HeartbeatReceived(
            Heartbeat(
                node=record.node,
                boot_id="ab" * 32,
                sequence=1,
                sent_at_ms=1,
                block_hash=HEAD,
                queue_ms=n % 500,
                resident=RESIDENT,
                vram_free_bytes=n << 20,
                determinism=COMMON_CLASS,
            ),
            record.signing_key,
        )
        for n, record in enumerate(records)
    ]
    return [
        BlockSeen(1, 1_000, HEAD),
        SnapshotAccepted(0, 0, "0x" + "00" * 32),
        ConfigurationSeen(
            configuration=1,
            members=tuple(members),
            is_handover=False,
            is_current=True,
            block_number=1,
        ),
        NodesSeen(records),
        *beats,
        *(RttMeasured(record.node, n % 90) for n, record in enumerate(records)),
    ]


@pytest.mark.parametrize(
    ("nodes", "in_chunks"), [(150, 100), pytest.param(10_000, 1_000, marks=pytest.mark.long)]
)
async def test_a_snapshot_of_thousands_of_nodes_is_agreed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, in_chunks: int
) -> None:
    monkeypatch.setattr(limits, "CHUNKED_MESSAGE_NODES", in_chunks)
    monkeypatch.setattr(limits, "HEARTBEAT_TIMEOUT_S", 600.0)  # they beat once
    monkeypatch.setattr(limits, "EPOCH_TIMEOUT_S", 600.0)  # one process plays all four
    monkeypatch.setattr(tuning, "MESSAGE_CHUNK_TIMEOUT_S", 600.0)
    monkeypatch.setattr(tuning, "HTTP_CONNECT_S", 600.0)
    patient = SimpleNamespace(GOSSIP=replace(api.GOSSIP, timeout_s=600.0))
    monkeypatch.setattr("splitup_oracle.member.gossip.api", patient)
    identities, _ = make_committee()
    board = Board()
    directories = [tmp_path / identity.address for identity in identities]
    for directory in directories:
        directory.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        shells = [
            await start(stack, directory, identity, board)
            for directory, identity in zip(directories, identities, strict=True)
        ]
        members = [
            MemberView(i.address, i.signing_key_hex, server.url)
            for i, (_, server) in zip(identities, shells, strict=True)
        ]
        for event in make_events(members, nodes):
            for member, _ in shells:
                member.feed(event)
        answer = parse_json(shells[0][0].get_demand(members[0].account))
        assert answer["period_ms"] == max(1_000, nodes * 1_000 // 800), "800 heartbeats a second"
        async with asyncio.timeout(5 * HANG_S):
            while not board.roots:
                for member, _ in shells:
                    member.feed(Tick())
                await asyncio.sleep(0.2)
            snapshots = [member.machine.find_snapshot(board.roots[0]) for member, _ in shells]
            endpoint = members[0].endpoint
            async with SignedClient() as http:
                whole = await http.get_bytes(
                    f"{endpoint}/v1/snapshot/{board.roots[0]}", max_bytes=limits.MAX_SNAPSHOT_BYTES
                )
    held = [snapshot for snapshot in snapshots if snapshot is not None]
    assert len(held) >= 3
    assert all(len(snapshot.entries) == nodes for snapshot in held)
    assert held[0].canonical_bytes() == whole
    assert nodes > limits.CHUNKED_MESSAGE_NODES, "observations and proposals came in chunks"
    assert nodes < 10_000 or len(whole) > limits.MAX_MESSAGE_BYTES, "too large for one message"


async def start(
    stack: contextlib.AsyncExitStack, directory: Path, identity: Identity, board: Board
) -> tuple[Member, Server]:
    http = await stack.enter_async_context(SignedClient(identity))
    member = Member(
        identity,
        VERIFY_NONE,
        board,  # type: ignore[arg-type]
        stack.enter_context(Journal.open(directory)),
        http,
        http,
        None,  # type: ignore[arg-type]  # nobody asks for a manifest
        data_dir=directory,
        kernel_cache=None,
        grace_s=GRACE_S,
    )
    stack.push_async_callback(member.close)
    server = await serve_app(MemberServer(member).make_app(), "127.0.0.1", 0)
    stack.push_async_callback(server.close)
    return member, server
