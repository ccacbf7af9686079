"""One execution at one node: its plan, its part in it, and the record of what it did."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from splitup.core import tuning
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.plans import PlanCertificate
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.storage.log_store import LogStore, LogWriter
from splitup_node.execution.claims import EarnedClaims
from splitup_node.execution.digests import Recorder
from splitup_node.execution.parts import Part, make_part
from splitup_node.execution.routing import Routing
from splitup_node.execution.spans import Spans


class Outbox:
    """The latest frames for a client that is not connected, or connects again."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.nbytes = 0

    def add(self, sealed: bytes) -> None:
        """Keep a frame, and drop the oldest ones beyond the bound."""
        self.frames.append(sealed)
        self.nbytes += len(sealed)
        while self.nbytes > tuning.OUTBOX_BYTES and len(self.frames) > 1:
            self.nbytes -= len(self.frames.popleft())

    def clear(self) -> None:
        """Drop all frames: who ends an execution has all outputs, or wants none."""
        self.frames.clear()
        self.nbytes = 0


@dataclass(slots=True)
class Execution:
    """Everything a node holds for one execution. Without parts the node is only a fallback.

    Who sends and reads what is in ``routing``, what is committed to in ``claims``.
    """

    id: str
    certificate: PlanCertificate
    manifest: Manifest
    node: str
    executor_map: ExecutorMap
    routing: Routing
    claims: EarnedClaims
    parts: dict[int, Part]  # by task
    store: LogStore
    writer: LogWriter
    recorder: Recorder = field(default_factory=Recorder)
    takeovers: dict[int, bytes] = field(default_factory=dict)  # the client's frames, by task
    publishing_bytes: int = 0  # of large tensors that are being stored
    spans: Spans = field(default_factory=Spans)
    outbox: Outbox = field(default_factory=Outbox)
    failure: str = ""
    is_over: bool = False  # finished, or failed
    ended_at_s: float = 0.0
    used_at_s: float = 0.0  # when the last step ran

    @property
    def client_key(self) -> str:
        """Return the Ed25519 key of the client."""
        return self.certificate.plan.request.client_key

    @property
    def deadline_s(self) -> int:
        """Return the deadline, seconds since the epoch."""
        return self.certificate.plan.request.deadline

    @property
    def sessions(self) -> list[int]:
        """Return the worker's sessions of this execution."""
        return [part.session for part in self.parts.values()]

    def fail(self, reason: str) -> None:
        """Take no more frames, for this reason."""
        self.failure, self.is_over = reason, True

    def add_part(self, task: int, session: int, send_from: int = 0) -> Part:
        """Begin to run a task; steps before ``send_from`` were sent by another node already."""
        outlets = self.routing.begin(task, send_from)
        gates = self.routing.routes.find_gates(task)
        part = make_part(task, self.manifest.tasks[task], session, outlets, gates)
        self.parts[task] = part
        return part

    def drop_part(self, task: int) -> Part:
        """Return a task's part, which another node runs from now on."""
        self.routing.end(task)
        return self.parts.pop(task)

    def reroute(self) -> None:
        """Compute who reads what again, after a takeover."""
        self.routing.renew()
        for task, part in self.parts.items():
            part.gates = self.routing.routes.find_gates(task)


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
    parts: dict[int, Part] = {}
    return Execution(
        id=plan.request.execution_id,
        certificate=certificate,
        manifest=manifest,
        node=node,
        executor_map=executor_map,
        routing=Routing(plan, manifest, node, executor_map),
        claims=EarnedClaims(plan, manifest, node, executor_map, parts),
        parts=parts,
        store=store,
        writer=LogWriter(plan.request.execution_id, node, store),
    )


OpenStore = Callable[[PlanCertificate, Manifest, ExecutorMap], LogStore]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]  # starts a background task
Schedule = Callable[[], None]  # starts the next batch, when there is one


def get_first_task(execution: Execution) -> int:
    """Return the task under which this node signs frames that belong to none in particular."""
    return min(execution.parts, default=CLIENT)
