"""Collects an execution's output frames. A pure state machine: signed frames in, facts out.

A frame counts only when it is signed by the node that currently runs its task. Duplicates and late
frames of replaced nodes are ignored; two different tensors for one output are the producer's fault.
So is a frame that misstates the steps before it: the last frame of every output then proves all
that its producer sent (``splitup.messages.frames.Delivery``), and the client shows it at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitup.core import limits
from splitup.core.errors import BadSignature, PeerFault
from splitup.core.tensors import NO_STEPS, TensorSpec, extend_steps
from splitup.graph.manifest import Manifest
from splitup.messages.frames import Frame, FrameKind, Seal, TensorChunk, make_delivery
from splitup.messages.plans import Plan
from splitup.messages.progress import Progress, TaskFailure, Trace
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.execution.task_queue import PortId

Verify = Callable[[Seal, str], None]  # (signature, public key); raises BadSignature
# (execution, port, step, digest): the tensor that came in chunks, if its digest is this
TakeChunks = Callable[[str, PortId, int, bytes], memoryview | None]


@dataclass(frozen=True, slots=True)
class StepDone:
    """All graph outputs of one step, as bytes in the manifest's order."""

    step: int
    outputs: tuple[bytes | memoryview, ...]


@dataclass(frozen=True, slots=True)
class FetchNeeded:
    """An output too large for a frame: read it from the store, then call ``receive_stored``."""

    task: int
    port: int
    node: str  # who produced it
    step: int
    digest: bytes
    length: int


@dataclass(frozen=True, slots=True)
class TraceReceived:
    """A part of a node's spans; ``is_last`` when no more follow."""

    trace: Trace
    is_last: bool


Fact = StepDone | FetchNeeded | TaskFailure | TraceReceived | Progress


@dataclass(slots=True)
class _Received:
    """The steps of one output that its executor sent, in order."""

    next_step: int = 0
    total: bytes | None = NO_STEPS  # up to ``next_step``; None before a successor's first frame
    ahead: dict[int, tuple[bytes, bytes, Seal]] = field(default_factory=dict)
    latest: Seal | None = None  # of the step before ``next_step``
    kept: dict[int, Seal] = field(default_factory=dict)  # for interim ends, by number of steps

    def add(self, frame: Frame, seal: Seal) -> bool:
        """Take a frame; return False if one misstates the steps before it."""
        if frame.step >= self.next_step:
            self.ahead.setdefault(frame.step, (frame.before, frame.digest, seal))
        while self.next_step in self.ahead:
            before, digest, self.latest = self.ahead.pop(self.next_step)
            if self.total not in (None, before):
                return False
            self.total = extend_steps(before, digest)
            self.next_step += 1
            if self.next_step % limits.INTERIM_STEPS == 0:
                self.kept[self.next_step] = self.latest
        return True


