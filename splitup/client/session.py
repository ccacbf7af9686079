"""One execution, from its certificate to its last output: frames out, verified outputs in.

Any number of steps may be in flight. The session ends in one of two ways: ``finish`` after the last
step, or a ``Failure`` that every waiting step and every later call raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from splitup import limits
from splitup.client.collector import (
    Fact,
    FetchNeeded,
    OutputCollector,
    StepDone,
    TraceReceived,
    get_input_consumers,
)
from splitup.client.outcome import Array
from splitup.crypto.keys import Identity
from splitup.errors import ExecutionFailed, InvalidInput, SplitUpError
from splitup.graph.manifest import Manifest
from splitup.net.frames import (
    make_message_frame,
    make_stored_frame,
    make_tensor_frame,
    seal_frame,
    verify_frame,
)
from splitup.net.gateway import GatewayClient
from splitup.net.http import SignedClient
from splitup.net.links import Link, LinkPool
from splitup.net.objects import get_object, put_object
from splitup.protocol.keys import Segment, encode_record, iter_segments, measure_record
from splitup.tensors import bytes_to_array, check_inputs
from splitup.wire import (
    CLIENT,
    FrameKind,
    Grants,
    PlanCertificate,
    TaskFailure,
    Trace,
    decode_frame,
)

TRACE_TIMEOUT_S: Final = 2.0  # a node tells its times at once after the end, or not at all


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an execution cannot complete: the task and node it failed at ("" when unknown)."""

    reason: str
    task: int | None = None
    node: str = ""


