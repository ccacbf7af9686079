"""Puts an execution's output frames together: a machine, (frame, seal) in, facts out.

A frame counts only when the node that runs its task now signed it. Duplicates are normal and
silent, and so is what comes late from a node that was replaced; two different tensors for one slot
are the producer's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitup.core.errors import BadSignature, PeerFault
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import Manifest
from splitup.messages.frames import Frame, FrameKind, Seal, TensorChunk
from splitup.messages.plans import Plan
from splitup.messages.progress import Progress, TaskFailure, Trace
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.execution.task_queue import PortId

Verify = Callable[[Seal, str], None]  # (signature, public key); raises BadSignature
# (execution, port, step, digest): what came in chunks, if it is that
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
    """A part of a node's spans; ``is_last`` when the node has no more to tell."""

    trace: Trace
    is_last: bool


Fact = StepDone | FetchNeeded | TaskFailure | TraceReceived | Progress


@dataclass(slots=True)
class _Slot:
    digest: bytes
    data: bytes | memoryview | None  # None while a stored tensor is being fetched


@dataclass(slots=True)
class OutputCollector:
    """Collects ``steps`` steps of the graph outputs of one plan."""

    manifest: Manifest
    plan: Plan
    verify: Verify
    executor_map: ExecutorMap
    take_chunks: TakeChunks
    _slots: dict[tuple[int, int, int], _Slot] = field(default_factory=dict)
    _first_missing: int = 0
    _done: set[int] = field(default_factory=set)  # beyond the first that is missing
    _specs: dict[PortId, TensorSpec] = field(init=False)
    _keys: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._specs = {(port.task, port.port): port.spec for port in self.manifest.outputs}
        self._keys = {entry.node: entry.signing_key for entry in self.plan.nodes}

    def receive(self, frame: Frame, seal: Seal) -> list[Fact]:
        """Take one frame; raise PeerFault when it does not belong here or is not its producer's."""
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
        """Return whether a chunk of an output, from ``node``, is worth its room.

        Raises PeerFault when nobody may send it here.
        """
        spec = self._specs.get((chunk.task, chunk.port))
        if (
            chunk.execution_id != self.plan.request.execution_id
            or spec is None
            or not spec.accepts(chunk.length)
            or chunk.step >= self.plan.request.steps
        ):
            raise PeerFault(f"node {node} sent chunks of what is no output here", peer=node)
        if node != self.executor_map.get_author(chunk.task):
            if self.executor_map.takeovers:
                return False  # it was replaced
            raise PeerFault(f"node {node} sent chunks of task {chunk.task}", peer=node)
        return not self._is_known(chunk.task, chunk.port, chunk.step)

    def renew(self, task: int) -> None:
        """Expect the outputs of ``task`` from another node: forget those of unfinished steps."""
        self._slots = {key: slot for key, slot in self._slots.items() if key[0] != task}

    def receive_stored(self, need: FetchNeeded, data: bytes | memoryview) -> list[Fact]:
        """Take a tensor fetched from the store, whose digest the caller has checked."""
        slot = self._slots.get((need.task, need.port, need.step))
        if slot is None or slot.data is not None or slot.digest != need.digest:
            return []
        slot.data = data
        return self._complete(need.step)

    def _receive_tensor(self, frame: Frame, seal: Seal) -> list[Fact]:
        spec = self._specs.get((frame.task, frame.port))
        if spec is None or frame.step >= self.plan.request.steps:
            raise PeerFault(
                f"a node sent task {frame.task} port {frame.port} step {frame.step}, "
                "which is no output of this execution"
            )
        executor = self.executor_map.get_author(frame.task)
        if not spec.accepts(frame.length):
            raise PeerFault(
                f"node {executor} sent {frame.length} bytes for an output of {spec}",
                peer=executor,
            )
        try:
            self._verify(executor, seal)
        except BadSignature:
            if self.executor_map.is_replaced(frame.task, seal.signed, seal.signature):
                return []
            raise
        key = (frame.task, frame.port, frame.step)
        data: bytes | memoryview | None = frame.payload
        if frame.stored or frame.direct:
            port = (frame.task, frame.port)
            data = self.take_chunks(frame.execution_id, port, frame.step, frame.digest)
        if self._is_known(*key):
            known = self._slots.get(key)
            if known is not None and known.digest != frame.digest:
                raise PeerFault(
                    f"node {executor} sent two different outputs for task {frame.task}, "
                    f"step {frame.step}",
                    peer=executor,
                    evidence=seal.signed + seal.signature,
                )
            return []
        if data is not None:
            self._slots[key] = _Slot(frame.digest, data)
            return self._complete(frame.step)
        if frame.direct:
            return []  # not whole: the store will have it
        self._slots[key] = _Slot(frame.digest, None)
        return [
            FetchNeeded(frame.task, frame.port, executor, frame.step, frame.digest, frame.length)
        ]

    def _is_known(self, task: int, port: int, step: int) -> bool:
        """Return whether an output is here, or being fetched."""
        is_done = step < self._first_missing or step in self._done
        return is_done or (task, port, step) in self._slots

    def _complete(self, step: int) -> list[Fact]:
        outputs: list[bytes | memoryview] = []
        for port in self.manifest.outputs:
            slot = self._slots.get((port.task, port.port, step))
            if slot is None or slot.data is None:
                return []
            outputs.append(slot.data)
        for port in self.manifest.outputs:
            self._slots.pop((port.task, port.port, step), None)
        self._done.add(step)
        while self._first_missing in self._done:
            self._done.discard(self._first_missing)
            self._first_missing += 1
        return [StepDone(step, tuple(outputs))]

    def _verify(self, node: str, seal: Seal) -> None:
        self.verify(seal, self._keys.get(node) or self.plan.node_of(node).signing_key)


def get_input_consumers(
    manifest: Manifest, executors: Sequence[str]
) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the executors of the tasks that take graph inputs, by the inputs (by index) they take.

    Who reads the same inputs gets the same frames; whoever runs the earliest task comes first.
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