@dataclass(slots=True)
class OutputCollector:
    """Collects ``steps`` steps of the graph outputs of one plan."""

    manifest: Manifest
    plan: Plan
    verify: Verify
    executor_map: ExecutorMap
    take_chunks: TakeChunks
    # outputs of unfinished steps by (task, port, step), None while a stored one is being fetched
    _slots: dict[tuple[int, int, int], bytes | memoryview | None] = field(default_factory=dict)
    _digests: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # of all announced
    received_steps: int = 0  # with all outputs, without a gap
    _done: set[int] = field(default_factory=set)  # beyond the first that is missing
    _specs: dict[PortId, TensorSpec] = field(init=False)
    _received: dict[PortId, _Received] = field(init=False)
    _keys: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._specs = {(port.task, port.port): port.spec for port in self.manifest.outputs}
        self._received = {port: _Received() for port in self._specs}
        self._keys = {entry.node: entry.signing_key for entry in self.plan.nodes}

    def receive(self, frame: Frame, seal: Seal) -> list[Fact]:
        """Take one frame; raise PeerFault unless its producer sent it for this execution."""
        if frame.execution_id != self.plan.request.execution_id:
            raise PeerFault(f"a frame of execution {frame.execution_id} arrived on another's link")
        if frame.kind is FrameKind.TENSOR:
            return self._receive_tensor(frame, seal)
        if frame.kind is FrameKind.ERROR:
            failure = TaskFailure.parse(bytes(frame.payload))
            self._verify(failure.node, seal)
            if failure.task >= len(self.manifest.tasks):
                raise PeerFault(f"node {failure.node} reports a task that the model lacks")
            return [failure]
        if frame.kind is FrameKind.TRACE:
            trace = Trace.parse(bytes(frame.payload))
            self._verify(trace.node, seal)
            tasks = self.plan.tasks
            if any(s.task >= len(tasks) or trace.node not in tasks[s.task] for s in trace.spans):
                raise PeerFault(f"node {trace.node} reports times of tasks it did not run")
            return [TraceReceived(trace, is_last=frame.step == 0)]
        if frame.kind is FrameKind.PROGRESS:
            progress = Progress.parse(bytes(frame.payload))
            self._verify(progress.node, seal)
            return [progress]
        raise PeerFault(f"a node sent a {frame.kind.name} frame, which only clients do")

    def check_chunk(self, node: str, chunk: TensorChunk) -> bool:
        """Return whether a chunk of an output, from ``node``, should be kept.

        Raises PeerFault when the node may not send it.
        """
        spec = self._specs.get((chunk.task, chunk.port))
        if (
            chunk.execution_id != self.plan.request.execution_id
            or spec is None
            or not spec.accepts(chunk.length)
            or chunk.step >= self.plan.request.steps
        ):
            raise PeerFault(f"node {node} sent chunks of what is no output", peer=node)
        if node != self.executor_map.get_author(chunk.task):
            if self.executor_map.takeovers:
                return False  # it was replaced
            raise PeerFault(f"node {node} sent chunks of task {chunk.task}", peer=node)
        key = (chunk.task, chunk.port, chunk.step)
        return not self._is_done(chunk.step) and key not in self._slots

    def renew(self, task: int) -> None:
        """Expect the outputs of ``task`` from another node; forget those of unfinished steps."""
        for known in (self._slots, self._digests):
            for key in [key for key in known if key[0] == task]:
                del known[key]
        for port in self._received:
            if port[0] == task:
                kept = self._received[port].kept
                self._received[port] = _Received(self.received_steps, None, kept=kept)

    def take_interim_deliveries(self, steps: int) -> tuple[str, ...]:
        """Return the deliveries after so many steps, which are kept no longer; () if one lacks."""
        received = [self._received[port.task, port.port] for port in self.manifest.outputs]
        seals = [one.kept.pop(steps, None) for one in received]
        found = tuple(make_delivery(seal) for seal in seals if seal is not None)
        return found if len(found) == len(seals) else ()

    def make_deliveries(self, steps: int) -> tuple[str, ...]:
        """Return the deliveries for all steps, by output; "" where a step is missing."""
        received = [self._received[port.task, port.port] for port in self.manifest.outputs]
        return tuple(
            make_delivery(one.latest) if one.latest and one.next_step == steps else ""
            for one in received
        )

    def receive_stored(self, need: FetchNeeded, data: bytes | memoryview) -> list[Fact]:
        """Take a tensor fetched from the store, whose digest the caller has checked."""
        key = (need.task, need.port, need.step)
        is_expected = key in self._slots and self._slots[key] is None
        if not is_expected or self._digests.get(key) != need.digest:
            return []
        self._slots[key] = data
        return self._complete(need.step)

    def _receive_tensor(self, frame: Frame, seal: Seal) -> list[Fact]:
        spec = self._specs.get((frame.task, frame.port))
        if spec is None or frame.step >= self.plan.request.steps:
            raise PeerFault(
                f"a node sent task {frame.task} port {frame.port} step {frame.step}, "
                "which is no output of this execution"
            )
        key = (frame.task, frame.port, frame.step)
        executor = self.executor_map.get_author(frame.task)
        if frame.length not in spec.sizes:
            raise PeerFault(
                f"node {executor} sent {frame.length} bytes for an output of {spec}",
                peer=executor,
            )
        try:
            self.verify(seal, self._keys[executor])
        except BadSignature:
            if self.executor_map.is_replaced(frame.task, seal.signed, seal.signature):
                return []
            raise
        is_done = self._is_done(frame.step)
        if not is_done and self._digests.setdefault(key, frame.digest) != frame.digest:
            raise PeerFault(
                f"node {executor} sent two different outputs for task {frame.task}, "
                f"step {frame.step}",
                peer=executor,
                evidence=seal.signed + seal.signature,
            )
        if not seal.is_single or not self._received[key[:2]].add(frame, seal):
            raise PeerFault(
                f"node {executor} did not sign what it sent before step {frame.step} of "
                f"task {frame.task}",
                peer=executor,
                evidence=seal.signed + seal.signature,
            )
        data: bytes | memoryview | None = frame.payload
        if frame.stored or frame.direct:
            port = (frame.task, frame.port)
            data = self.take_chunks(frame.execution_id, port, frame.step, frame.digest)
        if is_done or key in self._slots:
            return []
        if data is not None:
            self._slots[key] = data
            return self._complete(frame.step)
        if frame.direct:
            return []  # incomplete: it will come from the store
        self._slots[key] = None
        return [
            FetchNeeded(frame.task, frame.port, executor, frame.step, frame.digest, frame.length)
        ]

    def _is_done(self, step: int) -> bool:
        return step < self.received_steps or step in self._done

    def _complete(self, step: int) -> list[Fact]:
        outputs: list[bytes | memoryview] = []
        for port in self.manifest.outputs:
            data = self._slots.get((port.task, port.port, step))
            if data is None:
                return []
            outputs.append(data)
        for port in self.manifest.outputs:
            self._slots.pop((port.task, port.port, step), None)
            self._digests.pop((port.task, port.port, step), None)
        self._done.add(step)
        while self.received_steps in self._done:
            self._done.discard(self.received_steps)
            self.received_steps += 1
        return [StepDone(step, tuple(outputs))]

    def _verify(self, node: str, seal: Seal) -> None:
        self.verify(seal, self._keys.get(node) or self.plan.node_of(node).signing_key)


def get_input_consumers(
    manifest: Manifest, executors: Sequence[str]
) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the executors of the tasks that read graph inputs, grouped by the inputs they read.

    Keys are the inputs' indices. A group gets the same frames; groups are ordered by the earliest
    task.
    """
    wanted: dict[str, set[int]] = {}
    for task, node in zip(manifest.tasks, executors, strict=True):
        read = {getattr(entry.source, "input", None) for entry in task.inputs}
        ports = [index for index, port in enumerate(manifest.inputs) if port.name in read]
        if ports:
            wanted.setdefault(node, set()).update(ports)
    groups: dict[tuple[int, ...], tuple[str, ...]] = {}
    for node, indices in wanted.items():
        key = tuple(sorted(indices))
        groups[key] = (*groups.get(key, ()), node)
    return groups
