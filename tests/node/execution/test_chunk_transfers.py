"""Tensors too large for a frame: straight to the next node, and through the store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from splitup_node.execution.inbox import check_chunk
from splitup_node.execution.kept.executions import Execution, make_execution

from splitup.client.execution.session import Session
from splitup.core import limits, tuning
from splitup.core.background import cancel
from splitup.core.errors import PeerFault
from splitup.crypto.keys import generate_identity
from splitup.messages.base import CLIENT, RELAY_PATH
from splitup.messages.frames import TensorChunk, read_delivery
from splitup.messages.plans import PlanCertificate, PlanNode
from splitup.messages.storage import LogName
from splitup.net.http import SignedClient
from splitup.net.links import Link
from splitup.net.tensor_chunks import TensorChunks, has_room
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.storage.gateway_client import GatewayClient
from tests.builders import HANG_S
from tests.node.network import (
    Store,
    StoredLogs,
    TestClient,
    TestNode,
    compute_reference,
    make_certificate,
    make_manifest,
    read_log,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZE = limits.INLINE_TENSOR_BYTES // 4 + 1
MANIFEST, GRAPHS = make_manifest(SIZE, tasks=3)
X = np.random.default_rng(1).random(SIZE, np.float32)


class Large:
    """Two nodes with three tasks of large tensors (first, second, first), and their client."""

    def __init__(self, nodes: list[TestNode], store: Store, client: TestClient) -> None:
        self.nodes, self.store, self.client = nodes, store, client

    def make_certificate(self, steps: int) -> PlanCertificate:
        entries = [self.nodes[index].entry for index in (0, 1, 0)]
        key, tag = self.client.identity.signing_key_hex, secrets.token_hex(8)
        return make_certificate(MANIFEST, entries, key, steps=steps, tag=tag)

    async def begin(self, steps: int = 1) -> PlanCertificate:
        certificate = self.make_certificate(steps)
        for node in self.nodes:
            node.engine.start(certificate, MANIFEST)
        await self.client.connect(certificate)
        return certificate

    def store_input(self, certificate: PlanCertificate, step: int, x: np.ndarray) -> None:
        """Store an input and tell its reader."""
        request = certificate.plan.request
        name = LogName.of(CLIENT, 0, request.client, step, apart=True)
        self.store.objects[name.get_key(request.execution_id)] = x.tobytes()
        self.client.send_stored(certificate, step, x, {self.nodes[0].identity.address})

    async def finish(self, certificate: PlanCertificate, xs: list[np.ndarray]) -> None:
        """Check the outputs, and that the store has them in the end."""
        async with asyncio.timeout(HANG_S):
            frames = sorted([await self.client.outputs.get() for _ in xs], key=lambda f: f.step)
        self.client.end(certificate, len(xs))
        async with asyncio.timeout(HANG_S):
            for node in self.nodes:
                await node.finished.get()
        plan = certificate.plan
        stored = await read_log(self.store, plan.request.execution_id, 2, 0, plan.executors()[2])
        expected = compute_reference(xs, 3)
        assert stored == [result.tobytes() for result in expected]
        assert [f.digest for f in frames] == [hashlib.sha256(data).digest() for data in stored]
        assert all(frame.stored and frame.length == 4 * SIZE for frame in frames)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[TestNode]]:
    root = tmp_path_factory.mktemp("chunks")
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name in ("a", "b"):
            (root / name).mkdir()
            node = TestNode(root / name, Store())
            stack.push_async_callback(node.close)
            await node.start(GRAPHS)
            made.append(node)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def large(nodes: list[TestNode]) -> AsyncIterator[Large]:
    store, client = nodes[0].store, TestClient()
    nodes[1].store.objects = store.objects
    nodes[1].store.takes, nodes[1].store.asked = store.takes, store.asked
    yield Large(nodes, store, client)
    store.takes.set()
    await client.pool.close(flush_s=0)


async def test_s50_an_input_that_is_announced_again_and_again_is_fetched_once(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, goes_on, reads = await large.begin(), asyncio.Event(), []
    read = StoredLogs.read

    async def wait(logs: StoredLogs, name: LogName, *rest: Any) -> bytes:
        reads.append(name)
        await goes_on.wait()
        return await read(logs, name, *rest)

    monkeypatch.setattr(StoredLogs, "read", wait)
    execution = large.nodes[0].engine.table.by_id[certificate.plan.request.execution_id]
    for _ in range(64):
        large.store_input(certificate, 0, X)
    large.client.probe(certificate)
    async with asyncio.timeout(HANG_S):
        await large.client.progress.get()  # so the node has read all of that
    assert len(reads) == 1 and not execution.life.failure
    assert large.nodes[0].engine.table.queue.buffered_bytes == X.nbytes
    goes_on.set()
    await large.finish(certificate, [X])


async def test_s72_outputs_that_wait_for_the_store_count_as_inputs_that_wait(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may make 1 GiB of a few bytes, and does so faster than any store takes it."""
    certificate, node = await large.begin(steps=4), large.nodes[0]
    queue = node.engine.table.queue
    large.store.takes.clear()
    async with asyncio.timeout(HANG_S):
        for step in range(3):
            large.store_input(certificate, step, X)
            for _ in range(3):  # two of the tasks run on this node
                await large.store.asked.get()
        assert queue.buffered_bytes == 6 * X.nbytes
        monkeypatch.setattr(queue, "_max_bytes", 7 * X.nbytes)
        large.store_input(certificate, 3, X)
        execution = await node.failed.get()
    assert execution.life.failure.endswith("bytes of tensors are buffered here already")


