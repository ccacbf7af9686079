"""One execution at one node: its plan, its part in it, and the record of what it did."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.completions import (
    UNSTATED,
    Completion,
    End,
    SignedEnd,
    TaskCommitment,
)
from splitup.messages.frames import Seal
from splitup.messages.plans import PlanCertificate, PlanNode
from splitup.messages.progress import Span, Trace
from splitup.protocol.execution.ends import make_count
from splitup.protocol.execution.routes import Routes, compute_routes
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.execution.task_queue import PortId, Run
from splitup.protocol.settlement.edge_faults import find_input_faults
from splitup.storage.log_store import LogStore, LogWriter
from splitup_node.execution.digests import Digests, Recorder, StepsBefore

# task, step, and four times in nanoseconds; tuples would take six times the memory
_SPAN: Final = struct.Struct("<HIQQQQ")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A number of rows that differs from step to step, and the input that has so many rows."""

    place: int
    row_bytes: int
    most: int

    def count(self, run: Run) -> int:
        """Return how many rows a run has; the worker checks that its other inputs agree."""
        return len(run.inputs[self.place].data) // self.row_bytes


@dataclass(slots=True)
class Part:
    """One task that this node runs in an execution."""

    task: int
    session: int  # in the worker, where it holds the task's state
    digests: Digests
    symbols: tuple[Symbol, ...]
    full_bytes: int  # of a step's inputs with all the rows that the task's flops are for
    send_from: int = 0  # earlier steps only repeat what their readers have already
    recorded: int = 0  # how many runs are in the digests
    state_bytes: int = 0  # on the device, once the first step has run


