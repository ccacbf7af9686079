"""Frames in: which messages of peers this node takes, and what each of them leads to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from splitup.core import tuning
from splitup.core.errors import BadSignature, PeerFault, SplitUpError, Unavailable
from splitup.crypto.keys import Identity
from splitup.messages.base import CLIENT
from splitup.messages.completions import SignedEnd, SignedTakeover
from splitup.messages.frames import (
    CHUNK_MAGIC,
    Frame,
    FrameKind,
    Seal,
    TensorChunk,
    decode_chunk,
    decode_frames,
)
from splitup.messages.progress import Progress, TaskProgress
from splitup.messages.storage import LogName
from splitup.net.links import Link
from splitup.net.object_transfer import NotStored
from splitup.net.signed_frames import make_message_frame, seal_frame, verify_seal
from splitup.protocol.execution.ends import check_end, check_interim
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.task_queue import EarlyFrames, PortId, Tensor
from splitup.storage.log_store import read_tensor
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.finishing import Finisher
from splitup_node.execution.handovers import Handovers
from splitup_node.execution.kept.executions import Execution, Schedule, Spawn, get_first_task

_log = logging.getLogger("splitup.node.inbox")


class Inbox:
    """Checks what peers send, puts tensors into the queue and acts on the messages of clients."""

    def __init__(
        self,
        identity: Identity,
        table: ExecutionTable,
        handovers: Handovers,
        finisher: Finisher,
        spawn: Spawn,
        schedule: Schedule,
        check_links: Callable[[Execution], None],
    ) -> None:
        self._identity = identity
        self._table = table
        self._queue = table.queue
        self._handovers = handovers
        self._finisher = finisher
        self._spawn = spawn
        self._schedule = schedule
        self._check_links = check_links
        self._early = EarlyFrames()
        self._fetching: set[tuple[str, LogName]] = set()  # by execution: not to be fetched twice

    def take(self, link: Link, data: bytes) -> None:
        """Take one message from a link. Raises PeerFault, BadSignature."""
        if data.startswith(CHUNK_MAGIC):
            self._take_chunk(link, decode_chunk(data))
            return
        seal, frames = decode_frames(data)
        for frame in frames:
            execution = self._table.by_id.get(frame.execution_id)
            if execution is None:
                self._take_unknown(link, frame, seal)
            else:
                self._take_frame(execution, frame, seal)

    def _take_unknown(self, link: Link, frame: Frame, seal: Seal) -> None:
        """Keep a frame that comes before its plan, and drop one that comes after the end."""
        if self._table.is_known(frame.execution_id):
            return
        if frame.kind is not FrameKind.PROBE:
            self._early.add(link.peer, frame, seal, time.monotonic())
        elif (plan := self._table.parties.expected.get(frame.execution_id)) is not None:
            verify_seal(seal, plan.plan.request.client_key)
            self._table.clients.tell_loading(plan)

    def take_early(self, execution: Execution) -> None:
        """Take the frames that came before the plan of an execution."""
        for sender, frame, seal in self._early.take(execution.id):
            try:
                self._take_frame(execution, frame, seal)
            except PeerFault as fault:
                _log.warning("early frame of %s from %s ignored: %s", execution.id, sender, fault)

    def expire_early(self) -> None:
        """Drop frames that have waited too long for their plan."""
        self._early.expire(time.monotonic(), self._table.parties.expected)

    def forget_early(self, execution_id: str) -> None:
        """Drop the frames of an execution that this node does not run."""
        self._early.take(execution_id)

    def _take_chunk(self, link: Link, chunk: TensorChunk) -> None:
        """Keep a chunk of a large tensor; one that comes before its plan is not kept."""
        execution = self._table.by_id.get(chunk.execution_id)
        if execution is not None and execution.parts and not execution.life.is_over:
            if check_chunk(execution, link.peer, chunk):
                self._table.chunks.add(chunk)

    def _take_message(self, execution: Execution, frame: Frame, seal: Seal) -> None:
        if frame.task != CLIENT:
            raise PeerFault(f"a {frame.kind.name} frame of {execution.id} does not belong here")
        verify_seal(seal, execution.client_key)
        if frame.kind is FrameKind.END:
            self._end(execution, SignedEnd.parse(bytes(frame.payload)))
        elif frame.kind is FrameKind.TAKEOVER:
            signed = SignedTakeover.parse(bytes(frame.payload))
            self._handovers.take_over(execution, signed, frame.encode(seal.signature))
        elif frame.kind is FrameKind.PROBE:
            self._answer_probe(execution)
        else:
            raise PeerFault(f"a {frame.kind.name} frame of {execution.id} does not belong here")

    # ---- tensors -------------------------------------------------------------------------------

    def _take_frame(self, execution: Execution, frame: Frame, seal: Seal) -> None:
        if execution.life.is_over:
            return
        if frame.kind is not FrameKind.TENSOR:
            self._take_message(execution, frame, seal)
            return
        port, routing = (frame.task, frame.port), execution.routing
        inlet = routing.inlets.get(port) or routing.find_inlet(port)
        if inlet is None:
            return
        if frame.length not in inlet.sizes:
            routing.check_size(port, frame.length)
        try:
            verify_seal(seal, inlet.key)
        except BadSignature:
            if execution.executor_map.is_replaced(frame.task, seal.signed, seal.signature):
                return  # frames of an executor that was replaced are ignored
            raise
        if frame.task == CLIENT:
            execution.claims.add_order(frame.step, seal)
        payload: bytes | memoryview | None = frame.payload
        if frame.stored or frame.direct:
            payload = self._table.chunks.take(execution.id, port, frame.step, frame.digest)
        try:
            if payload is not None:
                tensor = Tensor(frame.digest, payload, time.time_ns())
                self._queue.offer(execution.id, port, frame.step, tensor)
            elif frame.stored and self._is_missing(execution, port, frame.step):
                self._begin_fetch(execution, frame)
        except Unavailable as error:
            reader = next(t.index for t in routing.routes.tasks if port in t.inputs)
            self._table.fail(execution.id, reader, frame.step, str(error))

    def _is_missing(self, execution: Execution, port: PortId, step: int) -> bool:
        readers = [task.index for task in execution.routing.routes.tasks if port in task.inputs]
        return not all(self._queue.has(execution.id, port, step, reader) for reader in readers)

    def _begin_fetch(self, execution: Execution, frame: Frame) -> None:
        """Fetch a large tensor from the object store, however often its frame comes, once."""
        author = execution.executor_map.get_author(frame.task)
        name = LogName.of(frame.task, frame.port, author, frame.step)
        if (execution.id, name) in self._fetching:
            return
        release = self._queue.reserve(execution.id, frame.step, frame.length)
        self._fetching.add((execution.id, name))

        def on_done(_: asyncio.Task[None]) -> None:
            self._fetching.discard((execution.id, name))

        self._spawn(self._fetch_stored(execution, frame, name, release)).add_done_callback(on_done)

    async def _fetch_stored(
        self, execution: Execution, frame: Frame, name: LogName, release: Callable[[], None]
    ) -> None:
        port, author = (frame.task, frame.port), name.node
        entry = LogEntry(frame.step, frame.digest, frame.length, None)
        try:
            try:
                data = await read_tensor(execution.store, name, entry)
            finally:
                release()
            if execution.life.is_over:
                return
            tensor = Tensor(frame.digest, data, time.time_ns())
            self._queue.offer(execution.id, port, frame.step, tensor)
        except (NotStored, PeerFault) as fault:  # the producer's; its input stays missing here
            _log.warning("an input of %s cannot be fetched: %s", execution.id, fault)
        except SplitUpError as error:

            def find_reader() -> tuple[int, int] | None:
                """Return the task that lacks the tensor; None after a takeover on either side."""
                is_replaced = execution.executor_map.get_author(frame.task) != author
                tasks = () if is_replaced else execution.routing.routes.tasks
                return next(((t.index, frame.step) for t in tasks if port in t.inputs), None)

            await self._table.fail_unless_replaced(
                execution, find_reader, "its input cannot be fetched", error
            )
        self._schedule()

    # ---- messages of clients -------------------------------------------------------------------

    def _end(self, execution: Execution, signed: SignedEnd) -> None:
        """Learn how many steps there are, or that so many were delivered."""
        if not execution.parts or execution.life.ended_at_s:
            return  # this node was replaced, or the end comes too late
        if not signed.end.final:
            self._extend(execution, signed)
            return
        check_end(signed, execution.certificate.plan, execution.manifest)
        self._queue.end(execution.id, signed.end.steps)
        if execution.claims.end is None:
            execution.claims.conclude(signed)
            execution.outbox.clear()
            self._table.listener.on_ended(execution)
        asyncio.get_running_loop().call_soon(self._finisher.check_complete, execution)

    def _extend(self, execution: Execution, signed: SignedEnd) -> None:
        """Learn that steps were delivered: their work is owed, and more may be computed."""
        claims = execution.claims
        if signed.end.steps <= claims.delivered:
            return  # the client sends its latest ones again to who may lack them
        plan = execution.certificate.plan
        check_interim(signed, plan, execution.manifest, claims.delivered)
        claims.add_interim(signed)
        self._queue.extend(execution.id, claims.delivered)

    def _answer_probe(self, execution: Execution) -> None:
        """Tell the client how far the tasks are; probes that come soon after get one answer.

        With a thousand tasks an answer takes tens of milliseconds, and a probe has 200 bytes.
        """
        loop, pause = asyncio.get_running_loop(), execution.answer_pause
        if pause.is_asked:
            return
        if (wait_s := pause.until - loop.time()) > 0:
            pause.is_asked = True
            loop.call_later(wait_s, self._tell_progress, execution)
        else:
            self._tell_progress(execution)

    def _tell_progress(self, execution: Execution) -> None:
        if execution.life.is_over:
            return
        loop, pause = asyncio.get_running_loop(), execution.answer_pause
        began = loop.time()
        pause.is_asked = False
        self._check_links(execution)
        progress = self._queue.get_progress(execution.id)
        tasks = tuple(
            TaskProgress(task=t, steps=steps, ready=self._queue.is_ready(execution.id, t))
            for t, steps in sorted(progress.items())
        )
        message = Progress(execution_id=execution.id, node=execution.node, tasks=tasks)
        task = get_first_task(execution)
        frame = make_message_frame(FrameKind.PROGRESS, execution.id, task, 0, message)
        self._table.clients.send(execution, seal_frame(self._identity, frame), keep=False)
        pause.until = loop.time() + tuning.PROBE_PAUSES * (loop.time() - began)


def check_chunk(execution: Execution, sender: str, chunk: TensorChunk) -> bool:
    """Return whether to keep a chunk from the peer with the Ed25519 key ``sender``.

    Raises PeerFault when nobody may send it here.
    """
    inlet = execution.routing.find_inlet((chunk.task, chunk.port))
    if inlet is None:
        return False
    execution.routing.check_size((chunk.task, chunk.port), chunk.length)
    if sender != inlet.key:
        if execution.executor_map.takeovers:
            return False  # the executor was replaced
        raise PeerFault(f"{sender} sends chunks of task {chunk.task} of {execution.id}")
    if chunk.step >= execution.certificate.plan.request.steps:
        raise PeerFault(f"a chunk of step {chunk.step} of {execution.id}, which was not paid for")
    return True
