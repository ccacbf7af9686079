"""A node's scheduler: tensors in, in any order, and the next run out. No I/O, no clock.

Every task of an execution runs its steps strictly in order, because of its state; tasks and
executions interleave. A tensor may come early, late, twice or never. A second tensor for a slot
with different bytes is a fault of its sender while the first one waits, and ignored after its use.

Executions share the node fairly (start-time fair queueing, Goyal et al. 1996): a run is due at the
later of now and the end of its execution's last run, in virtual time, where one whole step of any
execution takes equally long. Among runs due together those on long critical paths go first. Runs of
other executions may be batched with the run that is due first (``take_with``) without delaying it,
and so may its own next steps (``take_following``), when a task that was taken over catches up.

A client that has signed for no step gets at most ``limits.INTERIM_STEPS``, and as many more as it
has signed for, up to ``limits.UNPAID_STEPS``. So who does not pay gets little.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, Unavailable
from splitup.core.places import Places
from splitup.core.tensors import is_zero
from splitup.messages.base import CLIENT
from splitup.messages.frames import Frame, Seal

PortId = tuple[int, int]  # (producer task or CLIENT, port)

_STEP: Final = 2**20  # virtual time of one step of all local tasks of an execution


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A task as its executor's queue sees it."""

    index: int
    inputs: tuple[PortId, ...]  # the source of every input, in order
    outputs: int
    head_start: int  # 0 … tuning.QUEUE_HEAD_START, by the length of the path behind it
    gate: PortId | None = None  # if this is zero, a step needs no other input and is not run


