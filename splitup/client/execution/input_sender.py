"""The inputs of one execution: sent to the nodes that read them, and stored for verification."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitup.client.execution.output_collector import get_input_consumers
from splitup.core import limits, tuning
from splitup.core.errors import SplitUpError
from splitup.core.tensors import StepsDigest
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.frames import FRAME_HEADER_BYTES
from splitup.messages.plans import Request
from splitup.messages.storage import LogName
from splitup.net.links import Link
from splitup.net.signed_frames import make_entry_frame, seal_frame, seal_frames
from splitup.net.tensor_chunks import has_room, send_direct
from splitup.protocol.execution.log_segments import LogEntry
from splitup.storage.log_store import LogObject, LogStore, LogWriter

_Group = tuple[tuple[int, ...], tuple[str, ...]]  # inputs, and the nodes that read exactly these


@dataclass(frozen=True, slots=True)
class _Outgoing:
    step: int
    tensors: list[bytes]


class InputSender:
    """Sends the inputs of one execution, step by step, over the session's links.

    A node's connection that fails is not handled here: the failover decides what to do about it.
    """

    def __init__(
        self,
        identity: Identity,
        request: Request,
        manifest: Manifest,
        store: LogStore,
        links: Mapping[str, Link],
        executors: Iterable[str],
        *,
        direct_bytes: int,
        start: Callable[[Coroutine[Any, Any, None]], None],
        on_failure: Callable[[str], None],
        on_stored: Callable[[], None],
    ) -> None:
        """``start`` runs a coroutine of the session; ``on_stored`` follows every large step."""
        self.unstored: set[int] = set()  # steps whose large inputs readers may not have yet
        self._identity = identity
        self._execution_id = request.execution_id
        self._manifest = manifest
        self._links = links
        self._start = start
        self._on_failure = on_failure
        self._on_stored = on_stored
        self._loop = asyncio.get_running_loop()
        self._consumers = get_input_consumers(manifest, tuple(executors))
        self._digests = [StepsDigest() for _ in manifest.inputs]
        self._latest: dict[int, LogEntry] = {}  # by port
        self._steps = 0
        self._steps_sent = 0  # whose inputs are in the digests
        self._writer = LogWriter(self._execution_id, request.client, store, pause_s=0.0)
        self._large = LargeInputs(identity, request, store, direct_bytes)
        self._outbox: asyncio.Queue[_Outgoing] = asyncio.Queue()
        self._outgoing = 0  # steps that are not sent yet
        # steps already sent to the first task, and which inputs the other tasks read
        self._rest: list[tuple[Mapping[int, LogEntry], list[_Group]]] = []
        self._is_open = False

    def open(self) -> None:
        """Begin to send; the links exist from here on."""
        self._is_open = True
        self._start(self._write())
        self._start(self._flush())

    def submit(self, step: int, tensors: list[bytes]) -> None:
        """Send a step, now or when the steps before it are sent."""
        self._steps = step + 1
        self._outgoing += 1
        largest = max(map(len, tensors), default=0)
        if largest > limits.INLINE_TENSOR_BYTES:
            self.unstored.add(step)
        elif self._outgoing == 1 and self._send_now(step, tensors):
            return
        self._outbox.put_nowait(_Outgoing(step, tensors))

    async def drain(self) -> None:
        """Wait until every submitted step is sent, and its large inputs are stored."""
        await self._outbox.join()

    def set_executors(self, executors: Iterable[str]) -> None:
        """Send to these nodes from now on, by task index."""
        self._consumers = get_input_consumers(self._manifest, tuple(executors))

    def mark_announced(self, node: str) -> None:
        """Note that a node has the plan, or will not get it from us."""
        self._large.mark_announced(node)

    def compute_digests(self) -> tuple[str, ...]:
        """Return the digests of all inputs by port; () while a step is not completely sent.

        A digest of a part would contradict what honest nodes received.
        """
        self._settle()
        if self._steps_sent != self._steps:
            return ()
        return tuple(digest.hexdigest() for digest in self._digests)

    def take_interim_digests(self, steps: int) -> tuple[str, ...]:
        """Return the inputs' digests after so many sent steps, a multiple of INTERIM_STEPS.

        Those of fewer steps are not kept any longer; () if they are not kept any more.
        """
        self._settle()
        found = [digest.find(steps) for digest in self._digests]
        for digest in self._digests:
            digest.forget(steps + 1)
        return tuple(one for one in found if one is not None) if all(found) else ()

    def resend_unstored(self, port: int, node: str) -> None:
        """Send a node that took a task over the inputs that it cannot read from the store yet.

        If there are none, the last one: it shows how many steps we ordered.
        """
        self._settle()
        latest = [self._latest[port]] if port in self._latest else []
        for entry in self._writer.get_unstored(CLIENT, port) or latest:
            frame = make_entry_frame(self._execution_id, (CLIENT, port), entry)
            self.send_all(seal_frame(self._identity, frame), [node])

    def send_all(self, sealed: bytes, nodes: Iterable[str]) -> None:
        """Send a frame to nodes, after the inputs that wait."""
        self._settle()
        for node in nodes:
            link = self._links.get(node)
            with contextlib.suppress(SplitUpError):  # the failover, or the refund, settles it
                if link is not None:
                    link.send(sealed)

    async def store(self) -> None:
        """Store what is left of the inputs' logs. Raises StorageUnavailable, PeerFault."""
        self._settle()
        await self._writer.finish()

    async def close(self) -> None:
        """Stop storing."""
        await self._writer.close()

    # ---- small inputs --------------------------------------------------------------------------

    def _send_now(self, step: int, tensors: list[bytes]) -> bool:
        """Send a step that has none before it; False when it has to wait for the network."""
        if not self._is_open:
            return False
        free = tuning.LINK_QUEUE_BYTES - sum(map(len, tensors)) - FRAME_HEADER_BYTES * len(tensors)
        groups = list(self._consumers.items())
        for _, nodes in groups:
            for node in nodes:
                if self._links[node].queued_bytes > free:
                    return False
        entries = {}
        for port, data in enumerate(tensors):
            entries[port] = LogEntry(step, hashlib.sha256(data).digest(), len(data), data)
        if self._rest:
            self._settle()
        if groups:
            self._send_group(entries, *groups[0])
        # the rest is done after the first task's inputs are sent, which the others wait for
        self._rest.append((entries, groups[1:]))
        self._loop.call_soon(self._settle)
        self._outgoing -= 1
        return True

    def _settle(self) -> None:
        """Send the later tasks' inputs of the steps whose first task has its own, and log them."""
        rest, self._rest = self._rest, []
        for entries, groups in rest:
            for group in groups:
                self._send_group(entries, *group)
            self._log_inputs(entries)
            for port, entry in entries.items():
                self._digests[port].add(entry.digest)
            self._steps_sent += 1

    def _send_group(
        self, entries: Mapping[int, LogEntry], ports: tuple[int, ...], nodes: tuple[str, ...]
    ) -> None:
        for sealed in self._seal_inputs(entries, ports):
            for node in nodes:
                with contextlib.suppress(SplitUpError):
                    self._links[node].send(sealed)

    def _log_inputs(self, entries: Mapping[int, LogEntry]) -> None:
        """Log inputs of a step, which are sent in the same turn of the event loop or later."""
        for port, entry in entries.items():
            self._latest[port] = entry
            self._writer.append(CLIENT, port, entry)
        self._writer.settle()

    def _seal_inputs(self, entries: Mapping[int, LogEntry], ports: tuple[int, ...]) -> list[bytes]:
        frames = []
        for port in ports:
            if port in entries:
                frames.append(make_entry_frame(self._execution_id, (CLIENT, port), entries[port]))
        return seal_frames(self._identity, frames)

    # ---- steps that wait -----------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            outgoing = await self._outbox.get()
            large: dict[int, LogObject] = {}
            try:
                large = await self._send(outgoing)
            except SplitUpError as error:
                self._on_failure(str(error))
            finally:
                if large:
                    self._start(self._store_large(outgoing.step, large))
                else:
                    self._finish_step()

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(tuning.FLUSH_PERIOD_S)
            self._writer.flush(age_s=tuning.SEGMENT_AGE_S)

    async def _send(self, outgoing: _Outgoing) -> dict[int, LogObject]:
        """Send a step; return its large inputs, by port, which are to be stored."""
        self._settle()
        step, tensors = outgoing.step, dict(enumerate(outgoing.tensors))
        most = limits.INLINE_TENSOR_BYTES
        large_tensors = {port: data for port, data in tensors.items() if len(data) > most}
        entries = {
            port: LogEntry(step, hashlib.sha256(data).digest(), len(data), data)
            for port, data in tensors.items()
            if port not in large_tensors
        }
        await self._send_entries(entries)
        large: dict[int, LogObject] = {}
        if large_tensors:
            readers = {port: self._find_readers(port) for port in large_tensors}
            large = await self._large.send(step, large_tensors, readers)
        for port in tensors:
            item = large[port] if port in large else entries[port]
            self._digests[port].add(item.digest)
        self._outgoing -= 1
        return large

    def _find_readers(self, port: int) -> list[Link]:
        groups = self._consumers.items()
        return [self._links[node] for ports, nodes in groups if port in ports for node in nodes]

    async def _store_large(self, step: int, large: Mapping[int, LogObject]) -> None:
        """Store what is too large for a frame, then tell its readers."""
        try:
            await self._large.store(list(large.values()))
            entries = {
                port: LogEntry(step, item.digest, item.length, None) for port, item in large.items()
            }
            await self._send_entries(entries)
            self.unstored.discard(step)
            self._on_stored()
        except SplitUpError as error:
            self._on_failure(str(error))
        finally:
            self._finish_step()

    def _finish_step(self) -> None:
        self._steps_sent += 1
        self._outbox.task_done()

    async def _send_entries(self, entries: Mapping[int, LogEntry]) -> None:
        self._log_inputs(entries)
        for ports, nodes in list(self._consumers.items()):
            for sealed in self._seal_inputs(entries, ports):
                for node in nodes:
                    link = self._links[node]
                    with contextlib.suppress(SplitUpError):
                        if link.queued_bytes + len(sealed) > tuning.LINK_QUEUE_BYTES:
                            await link.drain(tuning.LINK_QUEUE_BYTES - len(sealed))
                        link.send(sealed)


