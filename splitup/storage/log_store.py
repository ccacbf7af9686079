"""Writes and reads the logs of executions over presigned URLs.

No token waits for this. A producer passes its tensors to a ``LogWriter``, which stores segment
after segment in the background; readers follow the chain of segments to its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import aiohttp

from splitup.core import limits, tuning
from splitup.core.background import cancel
from splitup.core.errors import PeerFault, Refused, SplitUpError, Unavailable
from splitup.core.latest import Latest
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.plans import PlanCertificate, Request
from splitup.messages.storage import Grant, Grants, LogName, LogWrite
from splitup.messages.verification import VerificationOrder
from splitup.net.object_transfer import (
    Body,
    NotStored,
    compute_sha256,
    count_bytes,
    get_object,
    put_object,
)
from splitup.protocol.execution.log_segments import LogEntry, LogNameer, PortLog, Segment
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.execution.task_queue import PortId
from splitup.storage.gateway_client import GatewayClient

_log = logging.getLogger("splitup.logs")
_FIRST_PAUSE_S: Final = 0.05
_EXPIRES_SOON_S: Final = 5.0  # a URL that expires sooner is replaced
_SEGMENT_BYTES: Final = (
    limits.SEGMENT_BYTES + limits.INLINE_TENSOR_BYTES + limits.SEGMENT_HEADER_BYTES
)


class LogIncomplete(PeerFault):
    """The store lacks what a producer has to log, or holds something else."""


@dataclass(frozen=True, slots=True)
class LogObject:
    """An object to store; ``digest`` is its SHA-256."""

    name: LogName
    data: Body
    digest: bytes
    length: int  # bytes


async def make_log_object(name: LogName, data: Body) -> LogObject:
    """Return the object for ``data``; large data is hashed on a thread."""
    return LogObject(name, data, await compute_sha256(data), count_bytes(data))


class LogStore(Protocol):
    """The log objects of one execution that one party may write and read."""

    async def write(self, objects: Sequence[LogObject], *, pause_s: float = 0.0) -> None:
        """Store objects; ``pause_s`` is between their chunks (``put_object``).

        Raises SplitUpError when one cannot be stored.
        """

    async def read(self, name: LogName, max_bytes: int, digest: bytes | None) -> bytes:
        """Return an object; raise NotStored when it does not exist, SplitUpError."""


Ask = Callable[[Sequence[LogWrite], Sequence[LogName]], Awaitable[Grants]]


class GrantedLogs:
    """A LogStore over presigned URLs, which ``ask`` gets from the gateway.

    ``upfront`` gets those for large tensors all at once. Those to read ``together`` are asked for
    with the first one that is read. When the environment fails, calls are tried again until
    ``deadline_s`` (Unix time) by the clock ``now_s``.
    """

    def __init__(
        self,
        execution_id: str,
        http: Callable[[], aiohttp.ClientSession],
        ask: Ask,
        *,
        deadline_s: float,
        upfront: Callable[[], Awaitable[Grants]] | None = None,
        together: Sequence[LogName] = (),
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._execution_id = execution_id
        self._http = http
        self._ask = ask
        self._deadline_s = deadline_s
        self._now_s = now_s
        self._upfront = upfront
        self._together = tuple(together)
        self._upfront_lock = asyncio.Lock()
        self._known: dict[tuple[str, str], Grant] = {}

    async def write(self, objects: Sequence[LogObject], *, pause_s: float = 0.0) -> None:
        """Store objects one after the other; raise StorageUnavailable, PeerFault, Refused."""
        pauses = _Pauses(self._deadline_s - self._now_s())
        left = list(objects)
        while left:
            try:
                puts = await self._find_puts(left[: limits.LOG_OBJECTS])
                while left and (put := puts.get(left[0].name)) is not None:
                    await self._put(left[0], put, pause_s)
                    del left[0]
            except Unavailable as error:
                await pauses.wait(error)

    async def read(self, name: LogName, max_bytes: int, digest: bytes | None) -> bytes:
        """Return an object; raise NotStored at once when it does not exist (yet)."""
        pauses = _Pauses(self._deadline_s - self._now_s())
        while True:
            try:
                return await get_object(
                    self._http(),
                    await self._find_get(name),
                    max_bytes=max_bytes,
                    expected_digest=None if digest is None else digest.hex(),
                    deadline_s=min(10.0, max(0.1, self._deadline_s - self._now_s())),
                )
            except NotStored:
                raise
            except Unavailable as error:
                self._known.pop(("GET", name.get_key(self._execution_id)), None)
                await pauses.wait(error)

    async def _put(self, item: LogObject, put: Grant, pause_s: float) -> None:
        deadline_s = min(30.0, max(0.1, self._deadline_s - self._now_s()))
        try:
            await put_object(self._http(), put, item.data, deadline_s=deadline_s, pause_s=pause_s)
        except PeerFault:  # the key is taken, maybe by an earlier try of ours: compare
            existing = await self._find_get(item.name)
            await put_object(self._http(), put, item.data, existing=existing, deadline_s=deadline_s)

    async def _find_puts(self, objects: Sequence[LogObject]) -> dict[LogName, Grant]:
        """Return PUT grants: for the first object only if it is known upfront, else for all."""
        first = objects[0]
        known = await self._find_upfront("PUT", first.name)
        if known is not None and known.length_bytes == first.length:
            del self._known["PUT", known.key]
            return {first.name: known}
        grants = await self._ask(
            [
                LogWrite(
                    task=item.name.task,
                    port=item.name.port,
                    number=item.name.number,
                    apart=item.name.apart,
                    length_bytes=item.length,
                    sha256=item.digest.hex(),
                )
                for item in objects
            ],
            [],
        )
        names = [item.name for item in objects]
        return {name: grants.find("PUT", name.get_key(self._execution_id)) for name in names}

    async def _find_get(self, name: LogName) -> Grant:
        key = name.get_key(self._execution_id)
        known = self._known.get(("GET", key)) or await self._find_upfront("GET", name)
        if known is not None and known.expires_at_s > time.time() + _EXPIRES_SOON_S:
            return known
        names, self._together = dict.fromkeys((name, *self._together)), ()
        reads = [
            one.model_copy(update={"number": number})
            for one in names
            for number in range(one.number, min(one.number + _get_ahead(one), limits.MAX_STEPS))
        ]
        grants = await self._ask([], reads[: limits.LOG_OBJECTS])
        if len(self._known) > limits.MAX_GRANTS:
            self._known.clear()
        self._known |= {("GET", grant.key): grant for grant in grants.grants}
        return grants.find("GET", key)

    async def _find_upfront(self, method: str, name: LogName) -> Grant | None:
        """Return the grant for a large tensor that ``upfront`` gave, None without one."""
        if not name.apart or self._upfront is None:
            return None
        async with self._upfront_lock:
            if self._upfront is not None:
                grants = await self._upfront()
                self._known |= {(grant.method, grant.key): grant for grant in grants.grants}
                self._upfront = None
        return self._known.get((method, name.get_key(self._execution_id)))


def _get_ahead(name: LogName) -> int:
    """Return how many objects a reader asks for at once, from this one on."""
    return 1 if name.apart else tuning.LOG_READ_AHEAD


def open_logs(
    gateway: GatewayClient,
    http: Callable[[], aiohttp.ClientSession],
    certificate: PlanCertificate,
    executor_map: ExecutorMap,
    *,
    has_large_tensors: bool,
    now_s: Callable[[], float] = time.time,
) -> GrantedLogs:
    """Return the logs of one execution for its client or for an executor.

    ``executor_map`` holds the takeovers that prove who is executor. ``now_s`` returns the chain's
    time.
    """
    request = certificate.plan.request

    async def ask(writes: Sequence[LogWrite], reads: Sequence[LogName]) -> Grants:
        return await gateway.log_grants(
            certificate, writes, reads, tuple(executor_map.takeovers.values())
        )

    async def ask_upfront() -> Grants:
        try:
            return await gateway.execution_grants(certificate)
        except (Refused, PeerFault) as error:  # a fallback candidate has no rights yet
            _log.debug("no grants upfront: %s", error)
            return Grants(grants=())

    return GrantedLogs(
        request.execution_id,
        http,
        ask,
        deadline_s=request.deadline + limits.GRANT_GRACE_S,
        upfront=ask_upfront if has_large_tensors else None,
        now_s=now_s,
    )


def open_verification_logs(
    gateway: GatewayClient,
    http: Callable[[], aiohttp.ClientSession],
    order: VerificationOrder,
    sources: Sequence[PortId] = (),
    *,
    now_s: Callable[[], float] = time.time,
) -> GrantedLogs:
    """Return the logs that a validator or a committee member reads to recompute a task.

    A validator may write the log of what it recomputes itself. The logs of ``sources`` are asked
    for together, since each request carries the whole order.
    """

    async def ask(writes: Sequence[LogWrite], reads: Sequence[LogName]) -> Grants:
        return await gateway.verification_grants(order, reads, writes)

    request = order.certificate.plan.request
    return GrantedLogs(
        request.execution_id,
        http,
        ask,
        deadline_s=request.deadline + limits.VERIFICATION_GRACE_S,
        together=[
            LogName.of(*source, _find_author(request, source, order.executors), 0)
            for source in sources
        ],
        now_s=now_s,
    )


def has_large_tensors(manifest: Manifest) -> bool:
    """Return whether a model has ports whose tensors do not fit a frame."""
    ports = [*manifest.inputs, *(port for task in manifest.tasks for port in task.outputs)]
    return any(port.nbytes > limits.INLINE_TENSOR_BYTES for port in ports)


class LogWriter:
    """Writes the logs of one party in one execution, in order, in the background.

    A full segment is stored at the next ``flush``, so that it does not delay the step that filled
    it, or as soon as a second segment of its log is full. ``error`` says why nothing more is
    stored. The writer gives up when more than ``tuning.LOG_MEMORY_BYTES`` of a log wait for a slow
    store.
    """

    def __init__(
        self,
        execution_id: str,
        node: str,
        store: LogStore,
        *,
        pause_s: float = tuning.SEGMENT_PAUSE_S,
    ) -> None:
        """``pause_s`` is the pause between a segment's chunks while the log is not behind."""
        self._execution_id = execution_id
        self._node = node
        self._store = store
        self._pause_s = pause_s
        self._logs: dict[tuple[int, int], PortLog] = {}
        self._ahead: dict[tuple[int, int], dict[int, LogEntry]] = {}  # by port and step
        self._new: list[tuple[int, int, LogEntry]] = []  # not in ``_logs`` or ``_ahead`` yet
        self._task: asyncio.Task[None] | None = None
        self.error: SplitUpError | None = None

    def append(self, task: int, port: int, entry: LogEntry) -> None:
        """Add a step of a port. Steps may come out of order, since large tensors take longer.

        It is only noted, because a reader waits for the tensor itself: call ``settle`` afterwards.
        """
        self._new.append((task, port, entry))

    def settle(self) -> None:
        """Put what was added into the logs, and begin to store a log that is behind."""
        new, self._new = self._new, []
        now = time.monotonic()
        for task, port, entry in new:
            if self.error is not None:
                return
            log = self._logs.get((task, port))
            if log is None:
                log = self._logs[task, port] = PortLog(task, port, self._node)
            if entry.step == log.next_step:
                log.append(entry, now)
            else:
                self._ahead.setdefault((task, port), {})[entry.step] = entry
            if ahead := self._ahead.get((task, port)):
                while (following := ahead.pop(log.next_step, None)) is not None:
                    log.append(following, now)
            if log.is_behind:
                self._start()
            if log.unstored_bytes > tuning.LOG_MEMORY_BYTES:
                self.error = Unavailable(
                    f"the store is too slow: {log.unstored_bytes} bytes of one log wait for it"
                )

    async def resume(self, task: int, port: int) -> int:
        """Continue a log that an earlier run wrote; return the first step that it lacks."""
        reader = LogNameer(self._execution_id, task, port, self._node, lambda length: True)
        async for _ in iter_log(self._store, reader):
            pass
        log = self._logs[task, port] = PortLog(task, port, self._node)
        log.resume(reader)
        return reader.next_step

    def flush(self, *, age_s: float = 0.0) -> None:
        """Start to store all steps that are at least ``age_s`` old."""
        self.settle()
        before = time.monotonic() - age_s
        if any([log.flush(before) for log in self._logs.values()]):
            self._start()

    async def finish(self) -> None:
        """Store everything and return when the store has it; raise the error that prevents it."""
        self.flush()
        while self._task is not None and not self._task.done():
            await asyncio.shield(asyncio.wait([self._task]))
            self.flush()
        if self.error is not None:
            raise self.error

    def get_unstored(self, task: int, port: int) -> list[LogEntry]:
        """Return the steps of a port that are not stored yet, in order."""
        self.settle()
        log = self._logs.get((task, port))
        ahead = self._ahead.get((task, port), {})
        stored = [] if log is None else list(log.iter_unstored())
        return stored + [ahead[step] for step in sorted(ahead)]

    def count_stored(self, task: int) -> int:
        """Return how many steps of a task are stored."""
        stored = [log.stored_steps for port, log in self._logs.items() if port[0] == task]
        return min(stored, default=0)

    def discard(self) -> None:
        """Stop writing: the execution has failed on this node."""
        self.error = self.error or Unavailable("the execution has failed")
        self._new.clear()
        self._logs.clear()
        self._ahead.clear()

    async def close(self) -> None:
        """Stop writing at once."""
        if self._task is not None:
            await cancel(self._task)

    def _start(self) -> None:
        if (self._task is None or self._task.done()) and self.error is None:
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Store all full segments."""
        try:
            while batch := self._list_oldest():
                await self._store_batch(batch)
                if self.error is not None:
                    return
        except SplitUpError as error:
            _log.warning("the log of %s cannot be stored: %s", self._execution_id, error)
            self.error = error

    def _list_oldest(self) -> list[tuple[PortLog, Segment]]:
        return [
            (log, segment)
            for log in self._logs.values()
            if (segment := log.get_oldest()) is not None
        ]

    async def _store_batch(self, batch: Sequence[tuple[PortLog, Segment]]) -> None:
        objects = [
            await make_log_object(segment.name, segment.encode(self._execution_id, log.previous))
            for log, segment in batch
        ]
        pause_s = 0.0 if any(log.is_behind for log, _ in batch) else self._pause_s
        await self._store.write(objects, pause_s=pause_s)
        for (log, segment), item in zip(batch, objects, strict=True):
            log.mark_stored(segment, item.digest.hex())


class LogPatience:
    """How long one party waits for the logs of an execution: once, for all that it reads of them.

    After the draw (``is_drawn``) only clients' logs are waited for, since executors store theirs
    before they commit. What a killed client has not stored never comes: soon after the deadline, by
    the chain's time that ``now_s`` returns, no reader waits any more. A client that stores a little
    at a time gains no time by that.
    """

    def __init__(
        self,
        *,
        is_drawn: bool,
        now_s: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_drawn = is_drawn
        self._now_s = now_s
        self._monotonic = monotonic
        self._ends: Latest[str, float] = Latest(tuning.MAX_FINISHED)  # by execution

    def begin(self, request: Request, source: PortId) -> Callable[[], bool]:
        """Begin to read a log of an execution; return what says whether it is still waited for."""
        ends = self._ends.setdefault(request.execution_id, self._monotonic() + tuning.LOG_LATE_S)
        if self._is_drawn and source[0] != CLIENT:
            return lambda: False
        last_s = request.deadline + tuning.LOG_LATE_S
        return lambda: self._monotonic() < ends and self._now_s() < last_s


async def iter_log(
    store: LogStore, reader: LogNameer, *, wait: Callable[[], bool] = lambda: False
) -> AsyncIterator[list[LogEntry]]:
    """Yield the entries of a log's segments, in order.

    A segment that does not exist yet is waited for while ``wait()`` is true. Raises PeerFault for a
    broken chain, StorageUnavailable, Refused.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            data = await store.read(reader.name, _SEGMENT_BYTES, None)
        except NotStored:
            if not wait():
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, tuning.LOG_POLL_S)
            continue
        pause_s = _FIRST_PAUSE_S
        yield reader.read(data)


