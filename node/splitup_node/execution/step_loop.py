"""A node's step: take inputs that arrived, schedule what is ready, run it, publish the outputs.

``StepLoop`` reads in this order. No task waits in a loop: a socket's callback enters at
``on_frame`` and the worker's callback at ``_on_answers``, and both go on to ``schedule``. So a
token passes through a node without a task switch. Hashing for the commitment, logs and traces come
after the next run has been started; the store, the journal and the chain never come before it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from splitup.core import limits
from splitup.core.errors import SplitUpError, Unavailable
from splitup.core.throughput import Rate
from splitup.net.links import Link
from splitup_node.execution.batches import Batch, BatchScheduler, compute_gated_step, get_data
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.finishing import FinishedRun, Finisher
from splitup_node.execution.inbox import Inbox
from splitup_node.execution.outputs import Outputs
from splitup_node.fault_injection import crash_point
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import WorkerLost
from splitup_node.worker.worker_pool import Workers

Answer = RunAnswer | SplitUpError


@dataclass(slots=True)
class WorkCount:
    """How many runs the worker made, and how long they took; steps with a zero gate need none."""

    runs: int = 0
    compute_ns: int = 0

    def add(self, duration_ns: int) -> None:
        """Count one run."""
        self.runs += 1
        self.compute_ns += duration_ns

    def to_dict(self) -> dict[str, int]:
        """Return the fields for a JSON report, in whole microseconds."""
        return {"runs": self.runs, "compute_us": self.compute_ns // 1000}


class StepLoop:
    """Takes frames, keeps the worker busy with one batch after the other, and publishes outputs.

    What can wait (verifications, recovery after a crash) runs while no batch is ready.
    """

    def __init__(
        self,
        workers: Workers,
        table: ExecutionTable,
        inbox: Inbox,
        scheduler: BatchScheduler,
        outputs: Outputs,
        finisher: Finisher,
    ) -> None:
        self._workers = workers
        self._table = table
        self._queue = table.queue
        self._inbox = inbox
        self._scheduler = scheduler
        self._outputs = outputs
        self._finisher = finisher
        self._background: deque[tuple[Sequence[RunRequest], asyncio.Future[list[RunAnswer]]]] = (
            deque()
        )
        self._is_schedule_due = False  # ``schedule`` is called once this callback has ended
        self._is_busy = False
        self._is_paused = False
        self._idle = asyncio.Event()
        self._run_ns = 0  # moving average of the duration of one run
        self.live = WorkCount()
        self.background = WorkCount()
        self.speed = Rate()  # of operations

    # ---- the step ------------------------------------------------------------------------------

    def on_frame(self, link: Link, data: bytes) -> None:
        """Take the inputs in one message of a peer, then schedule."""
        self._inbox.take(link, data)
        if self._is_busy:
            return
        if len(self._queue.executions) == 1:  # nothing could join a batch
            self.schedule()
        elif not self._is_schedule_due:
            # all that arrived together is read first: it may go into one batch
            self._is_schedule_due = True
            asyncio.get_running_loop().call_soon(self._schedule_due)

    def schedule(self) -> None:
        """Start the batch that is due first, unless one is running already."""
        while not (self._is_busy or self._is_paused) and (self._queue.ready or self._background):
            if not self._workers.is_running:
                return
            batch = self._scheduler.take_batch()
            if not batch:
                self._run_background()
                return
            execution, run = batch[0]
            if run.gate is None:
                self._is_busy = True
                crash_point("run")
                requests = self._scheduler.make_requests(batch)
                self._workers.run_together(requests, partial(self._on_answers, batch))
            else:  # the gate is zero: the outputs are known without a run
                run, answer = compute_gated_step(execution, run, run.gate)
                self._publish([(execution, run)], [answer])

    def _on_answers(self, batch: Batch, answers: Sequence[Answer]) -> None:
        """Publish what the worker computed, then schedule."""
        self._is_busy = False
        self._idle.set()
        self._publish(batch, answers)
        self.schedule()
        # readers and the worker do not wait for it
        asyncio.get_running_loop().call_soon(self._count, batch, answers)

    def _publish(self, batch: Batch, answers: Sequence[Answer]) -> None:
        """Send every run's outputs to their readers, and take them for the tasks of this node."""
        finished = []
        for (execution, run), answer in zip(batch, answers, strict=True):
            if execution.life.is_over or run.task not in execution.parts:
                continue  # the execution ended, or the task moved to another node, meanwhile
            on_stored = partial(self._finisher.check_complete, execution)
            try:
                if isinstance(answer, SplitUpError):
                    raise answer
                outputs = self._outputs.publish(execution, run, answer.outputs, on_stored)
            except SplitUpError as error:
                self._table.fail(run.execution_id, run.task, run.step, str(error))
                continue
            finished.append(
                FinishedRun(execution, run, outputs, answer.started_ns, answer.ended_ns)
            )
        self._outputs.flush()
        sent_ns = time.time_ns()
        for one in finished:
            try:
                self._queue.finish(one.run, one.outputs)
            except Unavailable as error:
                self._table.fail(one.execution.id, one.run.task, one.run.step, str(error))
        if finished:
            asyncio.get_running_loop().call_soon(self._finisher.record, finished, sent_ns)

    # ---- when to schedule ----------------------------------------------------------------------

    def _schedule_due(self) -> None:
        self._is_schedule_due = False
        self.schedule()

    def pause(self) -> None:
        """Start no more runs."""
        self._is_paused = True

    def resume(self) -> None:
        """Start runs again."""
        self._is_paused = False
        self.schedule()

    async def wait_idle(self) -> None:
        """Wait until no run is under way."""
        while self._is_busy:
            self._idle.clear()
            await self._idle.wait()

    def on_worker_lost(self, reason: str) -> None:
        """Pause, and fail the background runs that wait."""
        self._is_paused = True
        self._is_busy = False
        self._idle.set()
        waiting, self._background = self._background, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(WorkerLost(reason))

    # ---- background runs -----------------------------------------------------------------------

    async def run_background(self, requests: Sequence[RunRequest]) -> list[RunAnswer]:
        """Run consecutive steps of a session, in one pass, when no live run is ready.

        Raises TaskFailed or WorkerLost.
        """
        future: asyncio.Future[list[RunAnswer]] = asyncio.get_running_loop().create_future()
        self._background.append((requests, future))
        self.schedule()
        return await future

    def _run_background(self) -> None:
        while self._background:
            requests, future = self._background.popleft()
            if future.done():
                continue
            self._is_busy = True
            self._workers.run_together(requests, partial(self._on_background, future))
            return

    def _on_background(
        self, future: asyncio.Future[list[RunAnswer]], answers: Sequence[Answer]
    ) -> None:
        self._is_busy = False
        self._idle.set()
        computed = [answer for answer in answers if isinstance(answer, RunAnswer)]
        for answer in computed:
            self.background.add((answer.ended_ns - answer.started_ns) // len(answers))
        if not future.done():
            if len(computed) == len(answers):
                future.set_result(computed)
            else:
                future.set_exception(next(a for a in answers if isinstance(a, SplitUpError)))
        self.schedule()

    # ---- how busy the node is ------------------------------------------------------------------

    def has_executions(self) -> bool:
        """Return whether a token may have to wait for a background run."""
        return bool(self._queue.executions)

    @property
    def queue_ms(self) -> int:
        """Return the estimated duration of the runs that wait, in milliseconds."""
        return (len(self._queue.ready) + len(self._background)) * self._run_ns // 1_000_000

    @property
    def speed_mflops(self) -> int:
        """Return 10^6 operations a second of the latest steps with all rows, 0 before the first."""
        return self.speed.per_ms(1000 * limits.MAX_SPEED_MFLOPS) // 1000

    def _count(self, batch: Batch, answers: Sequence[Answer]) -> None:
        for (execution, run), answer in zip(batch, answers, strict=True):
            if isinstance(answer, SplitUpError):
                continue
            duration_ns = (answer.ended_ns - answer.started_ns) // len(batch)
            self.live.add(duration_ns)
            self._run_ns = (7 * self._run_ns + duration_ns) // 8 if self._run_ns else duration_ns
            part = execution.parts.get(run.task)
            if part and sum(map(len, map(get_data, run.inputs))) == part.full_bytes:
                self.speed.add(execution.manifest.tasks[run.task].flops, duration_ns)