class LargeInputs:
    """The large inputs of one execution, sent at most one step ahead of the store.

    The store sets the pace because nodes store the outputs of every step, too: with inputs far
    ahead of a slow store they would wait for it and be taken for failed. Chunks are sent to a
    reader once it has the plan; before that it would drop them.
    """

    def __init__(
        self, identity: Identity, request: Request, store: LogStore, direct_bytes: int
    ) -> None:
        """``direct_bytes`` is the most that may be queued for one reader."""
        self._identity = identity
        self._request = request
        self._store = store
        self._direct_bytes = direct_bytes
        self._is_stored = asyncio.Event()
        self._is_stored.set()
        self._announced: dict[str, asyncio.Event] = {}  # by node

    def mark_announced(self, node: str) -> None:
        """Note that a node has the plan, or will not get it from us."""
        self._find_announced(node).set()

    async def send(
        self, step: int, tensors: Mapping[int, bytes], readers: Mapping[int, Collection[Link]]
    ) -> dict[int, LogObject]:
        """Send a step's large inputs, by port, to their readers; return what is to be stored.

        Waits until the step before is stored.
        """
        await self._is_stored.wait()
        self._is_stored.clear()
        return {
            port: await self._send(port, step, tensors[port], readers[port]) for port in tensors
        }

    async def store(self, objects: Sequence[LogObject]) -> None:
        """Store what ``send`` returned. Raises StorageUnavailable, PeerFault, Refused."""
        try:
            await self._store.write(objects)
        finally:
            self._is_stored.set()

    async def _send(
        self, port: int, step: int, data: bytes, readers: Collection[Link]
    ) -> LogObject:
        await self._wait_ready(readers)
        links = [link for link in readers if has_room(link, len(data), self._direct_bytes)]
        execution_id = self._request.execution_id
        source = (CLIENT, port)
        digest, _ = await send_direct(self._identity, links, execution_id, source, step, data)
        name = LogName.of(CLIENT, port, self._request.client, step, apart=True)
        return LogObject(name, data, digest, len(data))

    async def _wait_ready(self, readers: Collection[Link]) -> None:
        """Wait for unconnected readers, at most as long as the way by the store would take."""
        try:
            async with asyncio.timeout(tuning.DIRECT_CONNECT_S):
                for link in readers:
                    await self._find_announced(link.peer).wait()
                    await link.connected.wait()
        except TimeoutError:
            return

    def _find_announced(self, node: str) -> asyncio.Event:
        return self._announced.setdefault(node, asyncio.Event())
