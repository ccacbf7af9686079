"""An execution on its node: what was agreed, and the objects that own what changes.

``Execution`` never changes: what does has one writer each. Who sends and reads what is in
``Routing``, the client's words are in ``EarnedClaims``, what was computed in
``ExecutionRecord``, how it ends in ``Life``, and what the client may have missed in ``Outbox``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from splitup.core import tuning
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.plans import PlanCertificate
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.storage.log_store import LogStore
from splitup_node.execution.kept.claims import EarnedClaims
from splitup_node.execution.kept.parts import Part, make_part
from splitup_node.execution.kept.record import ExecutionRecord
from splitup_node.execution.kept.routing import Routing


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


class Life:
    """When an execution was used last, and how it ends: finished, or failed for a reason."""

    def __init__(self) -> None:
        self.used_at_s = 0.0  # when a step ran last
        self.ended_at_s = 0.0  # when all steps had run, or it failed
        self.is_over = False  # no more frames are taken
        self.failure = ""

    def use(self, now_s: float) -> None:
        """Note that a step begins or ends, or that a task does."""
        self.used_at_s = now_s

    def end(self, now_s: float) -> None:
        """Note that no step is left to run; logs may still have to be stored."""
        self.ended_at_s = now_s

    def finish(self) -> None:
        """Note that everything is stored."""
        self.is_over = True

    def fail(self, reason: str, now_s: float) -> None:
        """Take no more frames, for this reason."""
        self.failure, self.is_over, self.ended_at_s = reason, True, now_s


@dataclass(slots=True)
class AnswerPause:
    """When the client's probes are answered again."""

    until: float = 0.0  # of the event loop's clock
    is_asked: bool = False  # somebody waits for the answer then


@dataclass(frozen=True, slots=True)
class Execution:
    """Everything a node holds for one execution. Without parts the node is only a fallback."""

    id: str
    certificate: PlanCertificate
    manifest: Manifest
    node: str
    executor_map: ExecutorMap
    store: LogStore
    parts: dict[int, Part]  # by task
    routing: Routing
    claims: EarnedClaims
    record: ExecutionRecord
    outbox: Outbox
    life: Life
    answer_pause: AnswerPause

    @property
    def client_key(self) -> str:
        """Return the Ed25519 key of the client."""
        return self.certificate.plan.request.client_key

    @property
    def deadline_s(self) -> int:
        """Return the deadline, seconds since the epoch."""
        return self.certificate.plan.request.deadline

    @property
    def state_bytes(self) -> int:
        """Return the bytes of its states on the device."""
        return 0 if self.life.is_over else sum(part.state_bytes for part in self.parts.values())

    def add_part(self, task: int, session: int, send_from: int = 0) -> Part:
        """Begin to run a task; steps before ``send_from`` were sent by another node already."""
        outlets = self.routing.begin(task, send_from)
        part = make_part(task, self.manifest.tasks[task], session, outlets)
        self.parts[task] = part
        return part

    def drop_part(self, task: int) -> Part:
        """Return a task's part, which another node runs from now on."""
        self.routing.end(task)
        return self.parts.pop(task)


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
        store=store,
        parts=parts,
        routing=Routing(plan, manifest, node, executor_map),
        claims=EarnedClaims(plan, manifest, node, executor_map, parts),
        record=ExecutionRecord(plan.request.execution_id, node, store),
        outbox=Outbox(),
        life=Life(),
        answer_pause=AnswerPause(),
    )


OpenStore = Callable[[PlanCertificate, Manifest, ExecutorMap], LogStore]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]  # starts a background task
Schedule = Callable[[], None]  # starts the next batch, when there is one


def get_first_task(execution: Execution) -> int:
    """Return the task under which this node signs frames that belong to none in particular."""
    return min(execution.parts, default=CLIENT)
