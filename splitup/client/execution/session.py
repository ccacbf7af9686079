"""One execution, from its certificate to its last output: frames out, verified outputs in.

Any number of steps may be in flight. A node that fails is replaced by the plan's next candidate for
its tasks, and the steps go on (``splitup.protocol.execution.failover``). The session ends in one of
two ways: ``finish`` after the last step, or a ``Failure`` that every waiting step and later call
raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from splitup.client.execution.large_inputs import LargeInputs
from splitup.client.execution.output_collector import (
    Fact,
    FetchNeeded,
    OutputCollector,
    StepDone,
    TraceReceived,
    get_input_consumers,
)
from splitup.client.outcome import Array
from splitup.core import limits, tuning
from splitup.core.errors import ExecutionFailed, InvalidInput, SplitUpError
from splitup.core.tensors import StepsDigest, bytes_to_array, check_inputs
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.completions import End, Takeover
from splitup.messages.frames import FRAME_HEADER_BYTES, FrameKind, decode_chunk, decode_frames
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Progress, TaskFailure, Trace
from splitup.net.http import SignedClient
from splitup.net.links import Link, LinkPool
from splitup.net.signed_frames import (
    make_entry_frame,
    make_message_frame,
    seal_frame,
    seal_frames,
    verify_seal,
)
from splitup.net.tensor_chunks import TensorChunks
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.execution.failover import Command, Failover, GiveUp, Probe, Replace
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.storage_keys import LogName
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.log_store import (
    LogObject,
    LogWriter,
    has_large_tensors,
    open_logs,
    read_tensor,
)

_log = logging.getLogger("splitup.client.execution.session")

_Group = tuple[tuple[int, ...], tuple[str, ...]]  # inputs, and the nodes that read just these

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
        self._failover = Failover(self.plan, manifest, self._loop.time())
        self._specs = tuple(port.spec for port in manifest.inputs)
        self._consumers = get_input_consumers(manifest, self.executors)
        self._input_digests = [StepsDigest() for _ in manifest.inputs]
        self._steps_sent = 0  # whose inputs are in the digests
        self._output_specs = tuple(port.spec for port in manifest.outputs)
        self._store = open_logs(
            gateway,
            lambda: http.session,
            certificate,
            self._executor_map,
            has_large_tensors=has_large_tensors(manifest),
        )
        client = self.plan.request.client
        self._writer = LogWriter(self.execution_id, client, self._store, pause_s=0.0)
        self._large = LargeInputs(identity, self.plan.request, self._store, direct_bytes)
        self._pool = LinkPool(
            identity,
            self._on_frame,
            on_closed=self._on_closed,
            on_up=self._on_up,
            on_down=self._on_down,
            allow_loopback=allow_loopback,
        )
        self._links: dict[str, Link] = {}
        self._futures: dict[int, asyncio.Future[dict[str, Array]]] = {}
        self._outbox: asyncio.Queue[_Outgoing] = asyncio.Queue()
        self._outgoing = 0  # steps that are not sent yet
        self._unstored: set[int] = set()  # steps whose large inputs readers may not have yet
        self._rest: list[
            tuple[Mapping[int, LogEntry], list[_Group]]
        ] = []  # for others than the first task
        self._takeovers: list[bytes] = []  # sealed frames, in order
        self._traces: list[Trace] = []
        self._told: set[str] = set()  # nodes whose spans are all here
        self._all_told = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline = deadline
        self._timer = self._loop.call_at(deadline, self._on_deadline)
        self._failover_timer: asyncio.TimerHandle | None = None
        self._failover_at = 0.0  # when it wakes
        self._steps = 0
        self._ended = False
        self._is_open = False

    @property
    def executors(self) -> tuple[str, ...]:
        """Who runs every task now, by task index."""
        return self._executor_map.executors

    @property
    def takeovers(self) -> int:
        """How many times a task went to another node so far."""
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
        self._start(self._write())
        self._start(self._flush())
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
        self._outgoing += 1
        if any(len(data) > limits.INLINE_TENSOR_BYTES for data in tensors):
            self._unstored.add(step)
        if self._outgoing > 1 or not self._send_now(step, tensors):
            self._outbox.put_nowait(_Outgoing(step, tensors))
        self._watch()
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
        self._failover.process_end()
        self._schedule()
        # what is still on its way is not vouched for: half a digest would accuse the honest
        is_sent = self._steps_sent == self._steps
        inputs = tuple(digest.hexdigest() for digest in self._input_digests) if is_sent else ()
        end = End(execution_id=self.execution_id, steps=self._steps, inputs=inputs)
        signed = sign_end(self._identity, end)
        frame = make_message_frame(FrameKind.END, self.execution_id, CLIENT, self._steps, signed)
        self._send_all(seal_frame(self._identity, frame), set(self.executors))

    async def leave(self) -> None:
        """End the execution wherever it is: what was submitted is run and paid, not waited for."""
        if not self._ended and self.failure is None:
            with contextlib.suppress(TimeoutError):  # END must not overtake inputs
                async with asyncio.timeout(tuning.CONNECT_S):
                    await self._outbox.join()
            self.end()

    async def store_inputs(self) -> None:
        """Store what is left of the inputs' logs, which verification reads.

        Raises StorageUnavailable, PeerFault.
        """
        await self._writer.finish()

    async def close(self) -> None:
        """Drop the connections; whatever is still awaited fails."""
        self._timer.cancel()
        self._fail(Failure("the session was closed"))
        self._failover.process_end()
        self._schedule()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._writer.close()
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

    # ---- sending -------------------------------------------------------------------------------

    async def _announce(self, node: str, endpoint: str) -> None:
        # the committee tells the nodes too; whoever is first saves the other's delay
        with contextlib.suppress(SplitUpError):
            await self._node_http.post_json(api.PLAN_CERTIFICATE.url(endpoint), self.certificate)
        self._large.mark_announced(node)

    async def _write(self) -> None:
        while True:
            outgoing = await self._outbox.get()
            large: dict[int, LogObject] = {}
            try:
                large = await self._send(outgoing)
            except SplitUpError as error:
                self._fail(Failure(str(error)))
            finally:
                if large:
                    self._start(self._store_large(outgoing.step, large))
                else:
                    self._finish_step()

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(tuning.FLUSH_PERIOD_S)
            self._writer.flush(age_s=tuning.SEGMENT_AGE_S)

    def _send_now(self, step: int, tensors: list[bytes]) -> bool:
        """Send a step that has none before it; False when it has to wait for store or network."""
        if not self._is_open or any(len(data) > limits.INLINE_TENSOR_BYTES for data in tensors):
            return False
        free = tuning.LINK_QUEUE_BYTES - sum(FRAME_HEADER_BYTES + len(data) for data in tensors)
        readers = [self._links[node] for nodes in self._consumers.values() for node in nodes]
        if any(link.queued_bytes > free for link in readers):
            return False
        entries = {
            port: LogEntry(step, hashlib.sha256(data).digest(), len(data), data)
            for port, data in enumerate(tensors)
        }
        self._send_rest()
        groups = list(self._consumers.items())
        for group in groups[:1]:
            self._send_group(entries, *group)
        # the others' inputs are not wanted before its output, nor is a processor to wake them
        self._rest.append((entries, groups[1:]))
        self._loop.call_soon(self._send_rest)
        self._log_inputs(entries)
        for port, entry in entries.items():
            self._input_digests[port].add(entry.digest)
        self._outgoing -= 1
        self._steps_sent += 1
        return True

    def _send_rest(self) -> None:
        """Send what waits for the turn after the first task's inputs."""
        rest, self._rest = self._rest, []
        for entries, groups in rest:
            for group in groups:
                self._send_group(entries, *group)

    def _send_group(
        self, entries: Mapping[int, LogEntry], ports: tuple[int, ...], nodes: tuple[str, ...]
    ) -> None:
        for sealed in self._seal_inputs(entries, ports):
            for node in nodes:
                with contextlib.suppress(SplitUpError):  # the failover knows what to do about it
                    self._links[node].send(sealed)

    async def _send(self, outgoing: _Outgoing) -> dict[int, LogObject]:
        """Send a step; return its large inputs, by port, which are to be stored."""
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
            self._input_digests[port].add(item.digest)
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
            self._unstored.discard(step)
            self._watch()
        except SplitUpError as error:
            self._fail(Failure(str(error)))
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

    def _log_inputs(self, entries: Mapping[int, LogEntry]) -> None:
        """Log inputs of a step, which are sent in the same turn or will be."""
        for port, entry in entries.items():
            self._writer.append(CLIENT, port, entry)

    def _seal_inputs(self, entries: Mapping[int, LogEntry], ports: tuple[int, ...]) -> list[bytes]:
        frames = [
            make_entry_frame(self.execution_id, (CLIENT, port), entries[port])
            for port in ports
            if port in entries
        ]
        return seal_frames(self._identity, frames)

    def _seal_entry(self, port: int, entry: LogEntry) -> bytes:
        frame = make_entry_frame(self.execution_id, (CLIENT, port), entry)
        return seal_frame(self._identity, frame)

    def _send_all(self, sealed: bytes, nodes: Iterable[str]) -> None:
        self._send_rest()
        for node in nodes:
            link = self._links.get(node)
            with contextlib.suppress(SplitUpError):  # the failover, or its refund, settles it
                if link is not None:
                    link.send(sealed)

    # ---- receiving -----------------------------------------------------------------------------

    def _on_frame(self, link: Link, data: bytes) -> None:
        if (chunk := decode_chunk(data)) is not None:
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
                if self._told >= set(self.executors):
                    self._all_told.set()
            case Progress():
                self._do(self._failover.process_progress(fact, self._loop.time()))
            case TaskFailure():
                self._blame(fact.node, fact.reason)

    async def _fetch(self, need: FetchNeeded) -> None:
        try:
            name = LogName(need.task, need.port, need.node, 0)
            entry = LogEntry(need.step, need.digest, need.length, None)
            data = await read_tensor(self._store, name, entry)
            for fact in self._collector.receive_stored(need, data):
                self._take(fact)
        except SplitUpError as error:
            self._blame(need.node, f"its output cannot be read: {error}")

    def _on_up(self, link: Link) -> None:
        self._failover.process_up(link.peer)
        self._schedule()

    def _on_down(self, link: Link) -> None:
        self._failover.process_down(link.peer, self._loop.time())
        self._schedule()

    def _on_closed(self, link: Link) -> None:
        if not self._ended:
            self._blame(link.peer, str(link.error or "the connection to it was lost"))

    # ---- failover ------------------------------------------------------------------------------

    def _blame(self, node: str, reason: str) -> None:
        if self._ended:
            return
        if self._loop.time() >= self._deadline:  # nodes end it too: nobody's fault
            self._on_deadline()
        else:
            self._do(self._failover.process_failure(node, reason, self._loop.time()))

    def _schedule(self) -> None:
        """Wake up when the failover may have to do something, or earlier and look again."""
        at = self._failover.next_time() if self._is_open else None
        if self._failover_timer is not None:
            if at is not None and self._failover_at <= at:
                return  # the usual case: every step that comes back puts it off
            self._failover_timer.cancel()
            self._failover_timer = None
        if at is not None:
            self._failover_at = at
            self._failover_timer = self._loop.call_at(at, self._on_failover_timer)

    def _watch(self) -> None:
        """Expect every step before the first that may still be on its way to its readers.

        For a slow store nobody is to blame but the store.
        """
        last = min(self._unstored, default=self._steps) - 1
        if last >= 0:
            self._failover.process_submitted(last, self._loop.time())
        self._schedule()

    def _on_failover_timer(self) -> None:
        self._failover_timer = None
        self._do(self._failover.tick(self._loop.time()))

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Probe(nodes=nodes):
                    frame = make_message_frame(
                        FrameKind.PROBE, self.execution_id, CLIENT, self._steps, None
                    )
                    self._send_all(seal_frame(self._identity, frame), nodes)
                case Replace():
                    self._replace(command)
                case GiveUp(task=task, node=node, reason=reason):
                    self._fail(Failure(reason, task, node))
        self._schedule()

    def _replace(self, command: Replace) -> None:
        """Tell everybody who runs a task from now on, and the newcomer what it may lack."""
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
        self._consumers = get_input_consumers(self.manifest, self.executors)
        new = self.executors[command.task]
        _log.warning(
            "task %d of %s goes from node %s to %s: %s",
            *(command.task, self.execution_id, old, new, command.reason),
        )
        frame = make_message_frame(FrameKind.TAKEOVER, self.execution_id, CLIENT, 0, signed)
        sealed = seal_frame(self._identity, frame)
        if new not in self._links or self._links[new].closed:
            self._open_link(new)
            self._failover.process_opened([new], self._loop.time())
            for earlier in self._takeovers:
                self._send_all(earlier, [new])
        self._takeovers.append(sealed)
        self._send_all(sealed, {old, *self.executors})
        for task, port in dict.fromkeys(get_sources(self.manifest, command.task)):
            if task == CLIENT:
                for entry in self._writer.get_unstored(task, port):
                    self._send_all(self._seal_entry(port, entry), [new])

    def _on_deadline(self) -> None:
        missing = len(self._futures)
        silent = self._failover.find_silent()
        if silent is not None:
            self._fail(Failure("the node stopped answering", *silent))
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
    step: int
    tensors: list[bytes]


def _consume(future: asyncio.Future[dict[str, Array]]) -> None:
    if not future.cancelled():
        future.exception()
