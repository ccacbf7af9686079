"""One execution at one node: its plan, its part in it, and the record of what it did."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from splitup import limits
from splitup.errors import PeerFault
from splitup.graph.manifest import Manifest
from splitup.protocol.keys import measure_record
from splitup.protocol.queue import PortId, Run, Tensor
from splitup.protocol.routes import Routes, compute_routes
from splitup.wire import (
    CLIENT,
    EMPTY_DIGEST,
    Completion,
    Grants,
    PlanCertificate,
    Span,
    TaskCommitment,
    Trace,
)
from splitup_node.logs import Digests, PortLog


@dataclass(slots=True)
class Execution:
    """Everything a node holds for one execution."""

    id: str
    certificate: PlanCertificate
    manifest: Manifest
    routes: Routes
    sessions: dict[int, int]  # task -> the worker's session with its state
    grants: asyncio.Task[Grants]
    digests: dict[int, Digests]
    logs: dict[PortId, PortLog]
    steps: int | None = None  # as the client's END says
    uploads: set[asyncio.Task[None]] = field(default_factory=set)
    upload_error: Exception | None = None
    recorded_runs: int = 0
    states: dict[int, str] = field(default_factory=dict)  # task -> digest of its final state
    spans: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    outbox: deque[bytes] = field(default_factory=deque)  # what the client may have to get again
    outbox_bytes: int = 0
    failure: str = ""
    finished: bool = False
    ended_at_s: float = 0.0

    @property
    def client_key(self) -> str:
        """Return the Ed25519 key of the client."""
        return self.certificate.plan.request.client_key

    @property
    def deadline_s(self) -> int:
        """Return the deadline, seconds since the epoch."""
        return self.certificate.plan.request.deadline

    @property
    def is_over(self) -> bool:
        """Return whether nothing will run any more."""
        return self.finished or bool(self.failure)

    def find_key(self, task: int) -> str:
        """Return the key that frames of ``task`` are signed with; PeerFault for an unknown task."""
        key = self.routes.keys.get(task)
        if key is None:
            raise PeerFault(f"frame of {self.id} names task {task}, which its plan does not have")
        return key

    def check_tensor(self, port: PortId, length_bytes: int) -> None:
        """Raise PeerFault unless a local task reads this port and its tensors have this size."""
        expected = self.routes.sources.get(port)
        if expected is None or port[0] in self.sessions:
            raise PeerFault(
                f"nobody may send port {port[1]} of task {port[0]} of {self.id} to this node"
            )
        if not expected.accepts(length_bytes):
            raise PeerFault(
                f"port {port[1]} of task {port[0]} of {self.id} is {expected}, "
                f"not {length_bytes} bytes"
            )

    def record_run(self, run: Run, outputs: Sequence[Tensor], times: tuple[int, int, int]) -> None:
        """Account for a finished run; ``times`` are started, ended and sent in nanoseconds."""
        digests = self.digests[run.task]
        digests.add_inputs([tensor.data for tensor in run.inputs])
        digests.add_outputs([tensor.data for tensor in outputs])
        if len(self.spans) < limits.MAX_SPANS:
            received = max((tensor.arrived_ns for tensor in run.inputs), default=times[0])
            self.spans.append((run.task, run.step, received, *times))

    def keep_for_client(self, sealed: bytes) -> None:
        """Remember a frame for a client that is not connected, or connects again."""
        self.outbox.append(sealed)
        self.outbox_bytes += len(sealed)
        while self.outbox_bytes > limits.OUTBOX_BYTES and len(self.outbox) > 1:
            self.outbox_bytes -= len(self.outbox.popleft())

    def make_completion(self, node: str, salt: bytes) -> Completion:
        """Return what this node commits to; ``salt`` are 32 random bytes."""
        return Completion(
            execution_id=self.id,
            node=node,
            steps=self.steps or 0,
            tasks=tuple(
                TaskCommitment(
                    task=task,
                    task_id=self.manifest.tasks[task].task_id,
                    inputs=self.digests[task].inputs,
                    outputs=self.digests[task].outputs,
                    state=self.states.get(task, EMPTY_DIGEST),
                )
                for task in sorted(self.sessions)
            ),
            salt="0x" + salt.hex(),
        )

    def make_traces(self, node: str) -> Iterator[tuple[int, Trace]]:
        """Yield the spans in traces that fit a frame, with the number of traces still to come."""
        size = limits.SPANS_PER_FRAME
        chunks = [self.spans[i : i + size] for i in range(0, len(self.spans), size)] or [[]]
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
                for task, step, received, started, ended, sent in chunk
            )
            yield (
                len(chunks) - 1 - index,
                Trace(execution_id=self.id, node=node, spans=spans),
            )


def make_execution(
    certificate: PlanCertificate,
    manifest: Manifest,
    node: str,
    first_session: int,
    grants: asyncio.Task[Grants],
) -> Execution:
    """Return an execution at its beginning. Raises PeerFault when plan and manifest do not fit."""
    plan = certificate.plan
    routes = compute_routes(plan, manifest, node)
    mine = [task.index for task in routes.tasks]
    if not mine:
        raise PeerFault(f"the plan of {plan.request.execution_id} gives no task to {node}")
    return Execution(
        id=plan.request.execution_id,
        certificate=certificate,
        manifest=manifest,
        routes=routes,
        sessions={index: first_session + offset for offset, index in enumerate(mine)},
        grants=grants,
        digests={
            index: Digests(len(manifest.tasks[index].inputs), len(manifest.tasks[index].outputs))
            for index in mine
        },
        logs={
            (index, port): PortLog(
                plan.request.execution_id,
                index,
                port,
                measure_record(output.spec),
                plan.request.steps,
            )
            for index in mine
            for port, output in enumerate(manifest.tasks[index].outputs)
        },
    )


def get_first_task(execution: Execution) -> int:
    """Return the task under which this node signs frames that belong to none in particular."""
    return min(execution.sessions, default=CLIENT)
