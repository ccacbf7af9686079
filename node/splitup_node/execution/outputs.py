"""From a finished run to its readers: frames to other nodes and the client, entries to the log.

A small output is sent in the worker's own callback. An output that is too large for a frame is
hashed on a thread and stored as an object of its own, while its bytes already go to its readers in
chunks; a frame tells them when the store has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from splitup.core import limits, tuning
from splitup.core.errors import SplitUpError
from splitup.core.tensors import holds_zeros
from splitup.crypto.keys import Identity
from splitup.messages.frames import Frame
from splitup.net.links import Link, LinkPool
from splitup.net.signed_frames import make_entry_frame, seal_frame, seal_frames
from splitup.net.tensor_chunks import has_room, send_direct
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.storage_keys import LogName
from splitup.protocol.execution.task_queue import PortId, Run, Tensor
from splitup.storage.log_store import LogObject
from splitup_node.execution.chunk_transfers import find_direct_links
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.executions import Execution, Spawn

_log = logging.getLogger("splitup.node.outputs")

_Readers = tuple[tuple[str, str], ...]  # nodes and their endpoints


class Outputs:
    """Sends what this node's tasks produce."""

    def __init__(
        self,
        identity: Identity,
        pool: LinkPool,
        table: ExecutionTable,
        spawn: Spawn,
        direct_bytes: int,
    ) -> None:
        """``direct_bytes`` of large tensors may wait for a reader, or be ahead of the store."""
        self._identity = identity
        self._pool = pool
        self._table = table
        self._clients = table.clients
        self._spawn = spawn
        self._direct_bytes = direct_bytes
        self._waiting: list[tuple[_Readers, Frame]] = []  # the frames of this batch
        self._unlogged: list[
            tuple[Execution, PortId, LogEntry]
        ] = []  # the log entries of this batch

    def publish(
        self,
        execution: Execution,
        run: Run,
        outputs: Sequence[bytes | memoryview],
        on_stored: Callable[[], None],
    ) -> list[Tensor]:
        """Queue a run's outputs for their readers on other nodes; ``flush`` sends them.

        Returns the outputs for the readers on this node. ``on_stored`` is called when a large one
        has been stored.
        """
        gates = execution.routes.find_gates(run.task)
        zeros = {port for port in gates if holds_zeros(outputs[port])}
        return [
            self._publish_port(execution, run, port, data, zeros, on_stored)
            for port, data in enumerate(outputs)
        ]

    def _publish_port(
        self,
        execution: Execution,
        run: Run,
        port: int,
        data: bytes | memoryview,
        zeros: Collection[int],
        on_stored: Callable[[], None],
    ) -> Tensor:
        """Publish one output; ``zeros`` are the run's outputs that are zero: gated readers of
        which get nothing else.
        """
        if len(data) > limits.INLINE_TENSOR_BYTES:
            execution.publishing_bytes += len(data)
            self._spawn(self._publish_stored(execution, run, port, data, zeros, on_stored))
            return Tensor(b"", data, time.time_ns())  # readers on this node need no digest
        tensor = Tensor(hashlib.sha256(data).digest(), data, time.time_ns())
        source = (run.task, port)
        entry = LogEntry(run.step, tensor.digest, len(data), data)
        targets = execution.get_targets(source, run.step, zeros)
        before = None
        if source in execution.sent:
            before = execution.sent[source].add(run.step, tensor.digest)
        if before is not None and execution.is_result(source, run.step):
            if before.done():
                self.send_entry(execution, source, entry, targets, before.result())
            else:  # a large tensor of an earlier step is still being hashed
                self._spawn(self._send_later(execution, source, entry, targets, before))
        elif targets:
            frame = make_entry_frame(execution.id, source, entry)
            self._waiting.append((_find_readers(execution, targets), frame))
        self._unlogged.append((execution, source, entry))
        return tensor

    def flush(self) -> None:
        """Send and log a batch's outputs, with one signature for all frames to the same reader."""
        waiting, self._waiting = self._waiting, []
        groups: dict[_Readers, list[Frame]] = {}
        for readers, frame in waiting:
            groups.setdefault(readers, []).append(frame)
        for readers, frames in groups.items():
            for sealed in seal_frames(self._identity, frames):
                self._send(readers, sealed)
        unlogged, self._unlogged = self._unlogged, []
        for execution, source, entry in unlogged:
            execution.writer.append(*source, entry)

    async def _send_later(
        self,
        execution: Execution,
        source: PortId,
        entry: LogEntry,
        targets: Iterable[str],
        before: Awaitable[bytes],
    ) -> None:
        self.send_entry(execution, source, entry, targets, await before)

    def send_entry(
        self,
        execution: Execution,
        source: PortId,
        entry: LogEntry,
        targets: Iterable[str],
        before: bytes,
    ) -> None:
        """Send one step of an output to nodes, and to the client when it waits for it."""
        targets = tuple(targets)
        is_result = execution.is_result(source, entry.step)
        if not targets and not is_result:
            return
        frame = make_entry_frame(execution.id, source, entry, before)
        sealed = seal_frame(self._identity, frame)
        self.send(execution, targets, sealed)
        if is_result:
            self._clients.send(execution, sealed)

    def open_links(self, execution: Execution) -> None:
        """Start to connect to the nodes that read what this node's tasks produce."""
        for reader in execution.routes.successors.values():
            link = self._pool.open(reader.node, reader.endpoint)
            if not link.has_connected:
                loop = asyncio.get_running_loop()
                loop.call_later(tuning.UNREACHED_S, self._check_reached, execution, link)

    def _check_reached(self, execution: Execution, link: Link) -> None:
        """Fail this node's part when it cannot connect to a reader.

        The client then replaces this node. Otherwise it would replace the reader, which misses its
        inputs through no fault of its own.
        """
        targets = execution.routes.targets
        tasks = [port[0] for port in targets if link.peer in targets[port]]
        if link.has_connected or not tasks or execution.ended_at_s:
            return
        step = self._table.queue.get_progress(execution.id).get(min(tasks), 0)
        reason = f"this node cannot connect to node {link.peer}"
        reason += f": {link.error}" if link.error else ""
        self._table.fail(execution.id, min(tasks), step, reason)

    def send(self, execution: Execution, targets: Iterable[str], sealed: bytes) -> None:
        """Send a sealed frame to nodes of the plan. The client replaces a node that is gone."""
        self._send(_find_readers(execution, targets), sealed)

    def _send(self, readers: _Readers, sealed: bytes) -> None:
        for node, endpoint in readers:
            try:
                self._pool.open(node, endpoint).send(sealed)
            except SplitUpError as error:
                _log.warning("a frame to node %s cannot be sent: %s", node, error)

    def resend(self, execution: Execution, source: PortId, target: str) -> None:
        """Send a new reader the entries of an output that are not in the store yet."""
        node = execution.certificate.plan.node_of(target)
        for entry in execution.writer.get_unstored(*source):
            sealed = seal_frame(self._identity, make_entry_frame(execution.id, source, entry))
            try:
                self._pool.open(node.node, node.endpoint).send(sealed)
            except SplitUpError as error:
                _log.warning(
                    "outputs of %s cannot be sent to node %s: %s", execution.id, target, error
                )
                return

    async def _publish_stored(
        self,
        execution: Execution,
        run: Run,
        port: int,
        data: bytes | memoryview,
        zeros: Collection[int],
        on_stored: Callable[[], None],
    ) -> None:
        source = (run.task, port)
        try:
            if run.task not in execution.parts:
                return  # another node runs the task by now
            links = self._find_direct_links(execution, source, run.step, zeros, len(data))
            find = execution.sent[source].add if source in execution.sent else None
            digest, before = await send_direct(
                self._identity, links, execution.id, source, run.step, data, find
            )
            name = LogName(run.task, port, execution.node, run.step, apart=True)
            await execution.store.write([LogObject(name, data, digest, len(data))])
        except SplitUpError as error:
            reason = f"its output cannot be stored: {error}"
            self._table.fail(execution.id, run.task, run.step, reason)
            return
        finally:
            execution.publishing_bytes -= len(data)
        if execution.failure or run.task not in execution.parts:
            return
        entry = LogEntry(run.step, digest, len(data), None)
        execution.writer.append(run.task, port, entry)
        targets = execution.get_targets(source, run.step, zeros)
        self.send_entry(execution, source, entry, targets, before)
        on_stored()

    def _find_direct_links(
        self,
        execution: Execution,
        source: PortId,
        step: int,
        zeros: Collection[int],
        nbytes: int,
    ) -> list[Link]:
        """Return the links of readers to which a large tensor goes ahead of the store.

        No links while the store is too far behind: readers then wait for the store.
        """
        most = self._direct_bytes
        if execution.publishing_bytes > most:
            return []
        targets = execution.get_targets(source, step, zeros)
        links = find_direct_links(self._pool, execution, targets, nbytes, most)
        if execution.is_result(source, step):
            link = self._clients.find_link(execution)
            if link is not None and has_room(link, nbytes, most):
                links.append(link)
        return links


def _find_readers(execution: Execution, targets: Iterable[str]) -> _Readers:
    entries = [execution.find_node(target) for target in targets]
    return tuple((entry.node, entry.endpoint) for entry in entries)
