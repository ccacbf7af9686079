"""One execution, from its certificate to its last output: sends inputs, verifies outputs.

Any number of steps may be in flight. A node that fails is replaced by the plan's next candidate for
its tasks, and the steps go on (``splitup.protocol.execution.failover``). A session ends by
``finish`` after the last step, or by a ``Failure``, which every waiting step and later call raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from splitup.client.execution.input_sender import InputSender
from splitup.client.execution.output_collector import (
    Fact,
    FetchNeeded,
    OutputCollector,
    StepDone,
    TraceReceived,
)
from splitup.client.outcome import Array
from splitup.client.telemetry import send_trace
from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.errors import ExecutionFailed, InvalidInput, SplitUpError
from splitup.core.tensors import bytes_to_array, check_inputs
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.base import CLIENT, Message
from splitup.messages.completions import End, Takeover
from splitup.messages.frames import CHUNK_MAGIC, FrameKind, decode_chunk, decode_frames
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Progress, TaskFailure, Trace
from splitup.messages.storage import LogName
from splitup.net.http import SignedClient
from splitup.net.links import Link, LinkPool
from splitup.net.signed_frames import make_message_frame, seal_frame, verify_seal
from splitup.net.tensor_chunks import TensorChunks
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.execution.failover import Command, Failover, GiveUp, Probe, Replace
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.log_store import has_large_tensors, open_logs, read_tensor

_log = logging.getLogger("splitup.client.execution.session")

TRACE_TIMEOUT_S: Final = 2.0  # a node sends its times right after the end, or not at all


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an execution cannot complete: the task and node it failed at ("" when unknown)."""

    reason: str
    task: int | None = None
    node: str = ""


