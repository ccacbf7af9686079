"""What the worker runs next: the run that is due first, and others of the same task beside it.

The queue says which run is due first. The execution's next steps go into the same pass where their
inputs are here already, as when a task that was taken over catches up; otherwise runs of the same
task that other executions have ready do. Nobody waits for a batch to fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from splitup.core import tuning
from splitup.graph.gates import compute_zero_step
from splitup.graph.manifest import Task
from splitup.protocol.execution.task_queue import Run, Tensor
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.kept.executions import Execution
from splitup_node.execution.kept.parts import RowSymbol
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.worker_pool import Workers

Batch = Sequence[tuple[Execution, Run]]
get_data = attrgetter("data")


class BatchScheduler:
    """Chooses the batches that a node's worker runs."""

    def __init__(
        self,
        workers: Workers,
        table: ExecutionTable,
        programs: Mapping[str, int],  # task_id -> program; changes as tasks are loaded
        get_state_limit: Callable[[], int],  # bytes that states may take on the device
    ) -> None:
        self._workers = workers
        self._table = table
        self._queue = table.queue
        self._programs = programs
        self._get_state_limit = get_state_limit

    def take_batch(self) -> Batch:
        """Return the runs to start now, none when nothing is ready.

        A run whose gate is zero is returned alone: it needs no worker.
        """
        while (run := self._queue.next()) is not None:
            execution = self._table.by_id[run.execution_id]
            execution.life.use(self._table.now_s())
            if not run.step:
                self._make_room(execution, run.task)
            if execution.life.is_over:
                continue
            if run.gate is not None:
                return [(execution, run)]
            if run.is_followed:
                if following := self._take_following(execution, run):
                    return [(execution, run), *following]
            if not self._queue.ready:
                return [(execution, run)]
            batch = [(execution, run), *self._take_others(execution, run)]
            # an execution may have been failed since, to make room for another one's state
            batch = [(one, its_run) for one, its_run in batch if not one.life.is_over]
            if batch:
                return batch
        return []

    def make_requests(self, batch: Batch) -> list[RunRequest]:
        """Return the worker's requests for a batch."""
        requests = []
        for execution, run in batch:
            program = self._programs[execution.manifest.tasks[run.task].task_id]
            inputs = list(map(get_data, run.inputs))
            requests.append(RunRequest(execution.parts[run.task].session, program, inputs))
        return requests

    def _make_room(self, execution: Execution, task: int) -> None:
        """Fail idle executions when the state that begins with this run does not fit otherwise.

        Those that were used least recently are failed, unless all were used just now: then the new
        one fails, and its client chooses another node.
        """
        part = execution.parts[task]
        if part.state_bytes:
            return
        needed_bytes = execution.manifest.tasks[task].state_bytes
        spared_s = execution.life.used_at_s - tuning.SESSION_SPARE_S
        holding = [one for one in self._table.by_id.values() if one.state_bytes]
        for idle in sorted(holding, key=lambda one: one.life.used_at_s):
            used_bytes = sum(one.state_bytes for one in holding)
            if used_bytes + needed_bytes <= self._get_state_limit():
                break
            if idle is not execution and idle.life.used_at_s < spared_s:
                reason = "its session was idle and its state had to make room for another's"
                self._table.fail_slowest(idle, reason)
        part.state_bytes = needed_bytes

    def _take_following(self, execution: Execution, first: Run) -> list[tuple[Execution, Run]]:
        """Return the execution's next steps that are ready too, as many as one pass takes."""
        program = self._programs[execution.manifest.tasks[first.task].task_id]
        if not self._workers.merges(program):
            return []
        has_room = _make_row_count(execution.parts[first.task].symbols, first)
        end = first.step + tuning.MERGE_STEPS
        runs = self._queue.take_following(first, lambda run: run.step < end and has_room(run))
        return [(execution, run) for run in runs]

    def _take_others(self, execution: Execution, first: Run) -> list[tuple[Execution, Run]]:
        """Return runs of the same task that other executions have ready, as many as fit."""
        task_id = execution.manifest.tasks[first.task].task_id
        width = self._workers.get_width(self._programs[task_id])
        if width == 1:
            return []
        taken = {first.execution_id}
        has_room = _make_row_count(execution.parts[first.task].symbols, first)

        def is_wanted(run: Run) -> bool:
            other = self._table.by_id[run.execution_id].manifest.tasks[run.task]
            if len(taken) >= width or run.execution_id in taken or other.task_id != task_id:
                return False
            if not has_room(run):
                return False
            taken.add(run.execution_id)
            return True

        others = []
        for run in self._queue.take_with(is_wanted):
            other = self._table.by_id[run.execution_id]
            other.life.use(self._table.now_s())
            if not run.step:
                self._make_room(other, run.task)
            others.append((other, run))
        return others


def compute_gated_step(execution: Execution, run: Run, gate: Tensor) -> tuple[Run, RunAnswer]:
    """Return a run whose gate is zero with the inputs it counts as having, and its answer."""
    task = execution.manifest.tasks[run.task]
    assert task.gate is not None  # the queue knows the gate from the manifest
    specs = [port.spec for port in task.inputs], [port.spec for port in task.outputs]
    inputs, outputs = compute_zero_step(*specs, task.gate, len(gate.data))
    now_ns = time.time_ns()
    tensors = tuple(Tensor(b"", data, gate.arrived_ns) for data in inputs)
    return replace(run, inputs=tensors), RunAnswer(now_ns, now_ns, outputs)


def has_all_rows(task: Task, inputs: Sequence[bytes | memoryview]) -> bool:
    """Return whether a step has all the rows that the task's declared operations are for."""
    return sum(len(data) for data in inputs) == sum(port.nbytes for port in task.inputs)


def _make_row_count(symbols: Sequence[RowSymbol], first: Run) -> Callable[[Run], bool]:
    """Return a function that adds a run's rows to those of ``first``, and returns if they fit."""
    rows = [symbol.count(first) for symbol in symbols]

    def has_room(run: Run) -> bool:
        nonlocal rows
        total = [count + symbol.count(run) for count, symbol in zip(rows, symbols, strict=True)]
        if any(count > one.most for count, one in zip(total, symbols, strict=True)):
            return False
        rows = total
        return True

    return has_room