@dataclass(slots=True)
class Execution:
    """Everything a node holds for one execution. Without parts the node is only a fallback."""

    id: str
    certificate: PlanCertificate
    manifest: Manifest
    node: str
    executor_map: ExecutorMap
    routes: Routes
    store: LogStore
    writer: LogWriter
    recorder: Recorder = field(default_factory=Recorder)
    parts: dict[int, Part] = field(default_factory=dict)  # by task
    sent: dict[PortId, StepsBefore] = field(default_factory=dict)  # by output for the client
    # readers that took over a task, and may lack steps that the other readers have
    new_readers: dict[PortId, tuple[str, ...]] = field(default_factory=dict)
    takeovers: dict[int, bytes] = field(default_factory=dict)  # the client's frames, by task
    # the client's final one; if that never comes, an interim one, or our own count of its orders
    end: SignedEnd | None = None
    ordered: int = 0  # steps of which the client sent inputs to this node
    order: Seal | None = None  # under the last of them
    interim: deque[SignedEnd] = field(default_factory=lambda: deque(maxlen=limits.INTERIM_ENDS))
    publishing_bytes: int = 0  # of large tensors that are being stored
    spans: bytearray = field(default_factory=bytearray)
    outbox: deque[bytes] = field(default_factory=deque)  # frames that the client may have missed
    outbox_bytes: int = 0
    failure: str = ""
    finished: bool = False
    ended_at_s: float = 0.0
    used_at_s: float = 0.0  # when the last step ran

    @property
    def client_key(self) -> str:
        """Return the Ed25519 key of the client."""
        return self.certificate.plan.request.client_key

    @property
    def steps(self) -> int | None:
        """Return how many steps there are, None before the end."""
        return None if self.end is None else self.end.end.steps

    @property
    def delivered(self) -> int:
        """Return how many steps the client has received, as it signed in its latest interim end."""
        return self.interim[-1].end.steps if self.interim else 0

    @property
    def deadline_s(self) -> int:
        """Return the deadline, seconds since the epoch."""
        return self.certificate.plan.request.deadline

    @property
    def is_over(self) -> bool:
        """Return whether the execution has finished or failed."""
        return self.finished or bool(self.failure)

    @property
    def sessions(self) -> list[int]:
        """Return the worker's sessions of this execution."""
        return [part.session for part in self.parts.values()]

    def check_tensor(self, port: PortId, length_bytes: int) -> bool:
        """Return whether a local task reads this port; raise PeerFault for an impossible tensor.

        After a takeover, a tensor for a task that has left this node is no fault.
        """
        spec = self.routes.specs.get(port)
        if spec is None or port[0] in self.parts:
            if self.executor_map.takeovers:
                return False
            raise PeerFault(
                f"nobody may send port {port[1]} of task {port[0]} of {self.id} to this node"
            )
        if not spec.accepts(length_bytes):
            raise PeerFault(
                f"port {port[1]} of task {port[0]} of {self.id} is {spec}, not {length_bytes} bytes"
            )
        return True

    def add_part(self, task: int, session: int, send_from: int = 0) -> Part:
        """Begin to run a task."""
        entry = self.manifest.tasks[task]
        digests = Digests(len(entry.inputs), len(entry.outputs))
        specs = [port.spec for port in entry.inputs]
        full_bytes = sum(spec.nbytes for spec in specs)
        part = Part(task, session, digests, _find_symbols(specs), full_bytes, send_from)
        self.parts[task] = part
        for port in range(len(entry.outputs)):
            if (task, port) in self.routes.to_client:
                self.sent[task, port] = StepsBefore()
        return part

    def reroute(self) -> None:
        """Compute the readers of every output again, after a takeover."""
        plan = self.certificate.plan
        executors = self.executor_map.executors
        self.routes = compute_routes(plan, self.manifest, self.node, executors)
        self.new_readers = {
            (task, port): tuple(
                sorted(
                    {
                        executors[reader]
                        for reader, _ in self.manifest.consumers(task, port)
                        if reader in self.executor_map.takeovers
                    }
                    - {self.node}
                )
            )
            for task, port in self.routes.targets
        }

    def get_targets(self, port: PortId, step: int, zeros: Collection[int] = ()) -> tuple[str, ...]:
        """Return the nodes to send one step of an output to.

        ``zeros`` are the task's outputs that are zero in this step: readers that they gate get only
        those.
        """
        if step >= self.parts[port[0]].send_from:
            gates = self.routes.gates[port]
            return tuple(
                node
                for node in self.routes.targets[port]
                if node not in gates or not gates[node].issubset(zeros)
            )
        return self.new_readers.get(port, ())

    def find_node(self, address: str) -> PlanNode:
        """Return the entry of a node of the plan; raise PeerFault when there is none."""
        return self.routes.successors.get(address) or self.certificate.plan.node_of(address)

    def is_result(self, port: PortId, step: int) -> bool:
        """Return whether one step of an output goes to the client."""
        return port in self.routes.to_client and step >= self.parts[port[0]].send_from

    def add_span(self, task: int, step: int, times: tuple[int, int, int, int]) -> None:
        """Remember when a run's inputs arrived, when it started, ended, and was sent (in ns)."""
        if len(self.spans) < limits.MAX_SPANS * _SPAN.size:
            self.spans += _SPAN.pack(task, step, *times)

    def keep_for_client(self, sealed: bytes) -> None:
        """Remember a frame for a client that is not connected, or connects again."""
        self.outbox.append(sealed)
        self.outbox_bytes += len(sealed)
        while self.outbox_bytes > tuning.OUTBOX_BYTES and len(self.outbox) > 1:
            self.outbox_bytes -= len(self.outbox.popleft())

    def forget_outputs(self) -> None:
        """Drop the frames kept for the client, which ends when it has all outputs or wants none."""
        self.outbox.clear()
        self.outbox_bytes = 0

    def add_interim(self, signed: SignedEnd) -> None:
        """Keep a checked interim end, and forget digests that only earlier ones needed."""
        self.interim.append(signed)
        for part in self.parts.values():
            part.digests.forget(self.interim[0].end.steps)

    def find_substitute(self) -> SignedEnd | None:
        """Return what stands for an end that did not come, or None: nothing is paid then.

        That is the number of steps that this node computed for the client, if they are more than
        the client has acknowledged; else the latest interim end that this node can commit to.
        """
        ends = [*self._make_counts(0), *reversed(self.interim)]
        return next((signed for signed in ends if self.make_claims(signed.end)), None)

    def _make_counts(self, steps: int) -> list[SignedEnd]:
        """Return this node's counts of steps, descending from what it computed.

        They are above ``steps``, and above what the client has acknowledged.
        """
        computed = min((part.digests.steps for part in self.parts.values()), default=0)
        lowest = max(self.delivered, steps, computed - limits.UNPAID_STEPS)
        return [make_count(self.id, number) for number in range(computed, lowest, -1)]

    def make_claims(self, end: End) -> tuple[TaskCommitment, ...]:
        """Return what this node commits to for this end of the client.

        () if it has not computed so many steps, or a final end fewer than a state has seen, or the
        end misstates the inputs that it received.
        """
        claims = []
        for task, part in sorted(self.parts.items()):
            found = part.digests.find(end.steps)
            if found is None:
                return ()
            state = part.digests.state
            if self.manifest.tasks[task].state_bytes and not end.final:
                state = UNSTATED
            elif self.manifest.tasks[task].state_bytes and not part.digests.is_after(end.steps):
                return ()  # another node led it beyond the end: the state is not that of the end
            claims.append(TaskCommitment(task=task, inputs=found[0], outputs=found[1], state=state))
        by_task = {claim.task: claim for claim in claims}
        return () if find_input_faults(self.manifest, by_task, [end]) else tuple(claims)

    def make_completions(self, make_salt: Callable[[], bytes]) -> list[Completion]:
        """Return what this node commits to for the end, and for what may count instead.

        Those are the interim ends before it, and our counts of steps that the client ordered beyond
        its words. ``make_salt`` returns 32 random bytes.
        """
        assert self.end is not None
        takeovers, plan = self.executor_map.takeovers, self.certificate.plan
        told = tuple(takeovers[t] for t in sorted(takeovers) if self.node in plan.tasks[t])
        steps = self.end.end.steps
        interim = [signed for signed in reversed(self.interim) if signed.end.steps < steps]
        if self.end.is_count:
            ends = [*self._make_counts(0), *interim]
        else:
            ends = [self.end, *interim, *self._make_counts(steps)]
        return [
            Completion(
                execution_id=self.id,
                node=self.node,
                tasks=claims,
                takeovers=told,
                salt="0x" + make_salt().hex(),
                end=signed,
            )
            for signed in ends
            if signed.end.steps and (claims := self.make_claims(signed.end))
        ]

    def make_traces(self) -> Iterator[tuple[int, Trace]]:
        """Yield the spans in traces that fit into a frame, with the number of traces to come."""
        size = limits.SPANS_PER_FRAME * _SPAN.size
        chunks = [self.spans[i : i + size] for i in range(0, len(self.spans), size)] or [
            bytearray()
        ]
        for index, chunk in enumerate(chunks):
            spans = tuple(
                Span(
                    task=task,
                    step=step,
                    received_ns=str(received),
                    started_ns=str(started),
                    ended_ns=str(ended),
                    sent_ns=str(sent),
                )
                for task, step, received, started, ended, sent in _SPAN.iter_unpack(chunk)
            )
            yield (
                len(chunks) - 1 - index,
                Trace(execution_id=self.id, node=self.node, spans=spans),
            )