class Session:
    """A running execution. Made by ``SplitUp.session``; not shared between event loops.

    ``certificate`` has been checked. ``deadline`` is on the event loop's clock; outputs missing
    then make the execution fail.
    """

    def __init__(
        self,
        certificate: PlanCertificate,
        manifest: Manifest,
        identity: Identity,
        http: SignedClient,
        gateway: GatewayClient,
        *,
        deadline: float,
        allow_loopback: bool,
        direct_bytes: int = tuning.DIRECT_BYTES,  # of large inputs sent ahead of the store
    ) -> None:
        self.certificate = certificate
        self.plan = certificate.plan
        self.manifest = manifest
        self.execution_id = self.plan.request.execution_id
        self.failure: Failure | None = None
        self._identity = identity
        self._node_http = SignedClient(allow_loopback=allow_loopback)
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._executor_map = ExecutorMap(self.plan)
        self._chunks = TensorChunks()
        self._collector = OutputCollector(
            manifest, self.plan, verify_seal, self._executor_map, self._chunks.take
        )
        self._failover = Failover(self.plan, manifest, self._loop.time(), deadline)
        self._specs = tuple(port.spec for port in manifest.inputs)
        self._output_specs = tuple(port.spec for port in manifest.outputs)
        self._store = open_logs(
            gateway,
            lambda: http.session,
            certificate,
            self._executor_map,
            has_large_tensors=has_large_tensors(manifest),
        )
        self._pool = LinkPool(
            identity,
            self._on_frame,
            on_closed=self._on_closed,
            on_up=self._on_up,
            on_down=self._on_down,
            on_refused=self._on_refused,
            allow_loopback=allow_loopback,
        )
        self._links: dict[str, Link] = {}
        self._inputs = InputSender(
            identity,
            self.plan.request,
            manifest,
            self._store,
            self._links,
            self.executors,
            direct_bytes=direct_bytes,
            start=self._start,
            on_failure=lambda reason: self._fail(Failure(reason)),
            on_stored=self._watch,
        )
        self._futures: dict[int, asyncio.Future[dict[str, Array]]] = {}
        self._takeovers: list[bytes] = []  # sealed frames, in order
        self._interim: deque[bytes] = deque(maxlen=limits.INTERIM_ENDS)  # the latest ends, sealed
        self._acknowledged = 0  # steps in them
        self._announced: set[tuple[str, str]] = set()  # (old, new) nodes of logged takeovers
        self._has_waited = False  # for nodes that load their tasks
        self.loading: set[str] = set()  # nodes that still load theirs, as far as they were asked
        self._traces: list[Trace] = []
        self._spans: dict[str, int] = {}  # of each node's traces
        self._told: set[str] = set()  # nodes whose spans have all arrived
        self._all_told = asyncio.Event()
        self._background = BackgroundTasks()
        self._deadline = deadline
        self._timer = self._loop.call_at(deadline, self._on_deadline)
        self._failover_timer: asyncio.TimerHandle | None = None
        self._failover_at = 0.0  # when it wakes
        self._steps = 0
        self._ended = False
        self._is_open = False

    @property
    def executors(self) -> tuple[str, ...]:
        """The nodes that run the tasks now, by task index."""
        return self._executor_map.executors

    @property
    def takeovers(self) -> int:
        """How many tasks were given to another node so far."""
        return len(self._takeovers)

    @property
    def steps(self) -> int:
        """How many steps were submitted so far."""
        return self._steps

    def open(self) -> None:
        """Connect to every executor; from here on nodes that fail are replaced."""
        for node in sorted(set(self.executors)):
            self._open_link(node)
        self._is_open = True
        self._inputs.open()
        self._schedule()

    def _open_link(self, node: str) -> None:
        entry = self.plan.node_of(node)
        self._links[node] = self._pool.open(entry.node, entry.endpoint, self.execution_id)
        self._start(self._announce(node, entry.endpoint))

    def submit(self, inputs: Mapping[str, Array]) -> asyncio.Future[dict[str, Array]]:
        """Send one step; the future gives its outputs by name. Steps run in the order submitted.

        Raises InvalidInput for inputs that do not fit or one step too many, ExecutionFailed when
        the execution has failed already.
        """
        self._check_open(self._steps)
        tensors = check_inputs(self._specs, inputs)
        step = self._steps
        self._steps += 1
        future: asyncio.Future[dict[str, Array]] = self._loop.create_future()
        future.add_done_callback(_consume)  # its error is raised by the session, too
        self._futures[step] = future
        self._inputs.submit(step, tensors)
        self._watch()
        return future

    async def step(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one step and return its outputs by name."""
        return await self.submit(inputs)

    async def finish(self) -> tuple[Trace, ...]:
        """End the execution after the last output and return the times that nodes reported.

        Raises ExecutionFailed when an output is missing: an incomplete result is never a success.
        """
        if not self._ended:
            if self._futures:
                await asyncio.wait(list(self._futures.values()))
            self._check_open()
            await self._inputs.drain()
            self.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRACE_TIMEOUT_S):
                    await self._all_told.wait()
            await send_trace(self.manifest, self.plan.request, self._traces)
        return tuple(self._traces)

    def end(self) -> None:
        """Tell the nodes that no step follows; they commit to the steps they ran and are paid."""
        self._ended = True
        self._timer.cancel()
        self._failover.process_end()
        self._schedule()
        sealed = self._seal_end(
            self._steps,
            self._inputs.compute_digests(),
            self._collector.make_deliveries(self._steps),
            final=True,
        )
        self._inputs.send_all(sealed, set(self.executors))

    def _seal_end(
        self, steps: int, inputs: tuple[str, ...], outputs: tuple[str, ...], *, final: bool
    ) -> bytes:
        end = End(
            execution_id=self.execution_id,
            steps=steps,
            inputs=inputs,
            outputs=outputs,
            final=final,
        )
        return self._seal(FrameKind.END, steps, sign_end(self._identity, end))

    def _seal(self, kind: FrameKind, step: int, message: Message | None) -> bytes:
        frame = make_message_frame(kind, self.execution_id, CLIENT, step, message)
        return seal_frame(self._identity, frame)

    def _acknowledge(self) -> None:
        """Sign for steps that have arrived: nodes are paid for them if we never end (ADR 21)."""
        while not self._ended:
            steps = self._acknowledged + limits.INTERIM_STEPS
            if steps > self._collector.received_steps:
                return
            self._acknowledged = steps
            sealed = self._seal_end(
                steps,
                self._inputs.take_interim_digests(steps),
                self._collector.take_interim_deliveries(steps),
                final=False,
            )
            self._interim.append(sealed)
            self._inputs.send_all(sealed, set(self.executors))

    async def leave(self) -> None:
        """End the execution now: submitted steps are run and paid, but not waited for."""
        if not self._ended and self.failure is None:
            with contextlib.suppress(TimeoutError):  # END must not overtake inputs
                async with asyncio.timeout(tuning.CONNECT_S):
                    await self._inputs.drain()
            self.end()

    async def store_inputs(self) -> None:
        """Store the rest of the inputs' logs, which verification reads.

        Raises StorageUnavailable, PeerFault.
        """
        await self._inputs.store()

    async def close(self) -> None:
        """Close the connections; steps that are still awaited fail."""
        self._timer.cancel()
        self._fail(Failure("the session was closed"))
        self._failover.process_end()
        self._schedule()
        await self._background.close()
        await self._inputs.close()
        await self._pool.close()
        await self._node_http.close()

    def describe(self, failure: Failure) -> str:
        """Return one sentence that says which task failed on which node and why."""
        where = ""
        if failure.task is not None:
            label = self.manifest.tasks[failure.task].label
            where = f" at task {failure.task} ({label})"
        if failure.node:
            where += f" on node {failure.node}"
        return f"execution {self.execution_id} failed{where}: {failure.reason}"

    async def _announce(self, node: str, endpoint: str) -> None:
        # the committee sends the plan to the nodes, too; the first of both wins
        with contextlib.suppress(SplitUpError):
            await self._node_http.post_json(api.PLAN_CERTIFICATE.url(endpoint), self.certificate)
        self._inputs.mark_announced(node)

    # ---- receiving -----------------------------------------------------------------------------

    def _on_frame(self, link: Link, data: bytes) -> None:
        if data.startswith(CHUNK_MAGIC):
            chunk = decode_chunk(data)
            if self._collector.check_chunk(link.peer, chunk):
                self._chunks.add(chunk)
            return
        seal, frames = decode_frames(data)
        for frame in frames:
            for fact in self._collector.receive(frame, seal):
                self._take(fact)

    def _take(self, fact: Fact) -> None:
        match fact:
            case StepDone(step=step, outputs=outputs):
                self._failover.process_done(step, self._loop.time())
                self.loading.clear()
                future = self._futures.pop(step, None)
                if future is not None and not future.done():
                    arrays = {}
                    for spec, raw in zip(self._output_specs, outputs, strict=True):
                        arrays[spec.name] = bytes_to_array(spec, raw)
                    future.set_result(arrays)
                if self._collector.received_steps >= self._acknowledged + limits.INTERIM_STEPS:
                    self._loop.call_soon(self._acknowledge)
            case FetchNeeded():
                self._start(self._fetch(fact))
            case TraceReceived(trace=trace, is_last=is_last):
                self._keep_trace(trace)
                if is_last:
                    self._told.add(trace.node)
                if self._told >= set(self.executors):
                    self._all_told.set()
            case Progress():
                (self.loading.add if fact.is_loading else self.loading.discard)(fact.node)
                if fact.is_loading and not self._has_waited:
                    self._has_waited = True
                    _log.warning("nodes are still loading tasks of the model; waiting for them")
                self._failover.process_progress(fact, self._loop.time())
                self._schedule()
            case TaskFailure():
                self._blame(fact.node, fact.reason)

    def _keep_trace(self, trace: Trace) -> None:
        """Keep what a node reports, up to a span for each step and task: it may send for ever."""
        kept = self._spans.get(trace.node, 0) + len(trace.spans)
        if trace.spans and kept <= self.plan.request.steps * len(self.plan.tasks):
            self._spans[trace.node] = kept
            self._traces.append(trace)

    async def _fetch(self, need: FetchNeeded) -> None:
        try:
            name = LogName.of(need.task, need.port, need.node, 0)
            entry = LogEntry(need.step, need.digest, need.length, None)
            data = await read_tensor(self._store, name, entry)
            for fact in self._collector.receive_stored(need, data):
                self._take(fact)
        except SplitUpError as error:
            self._blame(need.node, f"its output cannot be read: {error}")

    def _on_up(self, link: Link) -> None:
        self._do(self._failover.process_up(link.peer, self._loop.time()))

    def _on_down(self, link: Link) -> None:
        self._failover.process_down(link.peer, self._loop.time())
        self._schedule()

    def _on_refused(self, link: Link) -> None:
        self._do(self._failover.process_refused(link.peer, self._loop.time()))

    def _on_closed(self, link: Link) -> None:
        if not self._ended:
            self._blame(link.peer, str(link.error or "it lost the connection"))

    # ---- failover ------------------------------------------------------------------------------

    def _blame(self, node: str, reason: str) -> None:
        if self._ended:
            return
        if self._loop.time() >= self._deadline:  # nodes end it, too: none is at fault
            self._on_deadline()
        else:
            self._do(self._failover.process_failure(node, reason, self._loop.time()))

    def _schedule(self) -> None:
        """Set the timer for the failover's next deadline; an earlier timer is kept."""
        at = self._failover.next_time() if self._is_open else None
        if self._failover_timer is not None:
            if at is not None and self._failover_at <= at:
                return  # the usual case: every finished step moves the deadline
            self._failover_timer.cancel()
            self._failover_timer = None
        if at is not None:
            self._failover_at = at = max(at, self._loop.time())
            self._failover_timer = self._loop.call_at(at, self._on_failover_timer)

    def _watch(self) -> None:
        """Expect the outputs of all steps whose inputs have reached their readers.

        Steps that wait for a slow store are left out: no node is at fault for them.
        """
        last = min(self._inputs.unstored, default=self._steps) - 1
        if last >= 0:
            self._failover.process_submitted(last, self._loop.time())
        self._schedule()

    def _on_failover_timer(self) -> None:
        self._failover_timer = None
        now = self._loop.time()
        self._do(self._failover.tick(now, now - self._failover_at))

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Probe(nodes=nodes):
                    sealed = self._seal(FrameKind.PROBE, self._steps, None)
                    self._inputs.send_all(sealed, nodes)
                case Replace():
                    self._replace(command)
                case GiveUp(task=task, node=node, reason=reason):
                    self._fail(Failure(reason, task, node))
        self._schedule()

    def _replace(self, command: Replace) -> None:
        """Give a task to another node; send it the inputs that it cannot read from the store."""
        old = self.executors[command.task]
        takeover = Takeover(
            execution_id=self.execution_id,
            task=command.task,
            candidate=command.candidate,
            first_step=command.first_step,
        )
        signed = sign_takeover(self._identity, takeover)
        self._executor_map.apply(signed)
        self._collector.renew(command.task)
        self._inputs.set_executors(self.executors)
        new = self.executors[command.task]
        self._tell_takeover(old, new, command.reason)
        sealed = self._seal(FrameKind.TAKEOVER, 0, signed)
        if new not in self._links or self._links[new].closed:
            self._open_link(new)
            self._failover.process_opened([new], self._loop.time())
            for earlier in self._takeovers:
                self._inputs.send_all(earlier, [new])
        self._takeovers.append(sealed)
        self._inputs.send_all(sealed, {old, *self.executors})
        for end in self._interim:  # those that it has already are ignored
            self._inputs.send_all(end, [new])
        for task, port in dict.fromkeys(get_sources(self.manifest, command.task)):
            if task == CLIENT:
                self._inputs.resend_unstored(port, new)

    def _tell_takeover(self, old: str, new: str, reason: str) -> None:
        """Log a takeover, once however many tasks the node had."""
        if (old, new) not in self._announced:
            self._announced.add((old, new))
            _log.warning("%s; trying node %s", describe_fault(old, reason), new)

    def _on_deadline(self) -> None:
        missing = len(self._futures)
        silent = self._failover.find_silent()
        if silent is not None:
            self._fail(Failure("it stopped answering", *silent))
            return
        self._fail(
            Failure(
                f"the deadline passed with {missing} of {self._steps} submitted steps undelivered"
                if missing
                else "the deadline passed before the session was finished"
            )
        )

    def _fail(self, failure: Failure) -> None:
        if self.failure is None and not self._ended:
            self.failure = failure
        if self._futures:
            error = self._error()
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(error)
            self._futures.clear()

    def _error(self) -> ExecutionFailed:
        failure = self.failure or Failure("the session was closed")
        return ExecutionFailed(
            self.describe(failure),
            execution_id=self.execution_id,
            task="" if failure.task is None else self.manifest.tasks[failure.task].label,
            node=failure.node,
        )

    def _check_open(self, submitted: int = 0) -> None:
        """Raise unless it goes on, and one step more may be submitted after so many."""
        if self.failure is not None:
            raise self._error()
        if self._ended:
            raise InvalidInput(f"execution {self.execution_id} has ended; start another session")
        if submitted >= self.plan.request.steps:
            raise InvalidInput(
                f"execution {self.execution_id} paid for {self.plan.request.steps} steps and all "
                "of them were submitted; start another session"
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.start(work)


def describe_fault(node: str, reason: str) -> str:
    """Return why a node is replaced: "node A did not deliver in time", or the node's own words."""
    verb = reason.removeprefix("it ")
    return f"node {node} {verb}" if verb != reason else f"node {node}: {reason}"


def _consume(future: asyncio.Future[dict[str, Array]]) -> None:
    if not future.cancelled():
        future.exception()
