"""From a finished run to its readers: frames to other nodes and the client, entries to the log.

A small output is sent in the worker's own callback. An output that is too large for a frame is
hashed on a thread and stored as an object of its own, while its bytes already go to its readers in
chunks; a frame tells them when the store has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from splitup.core import limits, tuning
from splitup.core.errors import SplitUpError
from splitup.core.tensors import holds_zeros
from splitup.crypto.keys import Identity
from splitup.messages.frames import Frame
from splitup.messages.storage import LogName
from splitup.net.links import Link, LinkPool
from splitup.net.signed_frames import make_entry_frame, seal_frame, seal_frames
from splitup.net.tensor_chunks import has_room, send_direct
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.task_queue import PortId, Run, Tensor
from splitup.storage.log_store import LogObject
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.kept.executions import Execution, Spawn
from splitup_node.execution.kept.routing import Outlet, Readers

_log = logging.getLogger("splitup.node.outputs")


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
        self._waiting: list[tuple[Readers, Frame]] = []  # the frames of this batch

    def publish(
        self,
        execution: Execution,
        run: Run,
        outputs: Sequence[bytes | memoryview],
        on_stored: Callable[[], None],
    ) -> list[Tensor]:
        """Queue a run's outputs for their readers on other nodes; ``flush`` sends them.

        Returns the outputs for the readers on this node. ``on_stored`` is called when a large one
        has been stored. If outputs that are gates are zero, the readers that they gate get nothing
        else. Raises Unavailable for large ones that have no room beside others, until the store has
        them.
        """
        part, now_ns = execution.parts[run.task], time.time_ns()
        if run.task in execution.routing.stale:
            execution.routing.connect(run.task)
        gates = execution.routing.gates[run.task]
        zeros = {port for port in gates if holds_zeros(outputs[port])} if gates else ()
        tensors = []
        for outlet, data in zip(part.outlets, outputs, strict=True):
            if len(data) > limits.INLINE_TENSOR_BYTES:
                release = self._table.queue.reserve(execution.id, run.step, len(data))
                execution.record.storing_bytes += len(data)
                ends = on_stored, release
                self._spawn(self._publish_stored(execution, outlet, run, data, zeros, ends))
                tensors.append(Tensor(b"", data, now_ns))  # readers on this node need no digest
                continue
            tensor = Tensor(hashlib.sha256(data).digest(), data, now_ns)
            tensors.append(tensor)
            entry = LogEntry(run.step, tensor.digest, len(data), data)
            execution.record.writer.append(*outlet.source, entry)
            if outlet.before is not None:
                before = outlet.before.add(run.step, tensor.digest)
                if before.done():
                    self.send_entry(execution, outlet, entry, zeros, before.result())
                else:  # a large tensor of an earlier step is still being hashed
                    send = partial(self.send_entry, execution, outlet, entry, zeros)
                    before.add_done_callback(send)
                continue
            readers, _ = outlet.route(run.step, zeros)
            if readers:
                frame = make_entry_frame(execution.id, outlet.source, entry)
                self._waiting.append((readers, frame))
        return tensors

    def flush(self) -> None:
        """Send a batch's outputs, with one signature for all frames to the same reader."""
        waiting, self._waiting = self._waiting, []
        groups: dict[Readers, list[Frame]] = {}
        for readers, frame in waiting:
            groups.setdefault(readers, []).append(frame)
        for readers, frames in groups.items():
            for sealed in seal_frames(self._identity, frames):
                self.send(readers, sealed)

    def send_entry(
        self,
        execution: Execution,
        outlet: Outlet,
        entry: LogEntry,
        zeros: Collection[int],
        before: bytes | asyncio.Future[bytes],
    ) -> None:
        """Send one step of an output to nodes, and to the client when it waits for it."""
        execution.routing.connect(outlet.source[0])
        readers, is_result = outlet.route(entry.step, zeros)
        if not readers and not is_result:
            return
        digest = before if isinstance(before, bytes) else before.result()
        frame = make_entry_frame(execution.id, outlet.source, entry, digest)
        sealed = seal_frame(self._identity, frame)
        self.send(readers, sealed)
        if is_result:
            self._clients.send(execution, sealed)

    def open_links(self, execution: Execution, readers: Readers) -> None:
        """Start to connect to nodes that read what this node's tasks produce."""
        for node, endpoint in readers:
            link = self._pool.open(node, endpoint)
            if not link.has_connected:
                loop = asyncio.get_running_loop()
                loop.call_later(tuning.UNREACHED_S, self._check_reached, execution, link)

    def _check_reached(self, execution: Execution, link: Link) -> None:
        """Fail this node's part when it cannot connect to a reader.

        The client then replaces this node. Otherwise it would replace the reader, which misses its
        inputs through no fault of its own.
        """
        routing = execution.routing
        for task in execution.parts:
            routing.connect(task)
        tasks = [port[0] for port, nodes in routing.routes.targets.items() if link.peer in nodes]
        if link.has_connected or not tasks or execution.life.ended_at_s:
            return
        step = self._table.queue.get_progress(execution.id).get(min(tasks), 0)
        reason = f"this node cannot connect to node {link.peer}"
        reason += f": {link.error}" if link.error else ""
        self._table.fail(execution.id, min(tasks), step, reason)

    def check_links(self, execution: Execution) -> None:
        """Connect anew to readers whose connections have fallen silent, and send again."""
        routing = execution.routing
        for node, endpoint in routing.find_readers(sorted(routing.successors)):
            with contextlib.suppress(SplitUpError):  # too many are open: sending says so
                self._spawn(self._pool.open(node, endpoint).check())

    def send(self, readers: Readers, sealed: bytes) -> bool:
        """Send a sealed frame to nodes; return whether all take it.

        The client replaces a node that is gone.
        """
        is_sent = True
        for node, endpoint in readers:
            try:
                self._pool.open(node, endpoint).send(sealed)
            except SplitUpError as error:
                _log.warning("a frame to node %s cannot be sent: %s", node, error)
                is_sent = False
        return is_sent

    def resend(self, execution: Execution, source: PortId, reader: Readers) -> None:
        """Send a new reader the entries of an output that are not in the store yet."""
        for entry in execution.record.writer.get_unstored(*source):
            frame = make_entry_frame(execution.id, source, entry)
            if not self.send(reader, seal_frame(self._identity, frame)):
                return

    async def _publish_stored(
        self,
        execution: Execution,
        outlet: Outlet,
        run: Run,
        data: bytes | memoryview,
        zeros: Collection[int],
        ends: tuple[Callable[[], None], Callable[[], None]],  # when it is stored, and in any case
    ) -> None:
        source, before = outlet.source, outlet.before
        on_stored, release = ends
        try:
            if not _is_current(execution, outlet):
                return  # another node runs the task by now
            links = self._find_direct_links(execution, outlet, run.step, zeros, len(data))
            find = None if before is None else before.add
            digest, earlier = await send_direct(
                self._identity, links, execution.id, source, run.step, data, find
            )
            name = LogName.of(*source, execution.node, run.step, apart=True)
            await execution.store.write([LogObject(name, data, digest, len(data))])
        except SplitUpError as error:
            reason = f"its output cannot be stored: {error}"
            self._table.fail(execution.id, run.task, run.step, reason)
            return
        finally:
            release()
            execution.record.storing_bytes -= len(data)
        if execution.life.failure or not _is_current(execution, outlet):
            return
        entry = LogEntry(run.step, digest, len(data), None)
        execution.record.writer.append(*source, entry)
        execution.record.writer.settle()
        self.send_entry(execution, outlet, entry, zeros, earlier)
        on_stored()

    def _find_direct_links(
        self,
        execution: Execution,
        outlet: Outlet,
        step: int,
        zeros: Collection[int],
        nbytes: int,
    ) -> list[Link]:
        """Return the links of readers to which a large tensor goes ahead of the store.

        No links while the store is too far behind: readers then wait for the store.
        """
        most = self._direct_bytes
        if execution.record.storing_bytes > most:
            return []
        execution.routing.connect(outlet.source[0])
        readers, is_result = outlet.route(step, zeros)
        links = []
        for node, endpoint in readers:
            with contextlib.suppress(SplitUpError):  # the client replaces a node that is gone
                links.append(self._pool.open(node, endpoint))
        if is_result and (link := self._clients.find_link(execution)) is not None:
            links.append(link)
        return [link for link in links if has_room(link, nbytes, most)]


def _is_current(execution: Execution, outlet: Outlet) -> bool:
    """Return whether this node still runs the task that an outlet was opened for."""
    part = execution.parts.get(outlet.source[0])
    return part is not None and part.outlets[outlet.source[1]] is outlet