async def read_tensor(store: LogStore, name: LogName, entry: LogEntry) -> bytes | memoryview:
    """Return a step's tensor, from its own object if it has one; ``name`` is one of its log."""
    if entry.data is not None:
        return entry.data
    apart = name.model_copy(update={"number": entry.step, "apart": True})
    return await store.read(apart, entry.length, entry.digest)


def _find_author(request: Request, source: PortId, executors: Sequence[str]) -> str:
    return request.client if source[0] == CLIENT else executors[source[0]]


async def iter_tensors(
    store: LogStore,
    request: Request,
    source: PortId,
    executors: Sequence[str],
    spec: TensorSpec,
    steps: int,
    patience: LogPatience,
) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield the first ``steps`` tensors that ``executors`` or the client logged of a port.

    One segment is in memory at a time. The committee compares the digests. A log that is too short
    is waited for as ``patience`` says. Raises LogIncomplete for a log that is broken or too short,
    StorageUnavailable, Refused.
    """
    author = _find_author(request, source, executors)
    reader = LogNameer(request.execution_id, *source, author, spec.accepts)
    wait = patience.begin(request, source)
    if not steps:
        return
    try:
        async for entries in iter_log(store, reader, wait=wait):
            for entry in entries:
                yield await read_tensor(store, reader.name, entry)
                if entry.step + 1 == steps:
                    return
    except (PeerFault, NotStored) as error:
        raise LogIncomplete(str(error), peer=author) from None
    who = "the client" if source[0] == CLIENT else f"task {source[0]}"
    raise LogIncomplete(
        f"the log of {who} ends before step {steps}; it has {reader.next_step}", peer=author
    )


class _Pauses:
    """Growing pauses for ``left_s`` from now; after that ``wait`` raises the error."""

    def __init__(self, left_s: float) -> None:
        self._end = time.monotonic() + left_s
        self._pause_s = _FIRST_PAUSE_S

    async def wait(self, error: Unavailable) -> None:
        if time.monotonic() + self._pause_s > self._end:
            raise error
        _log.info("a log object waits for the store: %s", error)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, tuning.LINK_RETRY_MAX_S)
