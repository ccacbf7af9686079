"""From a tensor's arrival to the next task's start: frames in, runs on the worker, frames out.

Everything on a token's path happens in plain calls from the socket's or the worker's own callback:
check, queue, run, sign once, send to every reader. Hashing for the commitment, logs and traces come
after the next run has been started; store, journal and chain never come before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from splitup import limits
from splitup.crypto.keys import Identity
from splitup.errors import PeerFault, SplitUpError, Unavailable
from splitup.graph.manifest import Manifest
from splitup.net.frames import (
    make_message_frame,
    make_stored_frame,
    make_tensor_frame,
    seal_frame,
    verify_frame,
)
from splitup.net.links import Link, LinkAcceptor, LinkPool
from splitup.protocol.keys import Segment, encode_record, iter_segments
from splitup.protocol.queue import EarlyFrames, PortId, Run, TaskQueue, Tensor
from splitup.wire import (
    CLIENT,
    Frame,
    FrameKind,
    Grant,
    Grants,
    PlanCertificate,
    TaskFailure,
    decode_frame,
)
from splitup_node.executions import Execution, get_first_task, make_execution
from splitup_node.ipc import RunAnswer, RunRequest
from splitup_node.logs import Uploader
from splitup_node.supervisor import WorkerLost
from splitup_node.workers import Workers

_log = logging.getLogger("splitup.node.engine")

GetObject = Callable[[Grant, int, str], Awaitable[bytes]]  # grant, length, SHA-256 in hex
AskGrants = Callable[[PlanCertificate], Coroutine[Any, Any, Grants]]


class Listener(Protocol):
    """Who is told what became of an execution."""

    def on_finished(self, execution: Execution) -> None:
        """All steps have run and every log segment is stored."""

    def on_failed(self, execution: Execution) -> None:
        """The execution cannot go on here; the client knows."""


class Engine:
    """Runs the executions of one node. Not thread-safe: it lives in one event loop."""

    def __init__(
        self,
        identity: Identity,
        supervisor: Workers,
        programs: Mapping[str, int],  # task_id -> program; changes as tasks are loaded
        uploader: Uploader,
        get_object: GetObject,
        ask_grants: AskGrants,
        listener: Listener,
        *,
        allow_loopback: bool,
    ) -> None:
        self._identity = identity
        self._supervisor = supervisor
        self._programs = programs
        self._uploader = uploader
        self._get_object = get_object
        self._ask_grants = ask_grants
        self._listener = listener
        self._queue = TaskQueue()
        self._early = EarlyFrames()
        self._executions: dict[str, Execution] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._refused: OrderedDict[str, tuple[str, bytes]] = OrderedDict()  # client key, ERROR
        self._clients: dict[str, list[Link]] = {}  # by the opener's key
        self._background: deque[tuple[RunRequest, asyncio.Future[RunAnswer]]] = deque()
        self._busy = False
        self._paused = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._next_session = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self.run_ns = 0  # moving average of one run
        self.pool = LinkPool(
            identity, _refuse_frame, on_closed=self._on_unreachable, allow_loopback=allow_loopback
        )
        self.acceptor = LinkAcceptor(
            identity.address, self._on_frame, on_opened=self._on_opened, on_closed=self._on_closed
        )

    # ---- assignments ---------------------------------------------------------------------------

    @property
    def executions(self) -> Mapping[str, Execution]:
        """Return the executions that are not forgotten yet, by id."""
        return self._executions

    @property
    def queue_ms(self) -> int:
        """Return the estimated work that waits, in milliseconds."""
        return (len(self._queue) + len(self._background)) * self.run_ns // 1_000_000

    def is_known(self, execution_id: str) -> bool:
        """Return whether this execution was assigned before, running or over."""
        return any(execution_id in known for known in (self._executions, self._over, self._refused))

    def refuse(self, certificate: PlanCertificate, reason: str) -> None:
        """Remember why this node does not run an execution; tell its client when it comes."""
        plan = certificate.plan
        mine = [t for t, node in enumerate(plan.executors()) if node == self._identity.address]
        if not mine:
            return
        execution_id = plan.request.execution_id
        failure = TaskFailure(
            task=mine[0], step=0, node=self._identity.address, reason=reason[:500]
        )
        frame = make_message_frame(FrameKind.ERROR, execution_id, mine[0], 0, failure)
        sealed = seal_frame(self._identity, frame)
        self._refused[execution_id] = (plan.request.client_key, sealed)
        while len(self._refused) > limits.MAX_FINISHED:
            self._refused.popitem(last=False)
        self._early.take(execution_id)
        for link in self._clients.get(plan.request.client_key, ()):
            link.send(sealed)

    def start(self, certificate: PlanCertificate, manifest: Manifest) -> Execution:
        """Begin a checked plan's execution: open connections, ask for grants, take early frames.

        Raises PeerFault when the plan does not fit the model, Unavailable when the node is full.
        """
        plan = certificate.plan
        execution_id = plan.request.execution_id
        for index, node in enumerate(plan.executors()):
            if node == self._identity.address and index < len(manifest.tasks):
                if manifest.tasks[index].task_id not in self._programs:
                    raise Unavailable(f"task {index} of {execution_id} is not loaded on this node")
        grants = asyncio.create_task(self._ask_grants(certificate))
        grants.add_done_callback(_retrieve)
        try:
            execution = make_execution(
                certificate, manifest, self._identity.address, self._next_session, grants
            )
            self._queue.assign(execution_id, execution.routes.tasks, plan.request.steps)
        except SplitUpError:
            grants.cancel()
            raise
        self._next_session += len(execution.sessions)
        self._executions[execution_id] = execution
        for successor in execution.routes.successors.values():
            self.pool.open(successor.node, successor.endpoint)
        for sender, data in self._early.take(execution_id):
            try:
                self._take(execution, *decode_frame(data))
            except PeerFault as fault:
                _log.warning("early frame of %s from %s ignored: %s", execution_id, sender, fault)
        self._pump()
        return execution

    def fail(self, execution_id: str, task: int, step: int, reason: str) -> None:
        """Give an execution up and tell its client why."""
        execution = self._executions.get(execution_id)
        if execution is None or execution.is_over:
            return
        execution.failure = reason[:500]
        execution.ended_at_s = time.time()
        _log.warning(
            "execution %s failed at task %d, step %d: %s", execution_id, task, step, reason
        )
        failure = TaskFailure(
            task=task, step=step, node=self._identity.address, reason=execution.failure
        )
        self._tell_client(
            execution,
            make_message_frame(
                FrameKind.ERROR, execution_id, get_first_task(execution), step, failure
            ),
        )
        self._release(execution)
        self._listener.on_failed(execution)

    def sweep(self, now_s: float) -> None:
        """Fail what is past its deadline and forget what is over."""
        for execution in list(self._executions.values()):
            if not execution.is_over and now_s > execution.deadline_s:
                progress = self._queue.get_progress(execution.id)
                task = min(progress, key=lambda index: (progress[index], index))
                self.fail(execution.id, task, progress[task], "the deadline passed")
            if execution.is_over and now_s > execution.ended_at_s + limits.EXECUTION_GRACE_S:
                self._forget(execution)

    def on_worker_lost(self, reason: str) -> None:
        """Fail the executions whose state was in the worker that is gone."""
        self._busy, self._paused = False, True
        self._idle.set()
        for execution in list(self._executions.values()):
            progress = self._queue.get_progress(execution.id)
            for task, step in progress.items():
                if step and execution.manifest.tasks[task].state_bytes:
                    self.fail(execution.id, task, step, f"its state was lost: {reason}")
        waiting, self._background = self._background, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(WorkerLost(reason))

    def resume(self) -> None:
        """Go on after a new worker has loaded the tasks; fail what needs one it could not load."""
        self._paused = False
        for execution in list(self._executions.values()):
            for task in execution.sessions:
                if execution.manifest.tasks[task].task_id not in self._programs:
                    self.fail(execution.id, task, 0, "its task could not be loaded again")
        self._pump()

    async def run_background(
        self, session: int, program: int, inputs: Sequence[bytes | memoryview]
    ) -> RunAnswer:
        """Run one step when no live run is ready. Raises TaskFailed or WorkerLost."""
        future: asyncio.Future[RunAnswer] = asyncio.get_running_loop().create_future()
        self._background.append((RunRequest(session, program, inputs), future))
        self._pump()
        return await future

    def new_session(self) -> int:
        """Return a session that no execution uses."""
        self._next_session += 1
        return self._next_session - 1

    async def close(self) -> None:
        """Stop taking runs, let what is running or being stored end, and close every connection."""
        self._paused = True
        try:
            async with asyncio.timeout(limits.WORKER_STOP_S):
                await self._idle.wait()
                await asyncio.sleep(0)  # what the last run led to
                await asyncio.gather(*self._finishing)
        except TimeoutError:
            _log.warning("the running step, or the last log, did not end in time")
        await self.acceptor.close()
        await self.pool.close()
        pending = [*self._tasks, *(e.grants for e in self._executions.values())]
        for execution in self._executions.values():
            pending += execution.uploads
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    # ---- frames in -----------------------------------------------------------------------------

    def _on_frame(self, link: Link, data: bytes) -> None:
        frame, signature = decode_frame(data)
        execution = self._executions.get(frame.execution_id)
        if execution is not None:
            self._take(execution, frame, signature)
            self._pump()
        elif not self.is_known(frame.execution_id):
            try:
                self._early.add(frame.execution_id, link.peer, data)
            except Unavailable as error:
                raise PeerFault(str(error), peer=link.peer) from None

    def _take(self, execution: Execution, frame: Frame, signature: bytes) -> None:
        if execution.is_over:
            return
        key = execution.find_key(frame.task)
        if frame.kind is FrameKind.TENSOR:
            port = (frame.task, frame.port)
            execution.check_tensor(port, frame.length)
            verify_frame(frame, signature, key)
            if frame.stored:
                self._spawn(self._fetch_stored(execution, frame))
            else:
                self._offer(
                    execution, port, frame.step, Tensor(frame.digest, frame.payload, _now())
                )
        elif frame.kind is FrameKind.END and frame.task == CLIENT:
            verify_frame(frame, signature, key)
            self._queue.end(execution.id, frame.step)
            execution.steps = frame.step
            asyncio.get_running_loop().call_soon(self._check_complete, execution)
        else:
            raise PeerFault(f"a {frame.kind.name} frame of {execution.id} does not belong here")

    def _offer(self, execution: Execution, port: PortId, step: int, tensor: Tensor) -> None:
        try:
            self._queue.offer(execution.id, port, step, tensor)
        except Unavailable as error:
            reader = next(t.index for t in execution.routes.tasks if port in t.inputs)
            self.fail(execution.id, reader, step, str(error))

    async def _fetch_stored(self, execution: Execution, frame: Frame) -> None:
        port = (frame.task, frame.port)
        try:
            segment = _find_segment(execution, port, frame.step, frame.length)
            grants = await asyncio.shield(execution.grants)
            grant = grants.find("GET", segment.key)
            data = await self._get_object(grant, frame.length, frame.digest.hex())
            if execution.is_over:
                return
            self._offer(execution, port, frame.step, Tensor(frame.digest, data, _now()))
        except SplitUpError as error:
            reader = next(t.index for t in execution.routes.tasks if port in t.inputs)
            self.fail(execution.id, reader, frame.step, f"its input cannot be fetched: {error}")
        self._pump()

    # ---- runs ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._busy or self._paused or not self._supervisor.is_running:
            return
        run = self._queue.next()
        if run is None:
            self._pump_background()
            return
        execution = self._executions[run.execution_id]
        program = self._programs[execution.manifest.tasks[run.task].task_id]
        self._busy = True
        self._idle.clear()
        request = RunRequest(execution.sessions[run.task], program, [t.data for t in run.inputs])
        self._supervisor.run(request, partial(self._on_run, execution, run))

    def _pump_background(self) -> None:
        while self._background:
            request, future = self._background.popleft()
            if future.done():
                continue
            self._busy = True
            self._idle.clear()
            self._supervisor.run(request, partial(self._on_background, future))
            return

    def _on_background(
        self, future: asyncio.Future[RunAnswer], answer: RunAnswer | SplitUpError
    ) -> None:
        self._busy = False
        self._idle.set()
        if not future.done():
            if isinstance(answer, SplitUpError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._pump()

    def _on_run(self, execution: Execution, run: Run, answer: RunAnswer | SplitUpError) -> None:
        self._busy = False
        self._idle.set()
        if isinstance(answer, SplitUpError):
            self.fail(run.execution_id, run.task, run.step, str(answer))
            self._pump()
            return
        if execution.is_over:
            self._supervisor.drop(list(execution.sessions.values()))
            self._pump()
            return
        outputs = [self._publish(execution, run, p, d) for p, d in enumerate(answer.outputs)]
        sent_ns = _now()
        self._queue.finish(run, outputs)
        self._pump()
        duration_ns = answer.ended_ns - answer.started_ns
        self.run_ns = (7 * self.run_ns + duration_ns) // 8 if self.run_ns else duration_ns
        times = (answer.started_ns, answer.ended_ns, sent_ns)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._record, execution, run, outputs, times)

    def _publish(
        self, execution: Execution, run: Run, port: int, data: bytes | memoryview
    ) -> Tensor:
        """Send one output to whoever reads it elsewhere; return it for readers here."""
        tensor = Tensor(hashlib.sha256(data).digest(), data, _now())
        source = (run.task, port)
        targets = execution.routes.targets[source]
        is_result = source in execution.routes.to_client
        if len(data) > limits.INLINE_TENSOR_BYTES:
            self._spawn(self._publish_stored(execution, run, port, tensor))
        elif targets or is_result:
            frame = make_tensor_frame(
                execution.id, run.task, port, run.step, bytes(data), tensor.digest
            )
            sealed = seal_frame(self._identity, frame)
            self._send_all(execution, run, targets, sealed)
            if is_result:
                self._send_client(execution, sealed)
        return tensor

    def _send_all(
        self, execution: Execution, run: Run, targets: Sequence[str], sealed: bytes
    ) -> None:
        for target in targets:
            node = execution.routes.successors[target]
            try:
                self.pool.open(node.node, node.endpoint).send(sealed)
            except SplitUpError as error:
                self.fail(execution.id, run.task, run.step, f"its output cannot be sent: {error}")

    async def _publish_stored(
        self, execution: Execution, run: Run, port: int, tensor: Tensor
    ) -> None:
        """PUT a tensor too large for a frame, then announce it."""
        source = (run.task, port)
        segment = _find_segment(execution, source, run.step, len(tensor.data))
        try:
            upload = self._upload(execution, segment, bytes(tensor.data))
            await asyncio.shield(upload)
        except SplitUpError as error:
            self.fail(execution.id, run.task, run.step, f"its output cannot be stored: {error}")
            return
        if execution.failure:
            return
        frame = make_stored_frame(
            execution.id, run.task, port, run.step, tensor.digest, len(tensor.data)
        )
        sealed = seal_frame(self._identity, frame)
        self._send_all(execution, run, execution.routes.targets[source], sealed)
        if source in execution.routes.to_client:
            self._send_client(execution, sealed)

    # ---- after the path ------------------------------------------------------------------------

    def _record(
        self,
        execution: Execution,
        run: Run,
        outputs: Sequence[Tensor],
        times: tuple[int, int, int],
    ) -> None:
        if execution.failure:
            return
        execution.record_run(run, outputs, times)
        for port, tensor in enumerate(outputs):
            if len(tensor.data) <= limits.INLINE_TENSOR_BYTES:  # a larger one is its own segment
                spec = execution.manifest.tasks[run.task].outputs[port].spec
                record = encode_record(tensor.data, spec)
                full = execution.logs[run.task, port].append(record)
                if full is not None:
                    self._upload(execution, *full)
        execution.recorded_runs += 1
        self._check_complete(execution)

    def _upload(self, execution: Execution, segment: Segment, data: bytes) -> asyncio.Task[None]:
        upload = self._uploader.upload(asyncio.shield(execution.grants), segment, data)
        task = asyncio.create_task(upload)
        execution.uploads.add(task)

        def on_done(done: asyncio.Task[None]) -> None:
            execution.uploads.discard(done)
            if not done.cancelled() and done.exception() is not None:
                execution.upload_error = execution.upload_error or done.exception()  # type: ignore[assignment]

        task.add_done_callback(on_done)
        return task

    def _check_complete(self, execution: Execution) -> None:
        if execution.is_over or execution.ended_at_s:
            return  # or being finished already
        if not self._queue.is_complete(execution.id):
            return
        if execution.recorded_runs < (execution.steps or 0) * len(execution.sessions):
            return
        execution.ended_at_s = time.time()
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
        for remaining, trace in execution.make_traces(self._identity.address):
            task = get_first_task(execution)
            frame = make_message_frame(FrameKind.TRACE, execution.id, task, remaining, trace)
            self._tell_client(execution, frame)
        for log in execution.logs.values():
            rest = log.finish()
            if rest is not None:
                self._upload(execution, *rest)
        await asyncio.gather(*execution.uploads, return_exceptions=True)
        if execution.upload_error is not None:
            self.fail(
                execution.id,
                get_first_task(execution),
                execution.steps or 0,
                f"its log cannot be stored: {execution.upload_error}",
            )
            return
        execution.finished = True
        self._release(execution)
        self._listener.on_finished(execution)

    async def _digest_states(self, execution: Execution) -> None:
        """Note what the states are at the end: they are committed to like the outputs."""
        for task, session in execution.sessions.items():
            if execution.manifest.tasks[task].state_bytes and execution.steps:
                execution.states[task] = await self._supervisor.digest_state(session)

    def _release(self, execution: Execution) -> None:
        self._queue.drop(execution.id)
        self._supervisor.drop(list(execution.sessions.values()))

    def _forget(self, execution: Execution) -> None:
        execution.grants.cancel()
        del self._executions[execution.id]
        self._over[execution.id] = None
        while len(self._over) > limits.MAX_FINISHED:
            self._over.popitem(last=False)

    # ---- clients -------------------------------------------------------------------------------

    def _tell_client(self, execution: Execution, frame: Frame) -> None:
        self._send_client(execution, seal_frame(self._identity, frame))

    def _send_client(self, execution: Execution, sealed: bytes) -> None:
        execution.keep_for_client(sealed)
        for link in reversed(self._clients.get(execution.client_key, ())):
            if link.execution_id in ("", execution.id):
                try:
                    link.send(sealed)
                except Unavailable as error:
                    _log.warning("client of %s: %s", execution.id, error)
                    continue
                return

    def _on_opened(self, link: Link) -> None:
        self._clients.setdefault(link.peer, []).append(link)
        for execution in self._executions.values():
            if execution.client_key == link.peer and link.execution_id in ("", execution.id):
                for sealed in execution.outbox:
                    link.send(sealed)
        for client_key, sealed in self._refused.values():
            if client_key == link.peer:
                link.send(sealed)

    def _on_closed(self, link: Link) -> None:
        links = self._clients.get(link.peer, [])
        if link in links:
            links.remove(link)
        if not links:
            self._clients.pop(link.peer, None)

    def _on_unreachable(self, link: Link) -> None:
        """Fail what needs a node that is gone for good."""
        for execution in list(self._executions.values()):
            for (task, port), targets in execution.routes.targets.items():
                if link.peer in targets and not execution.ended_at_s:
                    step = self._queue.get_progress(execution.id).get(task, 0)
                    reason = f"output {port} cannot be sent: {link.error or 'connection closed'}"
                    self.fail(execution.id, task, step, reason)
                    break

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _find_segment(execution: Execution, port: PortId, step: int, tensor_bytes: int) -> Segment:
    """Return the one-step segment of a tensor too large for a frame."""
    steps = execution.certificate.plan.request.steps
    for segment in iter_segments(execution.id, port[0], port[1], tensor_bytes, steps):
        if segment.first_step == step and segment.steps == 1:
            return segment
    raise PeerFault(f"port {port[1]} of task {port[0]} of {execution.id} is not stored by step")


def _refuse_frame(link: Link, data: bytes) -> None:
    raise PeerFault(
        f"node {link.peer} sent a frame against the direction of its link", peer=link.peer
    )


def _retrieve(task: asyncio.Task[Grants]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.warning("no grants: %s", task.exception())


def _now() -> int:
    return time.time_ns()
