"""One batch of runs after the other on the worker; what can wait runs in between.

The queue says which run is next; what other executions have ready of the same task goes with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from splitup.core import limits
from splitup.core.errors import SplitUpError
from splitup.core.throughput import Rate
from splitup.graph.gates import compute_zero_step
from splitup.graph.manifest import Task
from splitup.protocol.execution.task_queue import Run, TaskQueue, Tensor
from splitup_node.execution.executions import Execution
from splitup_node.fault_injection import crash_point
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import WorkerLost
from splitup_node.worker.worker_pool import Workers

OnStart = Callable[[Execution, Run], None]
OnAnswer = Callable[[Execution, Run, RunAnswer | SplitUpError], None]


@dataclass(slots=True)
class Tally:
    """How much ran on the worker; gates that were shut cost nothing."""

    runs: int = 0
    compute_ns: int = 0

    def add(self, duration_ns: int) -> None:
        """Count one run."""
        self.runs += 1
        self.compute_ns += duration_ns

    def to_dict(self) -> dict[str, int]:
        """Return the fields for a JSON report, in whole microseconds."""
        return {"runs": self.runs, "compute_us": self.compute_ns // 1000}


class Runs:
    """Keeps the worker busy.

    ``on_start`` is called before a run, ``on_answer`` after it, ``on_batch`` after all of a batch.
    """

    def __init__(
        self,
        supervisor: Workers,
        queue: TaskQueue,
        programs: Mapping[str, int],
        executions: Mapping[str, Execution],
        on_start: OnStart,
        on_answer: OnAnswer,
        on_batch: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._queue = queue
        self._programs = programs
        self._executions = executions
        self._on_start = on_start
        self._on_answer = on_answer
        self._on_batch = on_batch
        self._pumping = False  # soon
        self._background: deque[tuple[RunRequest, asyncio.Future[RunAnswer]]] = deque()
        self._busy = False
        self._paused = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.run_ns = 0  # moving average of one run
        self.live = Tally()
        self.background = Tally()  # verifications, and what was run again after a crash
        self.speed = Rate()  # operations

    @property
    def queue_ms(self) -> int:
        """Return the estimated work that waits, in milliseconds."""
        return (len(self._queue) + len(self._background)) * self.run_ns // 1_000_000

    @property
    def speed_mflops(self) -> int:
        """Return 10^6 operations a second of the latest full steps, 0 before the first."""
        return self.speed.per_ms(1000 * limits.MAX_SPEED_MFLOPS) // 1000

    def pause(self) -> None:
        """Start no more runs."""
        self._paused = True

    def resume(self) -> None:
        """Start runs again."""
        self._paused = False
        self.pump()

    async def wait_idle(self) -> None:
        """Wait until no run is under way."""
        await self._idle.wait()

    def pump_soon(self) -> None:
        """Start the next run when all that came with what is here now has been read.

        At once when it is the only execution's: nothing could go with it.
        """
        if self._queue.executions == 1:
            self.pump()
        elif not (self._pumping or self._busy):
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = False
        self.pump()

    def pump(self) -> None:
        """Start the next run, unless one is under way."""
        while not (self._busy or self._paused) and self._supervisor.is_running:
            run = self._queue.next()
            if run is None:
                self._pump_background()
                return
            execution = self._executions[run.execution_id]
            self._on_start(execution, run)
            if execution.is_over:
                continue
            task = execution.manifest.tasks[run.task]
            if run.gate is not None:
                self._on_answer(execution, *_answer_shut(task, run, run.gate))
                self._on_batch()
                continue
            batch = [(execution, run), *self._take_others(task, run)]
            batch = [(one, its) for one, its in batch if not one.is_over]
            if not batch:
                continue  # dropped to make room for another's state
            self._begin()
            crash_point("run")
            self._send(batch)

    def _take_others(self, task: Task, first: Run) -> list[tuple[Execution, Run]]:
        """Return what other executions have ready of a task, as much as one pass over it takes.

        Nobody waits for a batch to fill.
        """
        width = self._supervisor.get_width(self._programs[task.task_id])
        if width == 1 or not len(self._queue):
            return []
        taken = {first.execution_id}
        symbols = self._executions[first.execution_id].parts[first.task].symbols
        rows = [symbol.count(first) for symbol in symbols]

        def is_wanted(run: Run) -> bool:
            nonlocal rows
            other = self._executions[run.execution_id].manifest.tasks[run.task]
            if len(taken) >= width or run.execution_id in taken or other.task_id != task.task_id:
                return False
            total = [count + symbol.count(run) for count, symbol in zip(rows, symbols, strict=True)]
            if any(count > one.most for count, one in zip(total, symbols, strict=True)):
                return False
            taken.add(run.execution_id)
            rows = total
            return True

        others = []
        for run in self._queue.take_with(is_wanted):
            execution = self._executions[run.execution_id]
            self._on_start(execution, run)
            others.append((execution, run))
        return others

    def _send(self, batch: Sequence[tuple[Execution, Run]]) -> None:
        requests = [
            RunRequest(
                execution.parts[run.task].session,
                self._programs[execution.manifest.tasks[run.task].task_id],
                [tensor.data for tensor in run.inputs],
            )
            for execution, run in batch
        ]
        left = len(batch)

        def on_run(execution: Execution, run: Run, answer: RunAnswer | SplitUpError) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._end()
            self._on_answer(execution, run, answer)
            if not left:
                self._on_batch()
                self.pump()
            if isinstance(answer, RunAnswer):  # readers and the worker have waited long enough
                self._count(execution, run, (answer.ended_ns - answer.started_ns) // len(batch))

        handlers = [partial(on_run, execution, run) for execution, run in batch]
        if len(batch) == 1:
            self._supervisor.run(requests[0], handlers[0])
        else:
            self._supervisor.run_together(requests, handlers)

    def _count(self, execution: Execution, run: Run, duration_ns: int) -> None:
        self.live.add(duration_ns)
        self.run_ns = (7 * self.run_ns + duration_ns) // 8 if self.run_ns else duration_ns
        part = execution.parts.get(run.task)
        if part and sum(len(tensor.data) for tensor in run.inputs) == part.full_bytes:
            self.speed.add(execution.manifest.tasks[run.task].flops, duration_ns)

    async def run_background(
        self, session: int, program: int, inputs: Sequence[bytes | memoryview]
    ) -> RunAnswer:
        """Run one step when no live run is ready. Raises TaskFailed or WorkerLost."""
        future: asyncio.Future[RunAnswer] = asyncio.get_running_loop().create_future()
        self._background.append((RunRequest(session, program, inputs), future))
        self.pump()
        return await future

    def on_worker_lost(self, reason: str) -> None:
        """Pause, and fail what waits in the background."""
        self._paused = True
        self._end()
        waiting, self._background = self._background, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(WorkerLost(reason))

    def _begin(self) -> None:
        self._busy = True
        self._idle.clear()

    def _end(self) -> None:
        self._busy = False
        self._idle.set()

    def _pump_background(self) -> None:
        while self._background:
            request, future = self._background.popleft()
            if future.done():
                continue
            self._begin()
            self._supervisor.run(request, partial(self._on_background, future))
            return

    def _on_background(
        self, future: asyncio.Future[RunAnswer], answer: RunAnswer | SplitUpError
    ) -> None:
        self._end()
        if not future.done():
            if isinstance(answer, SplitUpError):
                future.set_exception(answer)
            else:
                self.background.add(answer.ended_ns - answer.started_ns)
                future.set_result(answer)
        self.pump()


def is_full(task: Task, inputs: Sequence[bytes | memoryview]) -> bool:
    """Return whether a step has all the rows that the task's declared operations are for."""
    return sum(len(data) for data in inputs) == sum(port.nbytes for port in task.inputs)


def _answer_shut(task: Task, run: Run, gate: Tensor) -> tuple[Run, RunAnswer]:
    """Return a step that its gate shuts with what its inputs count as, and its answer."""
    specs = [port.spec for port in task.inputs], [port.spec for port in task.outputs]
    assert task.gate is not None  # the queue knows it from here
    inputs, outputs = compute_zero_step(*specs, task.gate, len(gate.data))
    now_ns = time.time_ns()
    tensors = tuple(Tensor(b"", data, gate.arrived_ns) for data in inputs)
    return replace(run, inputs=tensors), RunAnswer(now_ns, now_ns, outputs)