async def test_s73_past_inputs_that_are_being_fetched_count_too(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that takes a task over reads up to 256 ports at once."""
    certificate, asked = await large.begin(), asyncio.Event()
    node, request = large.nodes[0], certificate.plan.request

    async def hang(logs: StoredLogs, name: LogName, *rest: Any) -> bytes:
        asked.set()
        return await asyncio.Future()

    monkeypatch.setattr(StoredLogs, "read", hang)
    execution = node.engine.table.by_id[request.execution_id]
    name, entry = LogName.of(CLIENT, 0, request.client, 0), LogEntry(0, bytes(32), X.nbytes, None)
    reading = asyncio.create_task(
        node.engine._finisher._replay._offer_entry(execution, execution.parts[0], name, entry)
    )
    async with asyncio.timeout(HANG_S):
        await asked.wait()
    queue = node.engine.table.queue
    assert queue.buffered_bytes == X.nbytes
    await cancel(reading)
    assert not queue.buffered_bytes


async def test_large_tensors_reach_the_next_node_before_the_store(large: Large) -> None:
    certificate = await large.begin()
    large.store.takes.clear()
    large.store_input(certificate, 0, X)
    before = len(large.store.objects)
    async with asyncio.timeout(HANG_S):
        asked = {(await large.store.asked.get()).task for _ in range(3)}
    assert asked == {0, 1, 2}  # the last task has run, and nothing is stored
    assert len(large.store.objects) == before
    large.store.takes.set()
    await large.finish(certificate, [X])


@pytest.mark.parametrize("direct_bytes", [0, limits.INLINE_TENSOR_BYTES])
async def test_f20_tensors_that_cannot_go_directly_go_through_the_store(
    large: Large, monkeypatch: pytest.MonkeyPatch, direct_bytes: int
) -> None:
    for node in large.nodes:
        monkeypatch.setattr(node.engine._outputs, "_direct_bytes", direct_bytes)
    certificate = await large.begin(2)
    xs = [X, X + 1]
    for step, x in enumerate(xs):
        large.store_input(certificate, step, x)
    await large.finish(certificate, xs)


@pytest.mark.parametrize(
    ("offsets", "is_right"),
    [((0,), True), ((limits.TENSOR_CHUNK_BYTES,), True), (None, False)],
    ids=["the rest is lost", "the first is lost", "other bytes than the digest's"],
)
async def test_f21_chunks_with_a_wrong_digest_are_never_computed_on(
    large: Large, offsets: tuple[int, ...] | None, is_right: bool
) -> None:
    certificate = await large.begin()
    node, digest = large.nodes[0].identity.address, hashlib.sha256(X.tobytes()).digest()
    sent = X if is_right else X + 1
    large.client.send_chunks(certificate, 0, sent, node, offsets=offsets, digest=digest)
    for link in large.client.links:
        await link.drain_bulk()
    large.store_input(certificate, 0, X)
    await large.finish(certificate, [X])


async def test_chunks_from_the_client_are_accepted(large: Large) -> None:
    certificate = await large.begin()
    large.client.send_chunks(certificate, 0, X, large.nodes[0].identity.address)
    await large.finish(certificate, [X])


# ---- the client's side ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_session(
    large: Large,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    direct_bytes: int = tuning.DIRECT_BYTES,
) -> AsyncIterator[Session]:
    """Open a client's session over both nodes, on their store."""
    for node in large.nodes:
        monkeypatch.setattr(node.engine._outputs, "_direct_bytes", direct_bytes)
    certificate = large.make_certificate(steps)
    for node in large.nodes:
        node.engine.start(certificate, MANIFEST)
    logs = large.store.open(certificate, MANIFEST, ExecutorMap(certificate.plan))
    monkeypatch.setattr("splitup.client.execution.session.open_logs", lambda *_, **__: logs)
    async with SignedClient(large.client.identity) as http:
        session = Session(
            certificate,
            MANIFEST,
            large.client.identity,
            http,
            GatewayClient(("http://127.0.0.1:1",), None, http=http),
            deadline=asyncio.get_running_loop().time() + HANG_S,
            allow_loopback=True,
            direct_bytes=direct_bytes,
        )
        session.open()
        try:
            yield session
        finally:
            large.store.takes.set()
            await session.close()


async def check_steps(session: Session, large: Large, xs: list[np.ndarray]) -> None:
    """Run steps and check their outputs; then let the store have all of it."""
    futures = [session.submit({"x": x}) for x in xs]
    outputs = [(await future)["z"] for future in futures]
    assert [z.tobytes() for z in outputs] == [z.tobytes() for z in compute_reference(xs, 3)]
    large.store.takes.set()
    await session.finish()
    await session.store_inputs()
    request = session.plan.request
    stored = await read_log(large.store, request.execution_id, CLIENT, 0, request.client)
    assert stored == [x.tobytes() for x in xs]
    for node in large.nodes:
        execution = await node.finished.get()
        assert execution.claims.end is not None
        (delivery,) = map(read_delivery, execution.claims.end.end.outputs)
        assert delivery is not None
        for entry in execution.claims.make_completions(lambda: bytes(32))[0].tasks:
            if entry.task == delivery.task:
                assert entry.outputs[delivery.port] == delivery.total.hex()


async def test_client_needs_no_store_for_large_tensors(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(HANG_S), open_session(large, monkeypatch, 1) as session:
        large.store.takes.clear()
        await check_steps(session, large, [X])


@pytest.mark.parametrize("direct_bytes", [0, limits.INLINE_TENSOR_BYTES])
async def test_f20_the_client_uses_the_store_when_chunks_do_not_fit(
    large: Large, monkeypatch: pytest.MonkeyPatch, direct_bytes: int
) -> None:
    opening = open_session(large, monkeypatch, 3, direct_bytes)
    async with asyncio.timeout(HANG_S), opening as session:
        await check_steps(session, large, [X, X + 1, X + 2])


async def test_f20_nobody_is_blamed_while_the_store_is_slow(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(HANG_S), open_session(large, monkeypatch, 1, 0) as session:
        large.store.takes.clear()
        future = session.submit({"x": X})
        await large.store.asked.get()
        for link in session._links.values():
            await link.connected.wait()
        assert session._failover.next_time() is None, "nothing can become late"
        large.store.takes.set()
        z = (await future)["z"]
        assert z.tobytes() == compute_reference([X], 3)[0].tobytes()
        await session.finish()
        for node in large.nodes:
            await node.finished.get()


@pytest.mark.parametrize(
    ("endpoint", "is_up", "most_bytes", "expected"),
    [
        ("http://127.0.0.1:1", True, 100, True),
        ("", True, 100, True),  # accepted
        ("http://127.0.0.1:1", False, 100, False),
        ("http://127.0.0.1:1", True, 99, False),
        (f"http://127.0.0.1:1{RELAY_PATH}/0x12", True, 100, False),
    ],
)
async def test_chunks_are_sent_over_fast_links_only(
    endpoint: str, is_up: bool, most_bytes: int, expected: bool
) -> None:
    link = Link("0x12", "", endpoint=endpoint)
    if is_up:
        link.connected.set()
    assert has_room(link, 100, most_bytes) is expected


# ---- what a node takes in chunks ---------------------------------------------------------------


def make_reader() -> tuple[Execution, str]:
    """Return an execution at the node that runs task 1, and who sends it task 0's output."""
    identities = [generate_identity() for _ in range(2)]
    entries = [
        PlanNode(node=one.address, signing_key=one.signing_key_hex, endpoint="http://127.0.0.1:1")
        for one in (identities[0], identities[1], identities[0])
    ]
    key = generate_identity().signing_key_hex
    certificate = make_certificate(MANIFEST, entries, key, steps=2)
    store = Store()
    execution = make_execution(certificate, MANIFEST, identities[1].address, store.open)
    execution.add_part(1, 1)
    return execution, identities[0].signing_key_hex


DATA = X.tobytes()
DIGEST = hashlib.sha256(DATA).digest()


def cut(execution: Execution, step: int = 0) -> list[TensorChunk]:
    return [
        TensorChunk(
            execution.id, 0, 0, step, len(DATA), at, DATA[at : at + limits.TENSOR_CHUNK_BYTES]
        )
        for at in range(0, len(DATA), limits.TENSOR_CHUNK_BYTES)
    ]


async def test_chunks_in_order_make_the_tensor_once() -> None:
    (execution, sender), chunks = make_reader(), TensorChunks()
    for chunk in cut(execution):
        assert check_chunk(execution, sender, chunk)
        chunks.add(chunk)
        chunks.add(chunk)  # repeated: ignored
    assert chunks.take(execution.id, (0, 0), 0, DIGEST) == DATA
    assert chunks.take(execution.id, (0, 0), 0, DIGEST) is None


async def test_a_tensor_with_a_missing_chunk_comes_from_the_store() -> None:
    (execution, _), chunks = make_reader(), TensorChunks()
    first, second, *rest = cut(execution)
    for chunk in (first, *rest, second):
        chunks.add(chunk)
    assert chunks.take(execution.id, (0, 0), 0, DIGEST) is None


async def test_a15_chunks_from_the_wrong_sender_are_faults() -> None:
    execution, sender = make_reader()
    chunk = cut(execution)[0]
    with pytest.raises(PeerFault, match="sends chunks"):
        check_chunk(execution, "ab" * 32, chunk)
    with pytest.raises(PeerFault, match="nobody may send"):
        check_chunk(execution, sender, replace(chunk, task=2))
    with pytest.raises(PeerFault, match="bytes"):
        check_chunk(execution, sender, replace(chunk, length=len(DATA) + 4))
    with pytest.raises(PeerFault, match="not paid for"):
        check_chunk(execution, sender, replace(chunk, step=2))


async def test_a25_chunks_beyond_the_bound_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TENSOR_CHUNKS_BYTES", len(DATA))
    (execution, _), chunks = make_reader(), TensorChunks()
    for step in range(2):
        for chunk in cut(execution, step):
            chunks.add(chunk)
    assert chunks.take(execution.id, (0, 0), 1, DIGEST) is None
    chunks.drop(execution.id)
    for chunk in cut(execution, 1):
        chunks.add(chunk)
    assert chunks.take(execution.id, (0, 0), 1, DIGEST) == DATA


async def test_s32_the_execution_with_the_most_chunks_gives_way_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "TENSOR_CHUNKS_BYTES", 3 * len(DATA))
    (execution, _), chunks = make_reader(), TensorChunks()

    def send(name: str, step: int) -> None:
        for chunk in cut(execution, step):
            chunks.add(replace(chunk, execution_id=name))

    for step in range(4):  # never finished; there is no room for the last
        chunks.add(replace(cut(execution, step)[0], execution_id="flood"))
    send("other", 0)
    send("third", 0)
    send("other", 1)  # all have as much
    send("flood", 0)  # the rest of its oldest, which stayed
    assert chunks.take("other", (0, 0), 1, DIGEST) is None
    assert chunks.take("flood", (0, 0), 1, DIGEST) is None
    for name in ("flood", "other", "third"):
        assert chunks.take(name, (0, 0), 0, DIGEST) == DATA
    assert not chunks._incoming and not chunks._bytes
