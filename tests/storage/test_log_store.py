"""Logs over presigned URLs with a store that misbehaves."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, Refused, StorageUnavailable
from splitup.messages.base import CLIENT
from splitup.messages.storage import Grant, Grants, LogName, LogWrite
from splitup.net.object_transfer import NotStored
from splitup.protocol.execution.log_segments import LogEntry, LogNameer
from splitup.storage.log_store import (
    GrantedLogs,
    LogObject,
    LogWriter,
    iter_log,
    open_logs,
    open_verification_logs,
    read_tensor,
)
from tests.builders import HANG_S

EXECUTION, NODE = "0x" + "01" * 32, "0x" + "ab" * 20


class FlakyStore:
    """Objects written once; ``statuses`` are answered first, then it works."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.statuses: list[int] = []
        self.lost_answers = 0  # PUTs that work and are answered with an error
        self.cut_bytes = 0
        self.asked = 0
        self.refuse = 0  # with which status
        self.port = 0

    async def handle(self, request: web.Request) -> web.Response:
        key, body = request.match_info["key"], await request.read()
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        if request.method == "PUT":
            if key in self.objects:
                return web.Response(status=412)
            self.objects[key] = body
            if self.lost_answers:
                self.lost_answers -= 1
                return web.Response(status=503)
            return web.Response()
        if key not in self.objects:
            return web.Response(status=404)
        data = self.objects[key]
        return web.Response(body=data[: len(data) - self.cut_bytes])

    async def ask(self, writes: Sequence[LogWrite], reads: Sequence[LogName]) -> Grants:
        self.asked += 1
        if self.refuse:
            raise Refused("the quota is used up", status=self.refuse)
        names = [LogName.of(w.task, w.port, NODE, w.number, apart=w.apart) for w in writes]
        pairs = [("PUT", name) for name in names] + [("GET", read) for read in reads]
        return Grants(grants=tuple(self.grant(method, name) for method, name in pairs))

    def grant(self, method: str, name: LogName) -> Grant:
        key = name.get_key(EXECUTION)
        return Grant(
            method=method,  # type: ignore[arg-type]
            key=key,
            url=f"http://127.0.0.1:{self.port}/{key}",
            headers={},
            length_bytes=None,
            expires_at_s=int(time.time()) + 60,
        )


@pytest.fixture
async def store() -> AsyncIterator[FlakyStore]:
    store = FlakyStore()
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{key:.*}", store.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    store.port = runner.addresses[0][1]
    yield store
    await runner.cleanup()


@pytest.fixture
async def logs(store: FlakyStore) -> AsyncIterator[GrantedLogs]:
    async with aiohttp.ClientSession() as session:
        yield GrantedLogs(EXECUTION, lambda: session, store.ask, deadline_s=time.time() + HANG_S)


def make_entries(count: int) -> list[LogEntry]:
    data = [bytes([step]) * (step + 1) for step in range(count)]
    return [LogEntry(n, hashlib.sha256(d).digest(), len(d), d) for n, d in enumerate(data)]


async def read_all(logs: GrantedLogs) -> list[LogEntry]:
    reader = LogNameer(EXECUTION, 2, 0, NODE, lambda length: True)
    return [entry async for entries in iter_log(logs, reader) for entry in entries]


async def test_f20_f22_log_survives_a_store_that_stumbles_and_urls_that_expire(
    store: FlakyStore, logs: GrantedLogs
) -> None:
    writer = LogWriter(EXECUTION, NODE, logs)
    entries = make_entries(6)
    store.statuses = [503, 403, 500]  # slow down, URL expired, broken
    for entry in entries[:3]:
        writer.append(2, 0, entry)
    assert writer.get_unstored(2, 0) == entries[:3]
    await writer.finish()
    assert writer.get_unstored(2, 0) == [] and store.asked == 2  # the new URL was asked for
    store.lost_answers = 1
    for entry in entries[3:]:
        writer.append(2, 0, entry)
    await writer.finish()
    assert await read_all(logs) == entries and len(store.objects) == 2


async def test_steps_that_overtake_wait_for_the_ones_before(
    store: FlakyStore, logs: GrantedLogs
) -> None:
    writer = LogWriter(EXECUTION, NODE, logs)
    entries = make_entries(3)
    writer.append(2, 0, entries[0])
    writer.append(2, 0, entries[2])
    assert writer.get_unstored(2, 0) == [entries[0], entries[2]]
    writer.append(2, 0, entries[1])
    await writer.finish()
    assert await read_all(logs) == entries