class Session:
    """A running execution. Made by ``SplitUp.session``; not shared between event loops.

    ``certificate`` is checked. ``deadline`` is on the event loop's clock: what is not delivered
    by then has failed.
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
    ) -> None:
        self.certificate = certificate
        self.plan = certificate.plan
        self.manifest = manifest
        self.execution_id = self.plan.request.execution_id
        self.failure: Failure | None = None
        self._identity = identity
        self._http = http
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._collector = OutputCollector(manifest, self.plan, verify_frame)
        self._specs = tuple(port.spec for port in manifest.inputs)
        self._output_specs = tuple(port.spec for port in manifest.outputs)
        self._consumers = get_input_consumers(manifest, self.plan)
        self._pool = LinkPool(
            identity, self._on_frame, on_closed=self._on_closed, allow_loopback=allow_loopback
        )
        self._links: dict[str, Link] = {}
        self._futures: dict[int, asyncio.Future[dict[str, Array]]] = {}
        self._sent: list[list[bytes]] = [[] for _ in manifest.inputs]  # [port][step], for the log
        self._outbox: asyncio.Queue[_Outgoing] = asyncio.Queue()
        self._traces: list[Trace] = []
        self._told: set[str] = set()  # nodes whose spans are all here
        self._all_told = asyncio.Event()
        self._grants: asyncio.Task[Grants] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = self._loop.call_at(deadline, self._on_deadline)
        self._steps = 0
        self._ended = False

    @property
    def steps(self) -> int:
        """How many steps were submitted so far."""
        return self._steps

    def open(self) -> None:
        """Connect to every executor and ask for the storage grants in the background."""
        self._grants = asyncio.create_task(self._gateway.execution_grants(self.certificate))
        for node in sorted(set(self.plan.executors())):
            entry = self.plan.node_of(node)
            self._links[node] = self._pool.open(entry.node, entry.endpoint, self.execution_id)
            self._start(self._announce(entry.endpoint))
        self._start(self._write())

    def submit(self, inputs: Mapping[str, Array]) -> asyncio.Future[dict[str, Array]]:
        """Send one step; the future gives its outputs by name. Steps run in the order submitted.

        Raises InvalidInput for inputs that do not fit or one step too many, ExecutionFailed when
        the execution has failed already.
        """
        self._check_alive()
        if self._steps >= self.plan.request.steps:
            raise InvalidInput(
                f"execution {self.execution_id} paid for {self.plan.request.steps} steps and all "
                "of them were submitted; start another session"
            )
        tensors = check_inputs(self._specs, inputs)
        step = self._steps
        self._steps += 1
        future: asyncio.Future[dict[str, Array]] = self._loop.create_future()
        future.add_done_callback(_consume)  # the session raises it again, see SplitUp.session
        self._futures[step] = future
        for port, data in enumerate(tensors):
            self._sent[port].append(data)
            self._outbox.put_nowait(_Outgoing(port, step, data))
        return future

    async def step(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one step and return its outputs by name."""
        return await self.submit(inputs)

    async def finish(self) -> tuple[Trace, ...]:
        """End the execution after the last output and return the times the nodes tell.

        Raises ExecutionFailed when an output is missing: an incomplete result is never a success.
        """
        if not self._ended:
            if self._futures:
                await asyncio.wait(list(self._futures.values()))
            self._check_alive()
            await self._outbox.join()
            self.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRACE_TIMEOUT_S):
                    await self._all_told.wait()
        return tuple(self._traces)

    def end(self) -> None:
        """Tell the nodes that no step follows; they commit to what they ran and are paid for it."""
        self._ended = True
        self._timer.cancel()
        frame = make_message_frame(FrameKind.END, self.execution_id, CLIENT, self._steps, None)
        sealed = seal_frame(self._identity, frame)
        for link in self._links.values():
            with contextlib.suppress(SplitUpError):  # its refund or its deadline settles it
                link.send(sealed)

    async def store_inputs(self) -> None:
        """PUT the input segments, which verification reads; raise StorageUnavailable, PeerFault."""
        assert self._grants is not None
        grants = await self._grants
        puts = []
        for port, spec in enumerate(self._specs):
            for segment in iter_segments(
                self.execution_id, CLIENT, port, measure_record(spec), self.plan.request.steps
            ):
                if spec.nbytes <= limits.INLINE_TENSOR_BYTES and segment.first_step < self._steps:
                    puts.append(self._put(grants, segment, self._join(port, segment)))
        await asyncio.gather(*puts)

    async def close(self) -> None:
        """Drop the connections; whatever is still awaited fails."""
        self._timer.cancel()
        self._fail(Failure("the session was closed"))
        pending = [*self._tasks, *([self._grants] if self._grants is not None else [])]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._pool.close()

    def describe(self, failure: Failure) -> str:
        """Return one sentence that says which task failed on which node and why."""
        where = ""
        if failure.task is not None:
            label = self.manifest.tasks[failure.task].label
            where = f" at task {failure.task} ({label})"
        if failure.node:
            where += f" on node {failure.node}"
        return f"execution {self.execution_id} failed{where}: {failure.reason}"

    # ---- sending -------------------------------------------------------------------------------

    async def _announce(self, endpoint: str) -> None:
        # the committee tells the nodes too; whoever is first saves the other's delay
        with contextlib.suppress(SplitUpError):
            await self._http.post_json(f"{endpoint}/v1/plan", self.certificate)

    async def _write(self) -> None:
        while True:
            outgoing = await self._outbox.get()
            try:
                await self._send(outgoing)
            except SplitUpError as error:
                self._fail(Failure(str(error)))
            finally:
                self._outbox.task_done()

    async def _send(self, outgoing: _Outgoing) -> None:
        data, port, step = outgoing.data, outgoing.port, outgoing.step
        digest = hashlib.sha256(data).digest()
        if len(data) > limits.INLINE_TENSOR_BYTES:
            assert self._grants is not None
            segment = self._segment(CLIENT, port, len(data), step)
            await self._put(await self._grants, segment, data)
            frame = make_stored_frame(self.execution_id, CLIENT, port, step, digest, len(data))
        else:
            frame = make_tensor_frame(self.execution_id, CLIENT, port, step, data, digest)
        sealed = seal_frame(self._identity, frame)
        for node in self._consumers[port]:
            link = self._links[node]
            if link.queued_bytes + len(sealed) > limits.LINK_QUEUE_BYTES:
                await link.drain(limits.LINK_QUEUE_BYTES - len(sealed))
            link.send(sealed)

    async def _put(self, grants: Grants, segment: Segment, data: bytes) -> None:
        grant = grants.find("PUT", segment.key)
        await put_object(self._http.session, grant, data)

    def _segment(self, task: int, port: int, nbytes: int, step: int) -> Segment:
        segments = iter_segments(self.execution_id, task, port, nbytes, self.plan.request.steps)
        return next(s for s in segments if s.first_step <= step < s.first_step + s.steps)

    def _join(self, port: int, segment: Segment) -> bytes:
        rows = self._sent[port][segment.first_step : segment.first_step + segment.steps]
        rows = [bytes(encode_record(row, self._specs[port])) for row in rows]
        return b"".join(rows).ljust(segment.length, b"\0")

    # ---- receiving -----------------------------------------------------------------------------

    def _on_frame(self, link: Link, data: bytes) -> None:
        frame, signature = decode_frame(data)
        for fact in self._collector.receive(frame, signature):
            self._take(fact)

    def _take(self, fact: Fact) -> None:
        match fact:
            case StepDone(step=step, outputs=outputs):
                future = self._futures.pop(step, None)
                if future is not None and not future.done():
                    pairs = zip(self._output_specs, outputs, strict=True)
                    future.set_result({spec.name: bytes_to_array(spec, raw) for spec, raw in pairs})
            case FetchNeeded():
                self._start(self._fetch(fact))
            case TraceReceived(trace=trace, is_last=is_last):
                self._traces.append(trace)
                if is_last:
                    self._told.add(trace.node)
                if self._told == set(self._links):
                    self._all_told.set()
            case TaskFailure():
                self._fail(self._find_silent() or Failure(fact.reason, fact.task, fact.node))

    async def _fetch(self, need: FetchNeeded) -> None:
        assert self._grants is not None
        segment = self._segment(need.task, need.port, need.length, need.step)
        try:
            grant = (await self._grants).find("GET", segment.key)
            data = await get_object(
                self._http.session, grant, max_bytes=need.length, expected_digest=need.digest.hex()
            )
            for fact in self._collector.receive_stored(need, data):
                self._take(fact)
        except SplitUpError as error:
            node = self.plan.executors()[need.task]
            self._fail(Failure(f"its output cannot be read: {error}", need.task, node))

    def _on_closed(self, link: Link) -> None:
        if self._ended:
            return
        tasks = [t for t, node in enumerate(self.plan.executors()) if node == link.peer]
        reason = str(link.error) if link.error is not None else "the connection to it was lost"
        self._fail(Failure(reason, tasks[0] if tasks else None, link.peer))

    def _on_deadline(self) -> None:
        missing = len(self._futures)
        self._fail(
            self._find_silent()
            or Failure(
                f"the deadline passed with {missing} of {self._steps} submitted steps undelivered"
                if missing
                else "the deadline passed before the session was finished"
            )
        )

    def _find_silent(self) -> Failure | None:
        """Return the first task whose node is gone: the others only report that they miss it."""
        for task, node in enumerate(self.plan.executors()):
            link = self._links.get(node)
            if link is not None and not link.connected.is_set():
                return Failure("the node stopped answering", task, node)
        return None

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

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self._error()
        if self._ended:
            raise InvalidInput(f"execution {self.execution_id} has ended; start another session")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    port: int
    step: int
    data: bytes


def _consume(future: asyncio.Future[dict[str, Array]]) -> None:
    if not future.cancelled():
        future.exception()
