"""What a node runs next: tensors in, runs out, whatever order the network chose. No I/O, no clock.

Every task of an execution runs its steps strictly in order (its state demands it); tasks and
executions interleave. A tensor may come early, late, twice or never; the same slot with other bytes
is a fault of the sender. Ready runs are ordered by arrival, minus a head start for long critical
paths: a run is overtaken by a bounded number of later ones only, so nothing starves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from splitup import limits
from splitup.errors import PeerFault, Unavailable

PortId = tuple[int, int]  # (producer task or CLIENT, port)

_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A task as its executor's queue sees it."""

    index: int
    inputs: tuple[PortId, ...]  # the source of every input, in order
    outputs: int
    head_start: int  # 0 … limits.QUEUE_HEAD_START, by the length of the path that waits for it


@dataclass(frozen=True, slots=True)
class Tensor:
    """One step of one port; ``arrived_ns`` is when it was complete (Unix time, for traces)."""

    digest: bytes
    data: bytes | memoryview
    arrived_ns: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One step of one task with everything it needs."""

    execution_id: str
    task: int
    step: int
    inputs: tuple[Tensor, ...]


@dataclass(slots=True)
class _Port:
    consumers: tuple[int, ...]
    waiting: dict[int, Tensor] = field(default_factory=dict)  # by step
    consumed: bytearray = field(default_factory=bytearray)  # digests of the steps that are gone


@dataclass(slots=True)
class _Execution:
    tasks: dict[int, LocalTask]
    ports: dict[PortId, _Port]
    max_steps: int
    next_step: dict[int, int]
    busy: set[int] = field(default_factory=set)  # tasks in the heap or running
    end: int | None = None
    buffered_bytes: int = 0


class TaskQueue:
    """The runs of all executions assigned to one node."""

    def __init__(self, *, max_bytes: int = limits.QUEUE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffered_bytes = 0
        self._executions: dict[str, _Execution] = {}
        # order, sequence, execution, task, step
        self._ready: list[tuple[int, int, str, int, int]] = []
        self._sequence = 0

    def __len__(self) -> int:
        """Return how many runs are ready."""
        return len(self._ready)

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of all tensors that wait."""
        return self._buffered_bytes

    def assign(self, execution_id: str, tasks: Sequence[LocalTask], max_steps: int) -> None:
        """Accept an execution's tasks; a second assignment of the same execution changes nothing.

        Raises Unavailable when ``limits.QUEUE_EXECUTIONS`` are assigned already.
        """
        if execution_id in self._executions:
            return
        if len(self._executions) >= limits.QUEUE_EXECUTIONS:
            raise Unavailable(f"the node works on {len(self._executions)} executions already")
        readers: dict[PortId, list[int]] = {}
        for task in tasks:
            for source in dict.fromkeys(task.inputs):
                readers.setdefault(source, []).append(task.index)
        self._executions[execution_id] = _Execution(
            tasks={task.index: task for task in tasks},
            ports={source: _Port(tuple(indices)) for source, indices in readers.items()},
            max_steps=max_steps,
            next_step={task.index: 0 for task in tasks},
        )

    def offer(self, execution_id: str, port: PortId, step: int, tensor: Tensor) -> bool:
        """Take one tensor; return False when it was there already.

        Raises PeerFault for a port that no local task reads, a step that was not paid for, or a
        second tensor with other bytes, and Unavailable when the buffers are full.
        """
        execution = self._get(execution_id)
        slot = execution.ports.get(port)
        if slot is None:
            raise PeerFault(
                f"no task here reads port {port[1]} of task {port[0]} of {execution_id}"
            )
        limit = execution.max_steps if execution.end is None else execution.end
        if step >= limit:
            raise PeerFault(f"step {step} of {execution_id} is beyond its {limit} steps")
        known = _get_digest(slot, step)
        if known is not None:
            if known != tensor.digest:
                raise PeerFault(
                    f"two different tensors for step {step} of port {port[1]} of task {port[0]} "
                    f"of {execution_id}"
                )
            return False
        self._store(execution, slot, step, tensor)
        for task in slot.consumers:
            self._schedule(execution_id, execution, task)
        return True

    def end(self, execution_id: str, steps: int) -> None:
        """Learn the number of steps; raise PeerFault when it contradicts what was said or run."""
        execution = self._get(execution_id)
        if execution.end == steps:
            return
        ahead = any(
            len(slot.consumed) > steps * _DIGEST_BYTES
            or any(step >= steps for step in slot.waiting)
            for slot in execution.ports.values()
        )
        if execution.end is not None or steps > execution.max_steps or ahead:
            raise PeerFault(f"execution {execution_id} cannot end after {steps} steps any more")
        execution.end = steps
        for task in execution.tasks:
            self._schedule(execution_id, execution, task)

    def next(self) -> Run | None:
        """Return the run to start now, None when nothing is ready."""
        while self._ready:
            _, _, execution_id, task, step = heapq.heappop(self._ready)
            execution = self._executions.get(execution_id)
            if execution is None or execution.next_step.get(task) != step:
                continue  # dropped meanwhile
            inputs = tuple(
                execution.ports[source].waiting[step] for source in execution.tasks[task].inputs
            )
            return Run(execution_id, task, step, inputs)
        return None

    def finish(self, run: Run, outputs: Sequence[Tensor]) -> None:
        """Take the outputs of a run to its local readers and let go of its inputs."""
        execution = self._executions.get(run.execution_id)
        if execution is None:
            return  # dropped while it ran
        execution.busy.discard(run.task)
        execution.next_step[run.task] = run.step + 1
        for source in dict.fromkeys(execution.tasks[run.task].inputs):
            self._release(execution, execution.ports[source])
        for port, tensor in enumerate(outputs):
            slot = execution.ports.get((run.task, port))
            if slot is not None:
                self._store(execution, slot, run.step, tensor)
                for task in slot.consumers:
                    self._schedule(run.execution_id, execution, task)
        self._schedule(run.execution_id, execution, run.task)

    def is_complete(self, execution_id: str) -> bool:
        """Return whether every local task has run every step there is."""
        execution = self._executions.get(execution_id)
        return (
            execution is not None
            and execution.end is not None
            and all(step == execution.end for step in execution.next_step.values())
        )

    def get_progress(self, execution_id: str) -> dict[int, int]:
        """Return the number of finished steps by task; empty for an unknown execution."""
        execution = self._executions.get(execution_id)
        return {} if execution is None else dict(execution.next_step)

    def drop(self, execution_id: str) -> None:
        """Forget an execution and its tensors."""
        execution = self._executions.pop(execution_id, None)
        if execution is not None:
            self._buffered_bytes -= execution.buffered_bytes
            self._ready = [entry for entry in self._ready if entry[2] != execution_id]
            heapq.heapify(self._ready)

    def _get(self, execution_id: str) -> _Execution:
        execution = self._executions.get(execution_id)
        if execution is None:
            raise PeerFault(f"execution {execution_id} is not assigned to this node")
        return execution

    def _store(self, execution: _Execution, slot: _Port, step: int, tensor: Tensor) -> None:
        size = len(tensor.data)
        if self._buffered_bytes + size > self._max_bytes:
            raise Unavailable(f"{self._buffered_bytes} bytes of tensors wait on this node already")
        slot.waiting[step] = tensor
        execution.buffered_bytes += size
        self._buffered_bytes += size

    def _release(self, execution: _Execution, slot: _Port) -> None:
        first_needed = min(execution.next_step[task] for task in slot.consumers)
        for step in range(len(slot.consumed) // _DIGEST_BYTES, first_needed):
            tensor = slot.waiting.pop(step)
            slot.consumed += tensor.digest
            execution.buffered_bytes -= len(tensor.data)
            self._buffered_bytes -= len(tensor.data)

    def _schedule(self, execution_id: str, execution: _Execution, index: int) -> None:
        if index in execution.busy:
            return
        task, step = execution.tasks[index], execution.next_step[index]
        if step >= (execution.max_steps if execution.end is None else execution.end):
            return
        if not task.inputs and execution.end is None:
            return  # a task without inputs has nothing that says how often it is wanted
        if any(step not in execution.ports[source].waiting for source in task.inputs):
            return
        execution.busy.add(index)
        self._sequence += 1
        order = self._sequence - task.head_start
        heapq.heappush(self._ready, (order, self._sequence, execution_id, index, step))


def _get_digest(slot: _Port, step: int) -> bytes | None:
    waiting = slot.waiting.get(step)
    if waiting is not None:
        return waiting.digest
    start = step * _DIGEST_BYTES
    return bytes(slot.consumed[start : start + _DIGEST_BYTES]) or None


@dataclass(slots=True)
class _Early:
    frames: list[tuple[str, bytes]] = field(default_factory=list)
    size: int = 0


class EarlyFrames:
    """Frames that came before their plan. Bounded: the oldest execution goes first."""

    def __init__(self, max_executions: int = limits.MAX_EARLY_EXECUTIONS) -> None:
        self._max_executions = max_executions
        self._executions: OrderedDict[str, _Early] = OrderedDict()

    def add(self, execution_id: str, sender: str, frame: bytes) -> None:
        """Keep a frame; raise Unavailable when the execution has too many."""
        early = self._executions.get(execution_id)
        if early is None:
            while len(self._executions) >= self._max_executions:
                self._executions.popitem(last=False)
            early = self._executions[execution_id] = _Early()
        too_many = len(early.frames) >= limits.MAX_EARLY_FRAMES
        if too_many or early.size + len(frame) > limits.MAX_EARLY_BYTES:
            raise Unavailable(f"too many frames of {execution_id} came before its plan")
        early.frames.append((sender, frame))
        early.size += len(frame)

    def take(self, execution_id: str) -> list[tuple[str, bytes]]:
        """Return and forget the frames of an execution with their senders, in order of arrival."""
        early = self._executions.pop(execution_id, None)
        return [] if early is None else early.frames