async def test_full_segment_waits_for_the_next_look_unless_another_is_full(
    store: FlakyStore, logs: GrantedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_STEPS", 2)
    writer, entries = LogWriter(EXECUTION, NODE, logs), make_entries(5)
    for entry in entries[:3]:
        writer.append(2, 0, entry)
        writer.append(2, 1, entry)
    writer.settle()
    assert writer._task is None
    writer.append(2, 0, entries[3])
    writer.settle()
    assert writer._task is not None, "two of port 0 wait"
    await writer._task
    assert store.asked == 2 and len(store.objects) == 3, "one request for all ports"
    await writer.finish()


@pytest.mark.parametrize("status", [403, 410])  # 410: the execution is settled
async def test_f20_store_that_refuses_ends_the_log_with_its_reason(
    store: FlakyStore, logs: GrantedLogs, status: int
) -> None:
    store.refuse = status
    writer = LogWriter(EXECUTION, NODE, logs)
    writer.append(2, 0, make_entries(1)[0])
    with pytest.raises(Refused, match="quota"):
        await writer.finish()
    assert not store.objects and store.asked == 1


async def test_slow_store_costs_bounded_memory(
    store: FlakyStore, logs: GrantedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LOG_MEMORY_BYTES", 10)
    writer = LogWriter(EXECUTION, NODE, logs)
    for entry in make_entries(5):
        writer.append(2, 0, entry)
    with pytest.raises(Exception, match="the store is too slow"):
        await writer.finish()


async def test_f21_large_tensor_that_is_cut_off_is_never_used(
    store: FlakyStore, logs: GrantedLogs
) -> None:
    data = bytes(range(256)) * (limits.INLINE_TENSOR_BYTES // 256 + 1)
    digest = hashlib.sha256(data).digest()
    name = LogName.of(2, 0, NODE, 7, apart=True)
    await logs.write([LogObject(name, data, digest, len(data))])
    entry = LogEntry(7, digest, len(data), None)
    assert await read_tensor(logs, LogName.of(2, 0, NODE, 0), entry) == data
    store.cut_bytes = 1
    with pytest.raises(PeerFault, match="another digest"):
        await read_tensor(logs, LogName.of(2, 0, NODE, 0), entry)


async def test_missing_segment_is_the_end_or_waited_for(
    store: FlakyStore, logs: GrantedLogs
) -> None:
    with pytest.raises(NotStored):
        await logs.read(LogName.of(2, 0, NODE, 0), 100, None)
    reader = LogNameer(EXECUTION, 2, 0, NODE, lambda length: True)
    entries = make_entries(2)
    writer = LogWriter(EXECUTION, NODE, logs)
    looks: list[int] = []

    def wait() -> bool:
        looks.append(reader.next_step)
        if len(looks) == 1:
            writer.append(2, 0, entries[0])
            writer.flush()
        return reader.next_step == 0

    async with asyncio.timeout(HANG_S):
        read = [entry async for part in iter_log(logs, reader, wait=wait) for entry in part]
    assert read == entries[:1] and looks[-1] == 1


async def test_the_logs_of_a_tasks_inputs_are_asked_for_once(store: FlakyStore) -> None:
    class Gateway:
        async def verification_grants(
            self, order: Any, reads: Sequence[LogName], writes: Sequence[LogWrite]
        ) -> Grants:
            return await store.ask(writes, reads)

    request = SimpleNamespace(
        execution_id=EXECUTION, deadline=int(time.time() + HANG_S), client="0x" + "cc" * 20
    )
    certificate = SimpleNamespace(plan=SimpleNamespace(request=request))
    order: Any = SimpleNamespace(certificate=certificate, executors=("0x" + "dd" * 20, NODE))
    gateway: Any = Gateway()
    names = [LogName.of(1, 2, NODE, 0), LogName.of(CLIENT, 0, request.client, 0)]
    async with aiohttp.ClientSession() as session:
        sources = [(1, 2), (CLIENT, 0)]
        logs = open_verification_logs(gateway, lambda: session, order, sources)
        for count, name in enumerate(names):
            store.objects[name.get_key(EXECUTION)] = bytes([count])
        assert [await logs.read(name, 1, None) for name in names] == [b"\0", b"\1"]
        assert store.asked == 1
        with pytest.raises(NotStored):
            await logs.read(LogName.of(0, 0, "0x" + "dd" * 20, 0), 1, None)
        assert store.asked == 2


async def test_f22_deadline_ends_the_tries(store: FlakyStore) -> None:
    store.statuses = [503] * 100
    async with aiohttp.ClientSession() as session:
        late = GrantedLogs(EXECUTION, lambda: session, store.ask, deadline_s=time.time() + 0.2)
        with pytest.raises(StorageUnavailable):
            await late.read(LogName.of(2, 0, NODE, 0), 100, None)


async def test_a_node_that_is_refused_grants_upfront_asks_for_each_object(
    store: FlakyStore,
) -> None:
    class Gateway:
        async def execution_grants(self, certificate: Any) -> Grants:
            raise Refused("the key is neither an executor nor the client", status=403)

        async def log_grants(
            self, certificate: Any, writes: Sequence[LogWrite], reads: Sequence[LogName], _: Any
        ) -> Grants:
            return await store.ask(writes, reads)

    request = SimpleNamespace(execution_id=EXECUTION, deadline=int(time.time() + HANG_S))
    certificate: Any = SimpleNamespace(plan=SimpleNamespace(request=request))
    executor_map: Any = SimpleNamespace(takeovers={})
    gateway: Any = Gateway()
    name, data = LogName.of(2, 0, NODE, 3, apart=True), b"large"
    async with aiohttp.ClientSession() as session:
        logs = open_logs(
            gateway, lambda: session, certificate, executor_map, has_large_tensors=True
        )
        digest = hashlib.sha256(data).digest()
        await logs.write([LogObject(name, data, digest, len(data))])
        assert await logs.read(name, 100, digest) == data
