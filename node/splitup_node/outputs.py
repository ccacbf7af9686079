"""From a finished run to its readers: frames to other nodes and the client, entries to the log.

A tensor too large for a frame is hashed on a thread and stored by itself, while its bytes go to the
nodes that read it; they are told again when the store has it. Small ones leave in the worker's own
callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from splitup import limits
from splitup.crypto.keys import Identity
from splitup.errors import SplitUpError
from splitup.frames import Frame
from splitup.net.frames import make_entry_frame, make_stored_frame, seal_frame, seal_frames
from splitup.net.links import LinkPool
from splitup.net.logs import LogObject
from splitup.net.objects import compute_sha256
from splitup.protocol.keys import LogName
from splitup.protocol.logs import LogEntry
from splitup.protocol.queue import PortId, Run, Tensor
from splitup_node.clients import Clients
from splitup_node.executions import Execution
from splitup_node.pieces import find_direct_links, send_pieces

_log = logging.getLogger("splitup.node.outputs")

Fail = Callable[[str, int, int, str], None]  # execution, task, step, reason
_Readers = tuple[tuple[str, str], ...]  # nodes and their endpoints
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Outputs:
    """Sends what this node's tasks produce."""

    def __init__(
        self,
        identity: Identity,
        pool: LinkPool,
        clients: Clients,
        fail: Fail,
        spawn: Spawn,
        direct_bytes: int,
    ) -> None:
        """``direct_bytes`` of large tensors may wait for a reader, or be ahead of the store."""
        self._identity = identity
        self._pool = pool
        self._clients = clients
        self._fail = fail
        self._spawn = spawn
        self._direct_bytes = direct_bytes
        self._waiting: list[tuple[_Readers, Frame]] = []  # what a batch gave so far

    def publish(
        self,
        execution: Execution,
        run: Run,
        port: int,
        data: bytes | memoryview,
        zeros: Collection[int],
        on_done: Callable[[], None],
    ) -> Tensor:
        """Let one output go to whoever reads it elsewhere (``flush``); return it for readers here.

        ``zeros`` are the run's outputs that are zero: what they shut is sent nothing else.
        ``on_done`` is called when a large one is on its way, or has failed.
        """
        if len(data) > limits.INLINE_TENSOR_BYTES:
            execution.publishing_bytes += len(data)
            self._spawn(self._publish_stored(execution, run, port, data, zeros, on_done))
            return Tensor(b"", data, time.time_ns())  # nobody here compares what we made
        tensor = Tensor(hashlib.sha256(data).digest(), data, time.time_ns())
        source = (run.task, port)
        entry = LogEntry(run.step, tensor.digest, len(data), data)
        targets = execution.get_targets(source, run.step, zeros)
        if execution.is_result(source, run.step):
            self.send_entry(execution, source, entry, targets)
        elif targets:
            frame = make_entry_frame(execution.id, source, entry)
            self._waiting.append((_find_readers(execution, targets), frame))
        execution.writer.append(run.task, port, entry)
        return tensor

    def flush(self) -> None:
        """Send what a batch gave, with one signature for all that goes to the same nodes."""
        waiting, self._waiting = self._waiting, []
        groups: dict[_Readers, list[Frame]] = {}
        for readers, frame in waiting:
            groups.setdefault(readers, []).append(frame)
        for readers, frames in groups.items():
            for sealed in seal_frames(self._identity, frames):
                self._send(readers, sealed)

    def send_entry(
        self, execution: Execution, source: PortId, entry: LogEntry, targets: Iterable[str]
    ) -> None:
        """Send one step of an output to nodes, and to the client when it waits for it."""
        targets = tuple(targets)
        is_result = execution.is_result(source, entry.step)
        if not targets and not is_result:
            return
        sealed = seal_frame(self._identity, make_entry_frame(execution.id, source, entry))
        self.send(execution, targets, sealed)
        if is_result:
            self._clients.send(execution, sealed)

    def send(self, execution: Execution, targets: Iterable[str], sealed: bytes) -> None:
        """Send a sealed frame to nodes of the plan. One that is gone is the client's business."""
        self._send(_find_readers(execution, targets), sealed)

    def _send(self, readers: _Readers, sealed: bytes) -> None:
        for node, endpoint in readers:
            try:
                self._pool.open(node, endpoint).send(sealed)
            except SplitUpError as error:
                _log.warning("a frame to %s is lost: %s", node, error)

    def resend(self, execution: Execution, source: PortId, target: str) -> None:
        """Send a node what it may not find in the store: it takes a reader's place."""
        node = execution.certificate.plan.node_of(target)
        for entry in execution.writer.get_unstored(*source):
            sealed = seal_frame(self._identity, make_entry_frame(execution.id, source, entry))
            try:
                self._pool.open(node.node, node.endpoint).send(sealed)
            except SplitUpError as error:
                _log.warning("the rest of %s to %s is lost: %s", execution.id, target, error)
                return

    async def _publish_stored(
        self,
        execution: Execution,
        run: Run,
        port: int,
        data: bytes | memoryview,
        zeros: Collection[int],
        on_done: Callable[[], None],
    ) -> None:
        source = (run.task, port)
        try:
            if run.task not in execution.parts:
                return  # another node's meanwhile
            targets = execution.get_targets(source, run.step, zeros)
            digest = await self._send_direct(execution, source, run.step, data, targets)
            name = LogName(run.task, port, execution.node, run.step, apart=True)
            await execution.store.write([LogObject(name, data, digest, len(data))])
        except SplitUpError as error:
            reason = f"its output cannot be stored: {error}"
            self._fail(execution.id, run.task, run.step, reason)
            return
        finally:
            execution.publishing_bytes -= len(data)
        if execution.failure or run.task not in execution.parts:
            return
        entry = LogEntry(run.step, digest, len(data), None)
        execution.writer.append(run.task, port, entry)
        self.send_entry(execution, source, entry, execution.get_targets(source, run.step, zeros))
        on_done()

    async def _send_direct(
        self,
        execution: Execution,
        source: PortId,
        step: int,
        data: bytes | memoryview,
        targets: Iterable[str],
    ) -> bytes:
        """Send a large tensor to the readers that can take it; return its digest."""
        most = self._direct_bytes
        links = find_direct_links(self._pool, execution, targets, len(data), most)
        digest, _ = await asyncio.gather(
            compute_sha256(data), send_pieces(links, execution.id, source, step, data)
        )
        if links:
            frame = make_stored_frame(execution.id, *source, step, digest, len(data), direct=True)
            sealed = seal_frame(self._identity, frame)
            for link in links:
                link.send_bulk(sealed)  # behind the pieces
            with contextlib.suppress(TimeoutError):  # of a slow reader the store need not wait
                async with asyncio.timeout(limits.DIRECT_HEAD_START_S):
                    for link in links:
                        await link.drain_bulk()
        return digest


def _find_readers(execution: Execution, targets: Iterable[str]) -> _Readers:
    entries = [execution.find_node(target) for target in targets]
    return tuple((entry.node, entry.endpoint) for entry in entries)