@dataclass(frozen=True, slots=True)
class Tensor:
    """One step of one port; ``arrived_ns`` is when it was complete (Unix time, for traces)."""

    digest: bytes
    data: bytes | memoryview
    arrived_ns: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One step of one task with all its inputs.

    If ``gate`` is set, it is a zero gate: the step is not run and has no other inputs.
    """

    execution_id: str
    task: int
    step: int
    inputs: tuple[Tensor, ...]
    gate: Tensor | None = None
    is_followed: bool = field(default=False, compare=False)  # something of the next step is here


@dataclass(slots=True, eq=False)
class _Lane:
    """One task: its steps run strictly in order; it has input buffers of its own."""

    execution: _Execution
    task: LocalTask
    ports: frozenset[PortId]  # that it reads
    waiting: dict[int, dict[PortId, Tensor]] = field(default_factory=dict)  # by step
    next_step: int = 0
    busy: bool = False  # in the heap or running
    is_dropped: bool = False

    def has_client_step(self, first: int) -> bool:
        """Return whether the client sent inputs of step ``first`` or a later one."""
        if not any(port[0] == CLIENT for port in self.ports):
            return False
        later = (tensors for step, tensors in self.waiting.items() if step >= first)
        return self.next_step > first or any(port[0] == CLIENT for some in later for port in some)

    def find_shut(self, step: int) -> Tensor | None:
        """Return the gate of a step if it has arrived and is zero."""
        if self.task.gate is None:
            return None
        gate = self.waiting.get(step, {}).get(self.task.gate)
        return gate if gate is not None and is_zero(gate.digest, len(gate.data)) else None

    def is_ready(self, step: int) -> bool:
        """Return whether a step has all its inputs, or a gate that needs no other."""
        if len(self.waiting.get(step, ())) == len(self.ports):
            return True
        return self.task.gate is not None and self.find_shut(step) is not None

    def is_due(self, step: int) -> bool:
        """Return whether a step that was ready still is, and is to be run.

        It may have run in a batch, the execution or the task have ended here, or a successor of
        the gate's producer have sent another gate.
        """
        if self.is_dropped or step != self.next_step or step >= self.execution.limit:
            return False
        if self.task.gate is None or self.is_ready(step):
            return True
        self.busy = False
        return False

    def make_run(self, step: int) -> Run:
        """Return a step that is ready."""
        shut = None if self.task.gate is None else self.find_shut(step)
        tensors = self.waiting.get(step, {})
        inputs = () if shut is not None else tuple(map(tensors.__getitem__, self.task.inputs))
        is_followed = step + 1 in self.waiting
        return Run(self.execution.id, self.task.index, step, inputs, shut, is_followed)


@dataclass(slots=True, eq=False)
class _Execution:
    id: str
    max_steps: int
    limit: int = 0  # up to which step tasks may run now
    lanes: dict[int, _Lane] = field(default_factory=dict)
    readers: dict[PortId, list[_Lane]] = field(default_factory=dict)
    renewed: set[PortId] = field(default_factory=set)  # ports whose producer was replaced
    delivered: int = 0  # steps, as the client has signed
    end: int | None = None
    buffered_bytes: int = 0
    due: int = 0  # virtual time of its next run, see _STEP

    def check_step(self, step: int) -> None:
        """Raise PeerFault for a step that was not paid for."""
        if step >= self.max_steps:
            raise PeerFault(f"step {step} of {self.id} is beyond its {self.max_steps} steps")

    def set_limit(self) -> None:
        """Compute ``limit`` again, after a change of what it follows from."""
        unpaid = min(limits.UNPAID_STEPS, limits.INTERIM_STEPS + self.delivered)
        most = min(self.max_steps, self.delivered + unpaid)
        self.limit = most if self.end is None else self.end


class TaskQueue:
    """The runs of all executions assigned to one node."""

    def __init__(self, *, max_bytes: int = tuning.QUEUE_BYTES) -> None:
        self._max_bytes = max_bytes
        self.buffered_bytes = 0  # of all tensors
        self.tell_surplus: Callable[[str], object] = lambda _: None  # before one gives way
        self._executions: dict[str, _Execution] = {}
        self.executions = self._executions.keys()  # those that have tasks here
        # a heap of the runs that are ready: due, minus head start, sequence, lane, step
        self.ready: list[tuple[int, int, int, _Lane, int]] = []
        self._sequence = 0
        self._now = 0  # when the last run was due

    def assign(self, execution_id: str, tasks: Sequence[LocalTask], max_steps: int) -> None:
        """Accept tasks of an execution; may be called again, known tasks are ignored.

        Raises Unavailable when ``tuning.QUEUE_EXECUTIONS`` are assigned already.
        """
        execution = self._executions.get(execution_id)
        if execution is None:
            if len(self._executions) >= tuning.QUEUE_EXECUTIONS:
                raise Unavailable(f"the node works on {len(self._executions)} executions already")
            execution = self._executions[execution_id] = _Execution(execution_id, max_steps)
            execution.set_limit()
        for task in tasks:
            if task.index not in execution.lanes:
                lane = _Lane(execution, task, frozenset(task.inputs))
                execution.lanes[task.index] = lane
                for port in lane.ports:
                    execution.readers.setdefault(port, []).append(lane)
                self._schedule(lane)

    def offer(
        self, execution_id: str, port: PortId, step: int, tensor: Tensor, *, task: int | None = None
    ) -> bool:
        """Take one tensor for all its readers here, or for ``task`` alone.

        Returns False when all of them had it. A tensor that a reader has used already is ignored,
        whatever its bytes, and so is one beyond the end. Raises PeerFault for a port that no local
        task reads, a step that was not paid for, or a second tensor with other bytes, and
        Unavailable when the buffers are full and no other execution has more of them.
        """
        execution = self._executions.get(execution_id) or self._get(execution_id)
        lanes = execution.readers.get(port, [])
        if task is not None:
            lanes = [lane for lane in lanes if lane.task.index == task]
        if not lanes:
            raise PeerFault(
                f"no task here reads port {port[1]} of task {port[0]} of {execution_id}"
            )
        if step >= execution.max_steps:  # one call less for each tensor
            execution.check_step(step)
        is_new = False
        for lane in lanes:
            is_new |= self._take(lane, port, step, tensor)
        return is_new

    def reserve(self, execution_id: str, step: int, nbytes: int) -> Callable[[], None]:
        """Count a tensor that is being fetched like one that waits; return what ends that.

        Raises PeerFault and Unavailable as ``offer`` does.
        """
        execution = self._get(execution_id)
        execution.check_step(step)
        self._make_room(execution, nbytes)
        self._count(execution, nbytes)

        def release() -> None:
            if self._executions.get(execution_id) is execution:
                self._count(execution, -nbytes)

        return release

    def renew(self, execution_id: str, task: int) -> None:
        """Expect a task's outputs from another node, whose tensors replace unused ones."""
        execution = self._executions.get(execution_id)
        if execution is not None:
            execution.renewed |= {port for port in execution.readers if port[0] == task}

    def end(self, execution_id: str, steps: int) -> None:
        """Set the number of steps; raise PeerFault if it contradicts what the client said or sent.

        Other nodes may have sent tensors of more steps, so that a task without inputs of the client
        may have run them: that is no fault of the client.
        """
        execution = self._get(execution_id)
        if execution.end == steps:
            return
        ahead = any(lane.has_client_step(steps) for lane in execution.lanes.values())
        if execution.end is not None or steps > execution.max_steps or ahead:
            raise PeerFault(
                f"execution {execution_id} cannot end after {steps} steps: it has more steps, or "
                "another end was stated"
            )
        execution.end = steps
        execution.set_limit()
        for lane in execution.lanes.values():
            for step in [step for step in lane.waiting if step >= steps]:
                self._discard(lane, step)
            self._schedule(lane)

    def extend(self, execution_id: str, delivered: int) -> None:
        """Run further steps for a client that has signed for ``delivered`` ones."""
        execution = self._get(execution_id)
        execution.delivered = max(execution.delivered, delivered)
        execution.set_limit()
        for lane in execution.lanes.values():
            self._schedule(lane)

    def next(self) -> Run | None:
        """Return the run to start now, None when nothing is ready."""
        while self.ready:
            due, _, _, lane, step = heapq.heappop(self.ready)
            if lane.is_due(step):
                self._now = max(self._now, due)
                return lane.make_run(step)
        return None

    def take_with(self, is_wanted: Callable[[Run], bool]) -> list[Run]:
        """Return ready runs that ``is_wanted`` accepts, to be batched with the last ``next`` run.

        They are offered in the order in which ``next`` would return them. A refused run keeps its
        position: ``next`` always returns the run that is due first.
        """
        taken = []
        for entry in sorted(self.ready):
            lane, step = entry[3:]
            if not lane.is_due(step):
                continue
            run = lane.make_run(step)
            if run.gate is None and is_wanted(run):
                taken.append(run)
                self.ready.remove(entry)
        if taken:
            heapq.heapify(self.ready)
        return taken

    def take_following(self, run: Run, is_wanted: Callable[[Run], bool]) -> list[Run]:
        """Return the steps behind the last ``next`` run whose inputs are here, to be run with it.

        They end before the first one that ``is_wanted`` refuses or whose gate is zero. All have to
        be finished in order, like runs that ``next`` returned.
        """
        lane = self._get(run.execution_id).lanes.get(run.task)
        taken: list[Run] = []
        if lane is None or not lane.ports:
            return taken
        for step in range(run.step + 1, lane.execution.limit):
            if not lane.is_ready(step):
                break
            following = lane.make_run(step)
            if following.gate is not None or not is_wanted(following):
                break
            taken.append(following)
        return taken

    def finish(self, run: Run, outputs: Sequence[Tensor]) -> bool:
        """Release a run's inputs and give its outputs to their local readers.

        Returns False when the task was dropped while it ran: its outputs are not needed any more.
        """
        execution = self._executions.get(run.execution_id)
        lane = None if execution is None else execution.lanes.get(run.task)
        if execution is None or lane is None or lane.next_step != run.step:
            return False
        lane.busy = False
        lane.next_step += 1
        if run.step in lane.waiting:
            self._discard(lane, run.step)
        for port, tensor in enumerate(outputs):
            for reader in execution.readers.get((run.task, port), ()):
                self._take(reader, (run.task, port), run.step, tensor)
        self._schedule(lane)
        return True

    def is_complete(self, execution_id: str) -> bool:
        """Return whether every local task has run all steps."""
        execution = self._executions.get(execution_id)
        return (
            execution is not None
            and execution.end is not None
            and all(lane.next_step >= execution.end for lane in execution.lanes.values())
        )

    def get_progress(self, execution_id: str) -> dict[int, int]:
        """Return the number of finished steps by task; empty for an unknown execution."""
        execution = self._executions.get(execution_id)
        lanes = {} if execution is None else execution.lanes
        return {index: lane.next_step for index, lane in lanes.items()}

    def is_ready(self, execution_id: str, task: int) -> bool:
        """Return whether a task's next step has all its inputs, or is running."""
        lane = self._find(execution_id, task)
        return lane is not None and lane.busy

    def has(self, execution_id: str, port: PortId, step: int, task: int) -> bool:
        """Return whether a task has used or buffered a tensor."""
        lane = self._find(execution_id, task)
        return lane is not None and (step < lane.next_step or port in lane.waiting.get(step, ()))

    def drop(self, execution_id: str) -> None:
        """Drop an execution and its tensors."""
        execution = self._executions.pop(execution_id, None)
        if execution is not None:
            self.buffered_bytes -= execution.buffered_bytes
            self.ready = [entry for entry in self.ready if entry[3].execution is not execution]
            heapq.heapify(self.ready)
            # lanes refer to their execution: their tensors would stay until the next full
            # collection, which an idle process does not come to
            execution.lanes.clear()
            execution.readers.clear()

    def drop_task(self, execution_id: str, task: int) -> None:
        """Drop one task, which another node runs from now on."""
        lane = self._find(execution_id, task)
        if lane is None:
            return
        lane.is_dropped = True
        for step in list(lane.waiting):
            self._discard(lane, step)
        for port in lane.ports:
            lane.execution.readers[port].remove(lane)
        del lane.execution.lanes[task]
        if not lane.execution.lanes:
            self.drop(execution_id)

    def _get(self, execution_id: str) -> _Execution:
        execution = self._executions.get(execution_id)
        if execution is None:
            raise PeerFault(f"execution {execution_id} is not assigned to this node")
        return execution

    def _find(self, execution_id: str, task: int) -> _Lane | None:
        execution = self._executions.get(execution_id)
        return None if execution is None else execution.lanes.get(task)

    def _take(self, lane: _Lane, port: PortId, step: int, tensor: Tensor) -> bool:
        """Keep one tensor for one lane; return False when it is not needed."""
        execution = lane.execution
        if step < lane.next_step or (execution.end is not None and step >= execution.end):
            return False
        size = len(tensor.data)
        tensors = lane.waiting.get(step)
        known = None if tensors is None else tensors.get(port)
        if known is not None:
            if known.digest == tensor.digest:
                return False
            if port not in execution.renewed:
                raise PeerFault(
                    f"two different tensors for step {step} of port {port[1]} of task {port[0]} "
                    f"of {execution.id}"
                )
        more = size - (0 if known is None else len(known.data))
        if self.buffered_bytes + more > self._max_bytes:
            self._make_room(execution, more)
        if tensors is None:
            tensors = lane.waiting[step] = {}
        tensors[port] = tensor
        execution.buffered_bytes += more
        self.buffered_bytes += more
        if not lane.busy:
            self._schedule(lane)
        return True

    def _make_room(self, execution: _Execution, more: int) -> None:
        """Let the executions with the most tensors give way to one that would then have fewer."""
        while self.buffered_bytes + more > self._max_bytes:
            largest = max(self._executions.values(), key=lambda one: one.buffered_bytes)
            if largest.buffered_bytes <= execution.buffered_bytes + more:
                raise Unavailable(
                    f"{self.buffered_bytes} bytes of tensors are buffered here already"
                )
            self.tell_surplus(largest.id)
            self.drop(largest.id)

    def _discard(self, lane: _Lane, step: int) -> None:
        """Forget the tensors of a step."""
        size = 0
        for tensor in lane.waiting.pop(step).values():
            size += len(tensor.data)
        lane.execution.buffered_bytes -= size
        self.buffered_bytes -= size

    def _count(self, execution: _Execution, more: int) -> None:
        """Add to the bytes that an execution has here."""
        execution.buffered_bytes += more
        self.buffered_bytes += more

    def _schedule(self, lane: _Lane) -> None:
        """Put the lane's next step into the heap if it is ready and may run."""
        execution, step = lane.execution, lane.next_step
        if lane.busy or step >= execution.limit:
            return
        if not lane.ports and execution.end is None:
            return  # the number of steps of a task without inputs is not known yet
        is_shut = lane.task.gate is not None and lane.find_shut(step) is not None
        if not is_shut and len(lane.waiting.get(step, ())) < len(lane.ports):
            return
        lane.busy = True
        self._sequence += 1
        due = max(self._now, execution.due)
        execution.due = due + (0 if is_shut else _STEP // len(execution.lanes))
        heapq.heappush(self.ready, (due, -lane.task.head_start, self._sequence, lane, step))


@dataclass(slots=True)
class _Early:
    begun_s: float
    frames: list[tuple[Frame, Seal]] = field(default_factory=list)
    size: int = 0
    is_full: bool = False  # what was sent is dropped


class EarlyFrames:
    """Frames of known peers that came before their plan, bounded for each peer and execution.

    What a peer sends takes nothing from what another one sends, of the same execution or not. What
    has no room is dropped, and the connection stays: a node that was restarted gets what its peers
    sent last, also of executions that have ended. If the plan comes after all, the node misses
    inputs, and the client replaces it.
    """

    def __init__(self, max_streams: int = tuning.EARLY_STREAMS) -> None:
        self._places: Places[str] = Places(max_streams)  # executions, by sender
        self._executions: dict[str, dict[str, _Early]] = {}  # by sender

    def add(self, sender: str, frame: Frame, seal: Seal, now_s: float) -> None:
        """Keep a frame, or drop all of this peer's for the execution when it has too many."""
        execution_id = frame.execution_id
        early = self._executions.get(execution_id, {}).get(sender)
        if early is None:
            shed = self._places.take(sender, execution_id)
            if shed == (sender, execution_id):
                return
            if shed is not None:
                self._drop(*shed)
            early = self._executions.setdefault(execution_id, {})[sender] = _Early(now_s)
        size = len(frame.payload) + len(seal.signed)
        too_many = len(early.frames) >= tuning.MAX_EARLY_FRAMES
        if early.is_full or too_many or early.size + size > tuning.MAX_EARLY_BYTES:
            early.is_full = True
            early.frames.clear()
            return
        alone = replace(
            frame, payload=bytes(frame.payload)
        )  # a copy, so that the received buffer is freed
        early.frames.append((alone, seal))
        early.size += size

    def take(self, execution_id: str) -> list[tuple[str, Frame, Seal]]:
        """Remove and return an execution's frames with their senders, each sender's in order."""
        senders = self._executions.pop(execution_id, {})
        for sender in senders:
            self._places.leave(sender, execution_id)
        return [(sender, *kept) for sender, early in senders.items() for kept in early.frames]

    def expire(self, now_s: float, expected: Collection[str] = ()) -> None:
        """Drop the frames whose plan has not come for ``tuning.EARLY_S``.

        Those of ``expected`` executions, whose tasks are being loaded, stay.
        """
        for execution_id, senders in list(self._executions.items()):
            if execution_id in expected:
                continue
            for sender, early in list(senders.items()):
                if now_s > early.begun_s + tuning.EARLY_S:
                    self._places.leave(sender, execution_id)
                    self._drop(sender, execution_id)

    def _drop(self, sender: str, execution_id: str) -> None:
        senders = self._executions[execution_id]
        del senders[sender]
        if not senders:
            del self._executions[execution_id]