def _find_symbols(specs: Sequence[TensorSpec]) -> tuple[Symbol, ...]:
    """Return, for every symbolic number of rows, the first input that has so many rows."""
    places = {spec.rows: place for place, spec in reversed(list(enumerate(specs))) if spec.rows}
    return tuple(
        Symbol(
            place,
            specs[place].row_bytes,
            min(spec.shape[0] for spec in specs if spec.rows == symbol),
        )
        for symbol, place in places.items()
    )


def make_execution(
    certificate: PlanCertificate, manifest: Manifest, node: str, open_store: OpenStore
) -> Execution:
    """Return a new execution without its parts.

    Raises PeerFault when plan and manifest do not fit or the plan does not name ``node``.
    """
    plan = certificate.plan
    plan.node_of(node)
    executor_map = ExecutorMap(plan)
    store = open_store(certificate, manifest, executor_map)
    return Execution(
        id=plan.request.execution_id,
        certificate=certificate,
        manifest=manifest,
        node=node,
        executor_map=executor_map,
        routes=compute_routes(plan, manifest, node),
        store=store,
        writer=LogWriter(plan.request.execution_id, node, store),
    )


OpenStore = Callable[[PlanCertificate, Manifest, ExecutorMap], LogStore]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]  # starts a background task
Schedule = Callable[[], None]  # starts the next batch, when there is one


def get_first_task(execution: Execution) -> int:
    """Return the task under which this node signs frames that belong to none in particular."""
    return min(execution.parts, default=CLIENT)
