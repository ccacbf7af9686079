"""From a tensor's arrival to the next task's start: frames in, runs on the worker, frames out.

Everything on a token's path happens in plain calls from the socket's or the worker's own callback:
check, queue, run, sign once, send to every reader. Hashing for the commitment, logs and traces come
after the next run has been started; store, journal and chain never come before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault, SplitUpError, Unavailable
from splitup.core.tensors import holds_zeros
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.completions import SignedEnd, SignedTakeover
from splitup.messages.frames import Frame, FrameKind, Seal, decode_chunk, decode_frames
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Progress, TaskProgress
from splitup.net.links import Link, LinkAcceptor, LinkPool
from splitup.net.signed_frames import make_message_frame, seal_frame, verify_seal
from splitup.net.tensor_chunks import TensorChunks
from splitup.protocol.execution.ends import check_end
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.storage_keys import LogName
from splitup.protocol.execution.task_queue import EarlyFrames, PortId, Run, TaskQueue, Tensor
from splitup.storage.log_store import read_tensor
from splitup_node.execution.catch_up import Replay
from splitup_node.execution.chunk_transfers import check_chunk
from splitup_node.execution.client_links import ClientLinks
from splitup_node.execution.device_states import choose_idle, find_stale
from splitup_node.execution.executions import (
    Execution,
    OpenStore,
    Part,
    get_first_task,
    make_execution,
)
from splitup_node.execution.outputs import Outputs
from splitup_node.execution.runs import Runs
from splitup_node.fault_injection import crash_point
from splitup_node.worker.ipc import RunAnswer
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.engine")


class Listener(Protocol):
    """Who is told what became of an execution."""

    def on_begun(self, execution: Execution) -> None:
        """This node runs tasks of an execution from now on."""

    def on_ended(self, execution: Execution) -> None:
        """The client has said how many steps there were."""

    def on_finished(self, execution: Execution) -> None:
        """All steps have run and every log segment is stored."""

    def on_failed(self, execution: Execution) -> None:
        """This node has no more part in the execution; the client knows."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """A run that is over, and when it was computed."""

    execution: Execution
    run: Run
    outputs: Sequence[Tensor]
    started_ns: int
    ended_ns: int


class Engine:
    """Runs the executions of one node. Not thread-safe: it lives in one event loop."""

    def __init__(
        self,
        identity: Identity,
        supervisor: Workers,
        programs: Mapping[str, int],  # task_id -> program; changes as tasks are loaded
        open_store: OpenStore,
        listener: Listener,
        *,
        allow_loopback: bool,
        get_state_limit: Callable[[], int],  # bytes that states may take on the device
        now_s: Callable[[], float] = time.time,  # the chain's time, which deadlines are in
        direct_bytes: int = tuning.DIRECT_BYTES,  # of large tensors sent ahead of the store
    ) -> None:
        self._identity = identity
        self._supervisor = supervisor
        self._programs = programs
        self._open_store = open_store
        self._listener = listener
        self._get_state_limit = get_state_limit
        self._now_s = now_s
        self._queue = TaskQueue()
        self._early = EarlyFrames()
        self._chunks = TensorChunks()
        self._executions: OrderedDict[str, Execution] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._clients = ClientLinks(identity, self._executions)
        self._leaving = False
        self._next_session = 1
        self._ran: list[_Ran] = []  # of the batch that is being taken
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self.pool = LinkPool(identity, _refuse_frame, allow_loopback=allow_loopback)
        self.acceptor = LinkAcceptor(
            identity.address,
            self._on_frame,
            on_opened=self._clients.on_opened,
            on_closed=self._clients.on_closed,
        )
        self._outputs = Outputs(
            identity, self.pool, self._clients, self.fail, self._spawn, direct_bytes
        )
        self.runs = Runs(
            supervisor,
            self._queue,
            programs,
            self._executions,
            self._on_start,
            self._on_run,
            self._on_batch,
        )
        self._replay = Replay(self._queue, self.runs.pump, self.fail, self._spawn)

    # ---- assignments ---------------------------------------------------------------------------

    @property
    def executions(self) -> Mapping[str, Execution]:
        """Return the executions that are not forgotten yet, by id."""
        return self._executions

    def is_known(self, execution_id: str) -> bool:
        """Return whether this execution was assigned before, running or over."""
        return (
            execution_id in self._executions
            or execution_id in self._over
            or self._clients.is_refused(execution_id)
        )

    def list_used(self) -> set[str]:
        """Return the tasks that executions run here, or may yet ask this node to take over."""
        node, used = self._identity.address, set()
        for execution in self._executions.values():
            if not execution.is_over:
                pairs = zip(execution.manifest.tasks, execution.certificate.plan.tasks, strict=True)
                used |= {task.task_id for task, candidates in pairs if node in candidates}
        return used

    def refuse(self, certificate: PlanCertificate, reason: str) -> None:
        """Remember why this node does not run an execution; tell its client when it comes."""
        if self._clients.refuse(certificate, reason):
            self._early.take(certificate.plan.request.execution_id)

    def start(self, certificate: PlanCertificate, manifest: Manifest) -> Execution:
        """Take a checked plan: open connections, begin its tasks here, take early frames.

        Raises PeerFault when the plan does not fit the model, Unavailable when the node is full.
        """
        execution = make_execution(certificate, manifest, self._identity.address, self._open_store)
        mine = [task.index for task in execution.routes.tasks]
        for task in mine:
            self._check_loaded(execution, task)
        if mine:
            if self._leaving:
                raise Unavailable("the node is leaving and takes no new work")
            steps = certificate.plan.request.steps
            self._queue.assign(execution.id, execution.routes.tasks, steps)
        else:
            self._forget_standby()
        for task in mine:
            execution.add_part(task, self.new_session())
        execution.used_at_s = self._now_s()
        self._executions[execution.id] = execution
        if mine:
            self._listener.on_begun(execution)
        self._open_links(execution)
        for sender, frame, seal in self._early.take(execution.id):
            try:
                self._take(execution, frame, seal)
            except PeerFault as fault:
                _log.warning("early frame of %s from %s ignored: %s", execution.id, sender, fault)
        self.runs.pump()
        return execution

    def fail(self, execution_id: str, task: int, step: int, reason: str) -> None:
        """Give an execution up and tell its client why, who may find another node."""
        execution = self._executions.get(execution_id)
        if execution is None or execution.is_over:
            return
        execution.failure = reason[:500]
        execution.ended_at_s = self._now_s()
        _log.warning(
            "execution %s failed at task %d, step %d: %s", execution_id, task, step, reason
        )
        self._clients.tell_failure(execution, task, step)
        execution.writer.discard()
        self._release(execution)
        self._listener.on_failed(execution)

    def sweep(self, now_s: float) -> None:
        """Fail what is past its deadline or idle for long, and forget what is over."""
        for execution in list(self._executions.values()):
            if not execution.is_over and now_s > execution.deadline_s:
                if execution.parts:
                    self._fail_slowest(execution, "the deadline passed")
                else:
                    self._forget(execution)
            if execution.is_over and now_s > execution.ended_at_s + limits.EXECUTION_GRACE_S:
                self._forget(execution)
        for execution in find_stale(self._executions.values(), now_s):
            reason = f"its session was idle for {tuning.SESSION_IDLE_S:g} s and its state dropped"
            self._fail_slowest(execution, reason)

    def flush(self) -> None:
        """Begin to store log entries that are old enough."""
        for execution in self._executions.values():
            if execution.parts and not execution.is_over:
                execution.writer.flush(age_s=tuning.SEGMENT_AGE_S)

    def on_worker_lost(self, reason: str) -> None:
        """Fail the executions whose state was in the worker that is gone."""
        self.runs.on_worker_lost(reason)
        for execution in list(self._executions.values()):
            progress = self._queue.get_progress(execution.id)
            for task, step in progress.items():
                if step and execution.manifest.tasks[task].state_bytes:
                    self.fail(execution.id, task, step, f"its state was lost: {reason}")

    def resume(self) -> None:
        """Go on after a new worker has loaded the tasks; fail what needs one it could not load."""
        for execution in list(self._executions.values()):
            for task in list(execution.parts):
                if execution.manifest.tasks[task].task_id not in self._programs:
                    self.fail(execution.id, task, 0, "its task could not be loaded again")
        self.runs.resume()

    def new_session(self) -> int:
        """Return a session that no execution uses."""
        self._next_session += 1
        return self._next_session - 1

    async def leave(self) -> None:
        """Take no new work, let what runs end, and send away whose client takes longer."""
        self._leaving = True
        ends_s = time.monotonic() + tuning.LEAVE_S
        while running := [e for e in self._executions.values() if e.parts and not e.is_over]:
            if time.monotonic() > ends_s:
                for execution in running:
                    self._fail_slowest(execution, "the node is leaving")
                await asyncio.sleep(0)  # what was said goes out before the connections close
                return
            await asyncio.sleep(tuning.LEAVE_POLL_S)

    async def close(self) -> None:
        """Stop taking runs, let what is running or being stored end, and close every connection."""
        self.runs.pause()
        try:
            async with asyncio.timeout(tuning.WORKER_STOP_S):
                await self.runs.wait_idle()
                await asyncio.sleep(0)  # what the last run led to
                await asyncio.gather(*self._finishing)
        except TimeoutError:
            _log.warning("the running step, or the last log, did not end in time")
        await self.acceptor.close()
        await self.pool.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for execution in self._executions.values():
            await execution.recorder.close()
            await execution.writer.close()

    # ---- frames in -----------------------------------------------------------------------------

    def _on_frame(self, link: Link, data: bytes) -> None:
        if (chunk := decode_chunk(data)) is not None:
            execution = self._executions.get(chunk.execution_id)
            if execution is not None and execution.parts and not execution.is_over:
                if check_chunk(execution, link.peer, chunk):
                    self._chunks.add(chunk)
            return  # before its plan it is not worth its room
        seal, frames = decode_frames(data)
        for frame in frames:
            execution = self._executions.get(frame.execution_id)
            if execution is not None:
                self._take(execution, frame, seal)
            elif not self.is_known(frame.execution_id):
                try:
                    self._early.add(link.peer, frame, seal)
                except Unavailable as error:
                    raise PeerFault(str(error), peer=link.peer) from None
        self.runs.pump_soon()

    def _take(self, execution: Execution, frame: Frame, seal: Seal) -> None:
        if execution.is_over:
            return
        if frame.kind is FrameKind.TENSOR:
            self._take_tensor(execution, frame, seal)
            return
        if frame.task != CLIENT:
            raise PeerFault(f"a {frame.kind.name} frame of {execution.id} does not belong here")
        verify_seal(seal, execution.client_key)
        if frame.kind is FrameKind.END:
            self._end(execution, SignedEnd.parse(bytes(frame.payload)))
        elif frame.kind is FrameKind.TAKEOVER:
            signed = SignedTakeover.parse(bytes(frame.payload))
            self._take_over(execution, signed, frame.encode(seal.signature))
        elif frame.kind is FrameKind.PROBE:
            self._tell_progress(execution)
        else:
            raise PeerFault(f"a {frame.kind.name} frame of {execution.id} does not belong here")

    def _take_tensor(self, execution: Execution, frame: Frame, seal: Seal) -> None:
        port = (frame.task, frame.port)
        key = execution.executor_map.get_key(frame.task)
        if not execution.check_tensor(port, frame.length):
            return
        try:
            verify_seal(seal, key)
        except BadSignature:
            if execution.executor_map.is_replaced(frame.task, seal.signed, seal.signature):
                return  # the word of an executor that was replaced counts no more
            raise
        payload: bytes | memoryview | None = frame.payload
        if frame.stored or frame.direct:
            payload = self._chunks.take(execution.id, port, frame.step, frame.digest)
        if payload is not None:
            tensor = Tensor(frame.digest, payload, time.time_ns())
            self._offer(execution, port, frame.step, tensor)
        elif frame.stored and self._is_missing(execution, port, frame.step):
            self._spawn(self._fetch_stored(execution, frame))

    def _is_missing(self, execution: Execution, port: PortId, step: int) -> bool:
        readers = [task.index for task in execution.routes.tasks if port in task.inputs]
        return not all(self._queue.has(execution.id, port, step, reader) for reader in readers)

    def _offer(self, execution: Execution, port: PortId, step: int, tensor: Tensor) -> None:
        try:
            self._queue.offer(execution.id, port, step, tensor)
        except Unavailable as error:
            reader = next(t.index for t in execution.routes.tasks if port in t.inputs)
            self.fail(execution.id, reader, step, str(error))

    async def _fetch_stored(self, execution: Execution, frame: Frame) -> None:
        port = (frame.task, frame.port)
        name = LogName(*port, execution.executor_map.get_author(frame.task), 0)
        entry = LogEntry(frame.step, frame.digest, frame.length, None)
        try:
            data = await read_tensor(execution.store, name, entry)
            if execution.is_over:
                return
            self._offer(execution, port, frame.step, Tensor(frame.digest, data, time.time_ns()))
        except SplitUpError as error:
            for task in [t.index for t in execution.routes.tasks if port in t.inputs]:
                reason = f"its input cannot be fetched: {error}"
                self.fail(execution.id, task, frame.step, reason)
        self.runs.pump()

    def _end(self, execution: Execution, signed: SignedEnd) -> None:
        if not execution.parts:
            return  # replaced meanwhile
        check_end(signed, execution.certificate.plan, execution.manifest)
        self._queue.end(execution.id, signed.end.steps)
        if execution.end is None:
            execution.end = signed
            execution.forget_outputs()
            self._listener.on_ended(execution)
        asyncio.get_running_loop().call_soon(self._check_complete, execution)

    def _tell_progress(self, execution: Execution) -> None:
        progress = self._queue.get_progress(execution.id)
        tasks = tuple(
            TaskProgress(task=t, steps=steps, ready=self._queue.is_ready(execution.id, t))
            for t, steps in sorted(progress.items())
        )
        message = Progress(execution_id=execution.id, node=execution.node, tasks=tasks)
        task = get_first_task(execution)
        frame = make_message_frame(FrameKind.PROGRESS, execution.id, task, 0, message)
        self._clients.send(execution, seal_frame(self._identity, frame), keep=False)

    # ---- takeovers -----------------------------------------------------------------------------

    def _take_over(self, execution: Execution, signed: SignedTakeover, sealed: bytes) -> None:
        """Let another node, or this one, run a task from now on."""
        if execution.ended_at_s:
            return  # everything has run; only its log is still being stored
        task = signed.takeover.task
        before = execution.executor_map.get_author(task)
        if not execution.executor_map.apply(signed):
            return
        execution.takeovers[task] = sealed
        after = execution.executor_map.get_author(task)
        _log.info("task %d of %s goes from %s to %s", task, execution.id, before, after)
        self._queue.renew(execution.id, task)
        if task in execution.parts:
            self._give_up_part(execution, task)
        execution.reroute()
        if after == execution.node:
            self._begin_part(execution, task, signed.takeover.first_step)
            return
        for source in dict.fromkeys(get_sources(execution.manifest, task)):
            if source[0] in execution.parts:
                self._outputs.send(execution, (after,), sealed)  # it must know before the tensors
                self._outputs.resend(execution, source, after)

    def _give_up_part(self, execution: Execution, task: int) -> None:
        part = execution.parts.pop(task)
        self._queue.drop_task(execution.id, task)
        self._supervisor.drop([part.session])
        execution.writer.forget(task)
        if not execution.parts:
            self._listener.on_failed(execution)
        else:
            asyncio.get_running_loop().call_soon(self._check_complete, execution)

    def _begin_part(self, execution: Execution, task: int, first_step: int) -> None:
        """Run a task from its first step on, out of its inputs' logs."""
        had_parts = bool(execution.parts)
        try:
            self._check_loaded(execution, task)
            if self._leaving:
                raise Unavailable("the node is leaving and takes no new work")
            local = next(t for t in execution.routes.tasks if t.index == task)
            self._queue.assign(execution.id, [local], execution.certificate.plan.request.steps)
            if execution.steps is not None:
                self._queue.end(execution.id, execution.steps)
        except SplitUpError as error:
            self.fail(execution.id, task, first_step, str(error))
            return
        execution.add_part(task, self.new_session(), send_from=first_step)
        execution.used_at_s = self._now_s()
        if not had_parts:
            self._listener.on_begun(execution)
        self._open_links(execution)
        targets = execution.routes.targets
        readers = {node for port in targets if port[0] == task for node in targets[port]}
        for sealed in execution.takeovers.values():  # before any tensor that follows from them
            self._outputs.send(execution, sorted(readers), sealed)
        self._replay.start(execution, task)

    def _open_links(self, execution: Execution) -> None:
        for successor in execution.routes.successors.values():
            self.pool.open(successor.node, successor.endpoint)

    def _check_loaded(self, execution: Execution, task: int) -> None:
        if execution.manifest.tasks[task].task_id not in self._programs:
            raise Unavailable(f"task {task} of {execution.id} is not loaded on this node")

    # ---- runs ----------------------------------------------------------------------------------

    def _on_start(self, execution: Execution, run: Run) -> None:
        """Drop idle sessions for a state that is about to begin and does not fit."""
        part = execution.parts[run.task]
        execution.used_at_s = self._now_s()
        if run.step or part.state_bytes:
            return
        needed = execution.manifest.tasks[run.task].state_bytes
        limit = self._get_state_limit()
        while (
            idle := choose_idle(self._executions.values(), limit, execution, needed)
        ) is not None:
            reason = "its session was idle and its state had to make room for another's"
            self._fail_slowest(idle, reason)
        part.state_bytes = needed

    def _on_run(self, execution: Execution, run: Run, answer: RunAnswer | SplitUpError) -> None:
        if execution.is_over or run.task not in execution.parts:
            return  # its session was dropped right behind the run
        if isinstance(answer, SplitUpError):
            self.fail(run.execution_id, run.task, run.step, str(answer))
            return
        on_done = partial(self._check_complete, execution)
        gates = execution.routes.find_gates(run.task)
        zeros = {port for port in gates if holds_zeros(answer.outputs[port])}
        outputs = [
            self._outputs.publish(execution, run, port, data, zeros, on_done)
            for port, data in enumerate(answer.outputs)
        ]
        self._ran.append(_Ran(execution, run, outputs, answer.started_ns, answer.ended_ns))

    def _on_batch(self) -> None:
        self._outputs.flush()
        sent_ns = time.time_ns()
        crash_point("published")
        for ran in self._ran:
            try:
                self._queue.finish(ran.run, ran.outputs)
            except Unavailable as error:
                self.fail(ran.execution.id, ran.run.task, ran.run.step, str(error))
        if self._ran:
            asyncio.get_running_loop().call_soon(self._record, self._ran, sent_ns)
            self._ran = []

    # ---- after the path ------------------------------------------------------------------------

    def _record(self, batch: Sequence[_Ran], sent_ns: int) -> None:
        for ran in batch:
            execution, run = ran.execution, ran.run
            part = execution.parts.get(run.task)
            if execution.failure or part is None:
                continue
            received = max((tensor.arrived_ns for tensor in run.inputs), default=ran.started_ns)
            times = (received, ran.started_ns, ran.ended_ns, sent_ns)
            execution.add_span(run.task, run.step, times)
            execution.used_at_s = self._now_s()
            self._replay.on_run(execution, run.task)
            execution.recorder.add(
                part.digests, run.inputs, ran.outputs, partial(self._on_recorded, execution, part)
            )

    def _on_recorded(self, execution: Execution, part: Part) -> None:
        part.recorded += 1
        self._check_complete(execution)

    def _check_complete(self, execution: Execution) -> None:
        if execution.is_over or execution.ended_at_s or not execution.parts:
            return  # or being finished already
        if execution.publishing_bytes or not self._queue.is_complete(execution.id):
            return
        if any(part.recorded < (execution.steps or 0) for part in execution.parts.values()):
            return
        execution.ended_at_s = self._now_s()
        task = self._spawn(self._finish(execution))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, execution: Execution) -> None:
        try:
            await self._digest_states(execution)
        except SplitUpError as error:
            task, steps = get_first_task(execution), execution.steps or 0
            self.fail(execution.id, task, steps, f"its final state cannot be read: {error}")
            return
        for remaining, trace in execution.make_traces():
            task = get_first_task(execution)
            frame = make_message_frame(FrameKind.TRACE, execution.id, task, remaining, trace)
            self._clients.tell(execution, frame)
        try:
            await execution.writer.finish()
        except SplitUpError as error:
            task, step = get_first_task(execution), execution.steps or 0
            self.fail(execution.id, task, step, f"its log cannot be stored: {error}")
            return
        crash_point("logged")
        execution.finished = True
        self._release(execution)
        self._listener.on_finished(execution)

    async def _digest_states(self, execution: Execution) -> None:
        """Note what the states are at the end: they are committed to like the outputs."""
        for part in list(execution.parts.values()):
            if execution.manifest.tasks[part.task].state_bytes and execution.steps:
                part.digests.state = await self._supervisor.digest_state(part.session)

    def _fail_slowest(self, execution: Execution, reason: str) -> None:
        progress = self._queue.get_progress(execution.id) or {get_first_task(execution): 0}
        task = min(progress, key=lambda index: (progress[index], index))
        self.fail(execution.id, task, progress[task], reason)

    def _release(self, execution: Execution) -> None:
        self._queue.drop(execution.id)
        self._chunks.drop(execution.id)
        self._supervisor.drop(execution.sessions)

    def _forget_standby(self) -> None:
        """Make room for another plan that names this node as a fallback only."""
        standby = [e for e in self._executions.values() if not e.parts and not e.is_over]
        if len(standby) >= tuning.MAX_STANDBY:
            self._forget(standby[0])

    def _forget(self, execution: Execution) -> None:
        del self._executions[execution.id]
        self._chunks.drop(execution.id)
        self._over[execution.id] = None
        while len(self._over) > tuning.MAX_FINISHED:
            self._over.popitem(last=False)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _refuse_frame(link: Link, data: bytes) -> None:
    raise PeerFault(
        f"node {link.peer} sent a frame against the direction of its link", peer=link.peer
    )
