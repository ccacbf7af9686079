"""What follows a run off the critical path: logs, digests, traces, and the end of the execution."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from splitup.core import tuning
from splitup.core.errors import SplitUpError
from splitup.messages.frames import FrameKind
from splitup.net.signed_frames import make_message_frame
from splitup.protocol.execution.task_queue import Run, Tensor
from splitup_node.execution.catch_up import Replay
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.kept.executions import Execution, Spawn, get_first_task
from splitup_node.fault_injection import crash_point
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.finishing")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run, its outputs, and when it was computed (Unix time)."""

    execution: Execution
    run: Run
    outputs: Sequence[Tensor]
    started_ns: int
    ended_ns: int


class Finisher:
    """Records runs for the commitment, and finishes executions that have run all their steps."""

    def __init__(
        self, workers: Workers, table: ExecutionTable, replay: Replay, spawn: Spawn
    ) -> None:
        self._workers = workers
        self._table = table
        self._queue = table.queue
        self._replay = replay
        self._spawn = spawn
        self._finishing: set[asyncio.Task[None]] = set()

    def record(self, batch: Sequence[FinishedRun], sent_ns: int) -> None:
        """Add runs to the logs, traces and digests; ``sent_ns`` is when their outputs left."""
        crash_point("published")
        for one in batch:
            execution, run = one.execution, one.run
            execution.record.writer.settle()
            part = execution.parts.get(run.task)
            if execution.life.failure or part is None:
                continue
            received = one.started_ns if not run.inputs else 0
            for tensor in run.inputs:
                received = max(received, tensor.arrived_ns)
            times = (received, one.started_ns, one.ended_ns, sent_ns)
            execution.record.spans.add(run.task, run.step, times)
            execution.life.use(self._table.now_s())
            self._replay.on_run(execution, run.task)
            on_done = partial(self._on_recorded, execution)
            execution.record.add(part.digests, run.inputs, one.outputs, on_done)

    def check_complete(self, execution: Execution) -> None:
        """Finish an execution if all its steps here have run, are recorded and stored."""
        if execution.life.is_over or execution.life.ended_at_s or not execution.parts:
            return  # or being finished already
        if execution.record.storing_bytes or not self._queue.is_complete(execution.id):
            return
        claims = execution.claims
        if any(part.digests.steps < (claims.steps or 0) for part in execution.parts.values()):
            return
        assert claims.end is not None
        if claims.steps and not claims.make(claims.end.end):
            _log.warning("the client of %s ends it with inputs that it did not send", execution.id)
            claims.conclude(None)  # it is settled by an interim end, or by what was computed
            return
        self._start_finishing(execution)

    def stop_unended(self, execution: Execution, now_s: float) -> None:
        """Finish an execution by what was computed, or by the client's latest interim end.

        The final end has not come, and will not come in time.
        """
        if execution.life.is_over or execution.life.ended_at_s or not execution.claims.has_work:
            return
        signed = execution.claims.find_substitute()
        if signed is None:
            return
        steps = signed.end.steps
        is_late = now_s > execution.deadline_s - tuning.STOP_MARGIN_S
        why = "its deadline is near: ask for a later one" if is_late else "the client was idle"
        reason = f"{why}; the steps computed, and paid, are {steps}"
        execution.life.fail(reason, now_s)
        _log.info("execution %s: %s", execution.id, execution.life.failure)
        if execution.parts:  # else the client knows, since it chose another node
            self._table.clients.tell_failure(execution, get_first_task(execution), steps)
        execution.claims.conclude(signed)
        self._queue.drop(execution.id)
        self._start_finishing(execution)

    def _start_finishing(self, execution: Execution) -> None:
        execution.life.end(self._table.now_s())
        task = self._spawn(self._finish(execution))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def wait(self) -> None:
        """Wait until the executions that are being finished are."""
        await asyncio.gather(*self._finishing)

    def _on_recorded(self, execution: Execution) -> None:
        if execution.claims.end is not None:
            self.check_complete(execution)

    async def _finish(self, execution: Execution) -> None:
        task, steps = get_first_task(execution), execution.claims.steps or 0
        try:
            await self._digest_states(execution)
        except SplitUpError as error:
            reason = f"its final state cannot be read: {error}"
            self._table.fail(execution.id, task, steps, reason)
            return
        for remaining, trace in execution.record.spans.make_traces(execution.id, execution.node):
            frame = make_message_frame(FrameKind.TRACE, execution.id, task, remaining, trace)
            self._table.clients.tell(execution, frame)
        try:
            await execution.record.writer.finish()
        except SplitUpError as error:
            if execution.life.is_over:  # it was stopped, and the client knows
                self._table.give_up(execution)
            self._table.fail(execution.id, task, steps, f"its log cannot be stored: {error}")
            return
        crash_point("logged")
        execution.life.finish()
        self._table.release(execution)
        self._table.listener.on_finished(execution)

    async def _digest_states(self, execution: Execution) -> None:
        """Note what the states are at the end: they are committed to like the outputs."""
        claims = execution.claims
        if claims.end is None or not claims.end.end.final:
            return
        for part in list(execution.parts.values()):
            if execution.manifest.tasks[part.task].state_bytes and claims.steps:
                part.digests.state = await self._workers.digest_state(part.session)
