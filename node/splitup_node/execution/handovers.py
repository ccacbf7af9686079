"""Takeovers: another node runs a task from now on, or this one does."""

from __future__ import annotations

import asyncio
import logging

from splitup.core.errors import SplitUpError
from splitup.messages.completions import SignedTakeover
from splitup.protocol.execution.routes import get_sources
from splitup_node.execution.catch_up import Replay
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.finishing import Finisher
from splitup_node.execution.kept.executions import Execution
from splitup_node.execution.outputs import Outputs
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.takeovers")


class Handovers:
    """Applies the client's decisions about who runs a task."""

    def __init__(
        self,
        workers: Workers,
        table: ExecutionTable,
        outputs: Outputs,
        replay: Replay,
        finisher: Finisher,
    ) -> None:
        self._workers = workers
        self._table = table
        self._queue = table.queue
        self._outputs = outputs
        self._replay = replay
        self._finisher = finisher

    def give_up(self, execution: Execution, signed: SignedTakeover) -> None:
        """Let another node run a task of this one, as members say: the client has not told us."""
        if _is_replaced(execution, signed):
            self.take_over(execution, signed, b"")

    def take_over(self, execution: Execution, signed: SignedTakeover, sealed: bytes) -> None:
        """Let another node, or this one, run a task.

        ``sealed`` is the client's frame, b"" if others passed the takeover on.
        """
        task = signed.takeover.task
        before = execution.executor_map.get_author(task)
        if not execution.executor_map.apply(signed):
            return
        if _is_replaced(execution, signed):
            self._table.listener.on_replaced(execution, signed)
        if execution.life.ended_at_s:
            return  # everything has run; only its log is still being stored
        after = execution.executor_map.get_author(task)
        reader = execution.routing.find_readers((after,))
        _log.info("task %d of %s: %s takes over from %s", task, execution.id, after, before)
        self._queue.renew(execution.id, task)
        if task in execution.parts:
            self._give_up_part(execution, task)
        execution.routing.renew({task: sealed} if sealed else {})
        if after == execution.node:
            self._table.listener.on_taken(execution, signed)
            self._begin_part(execution, task, signed.takeover.first_step)
            return
        for source in dict.fromkeys(get_sources(execution.manifest, task)):
            if source[0] in execution.parts:
                if sealed:  # the new executor must know of the takeover before the tensors come
                    self._outputs.send(reader, sealed)
                self._outputs.resend(execution, source, reader)

    def _give_up_part(self, execution: Execution, task: int) -> None:
        part = execution.drop_part(task)
        self._queue.drop_task(execution.id, task)
        self._workers.drop([part.session])
        execution.claims.keep_lost(part)
        execution.record.writer.flush()  # the client may have what it wants by now, and end nothing
        if not execution.parts:
            self._table.listener.on_failed(execution)
        else:
            asyncio.get_running_loop().call_soon(self._finisher.check_complete, execution)

    def _begin_part(self, execution: Execution, task: int, first_step: int) -> None:
        """Run a task from its first step on, out of its inputs' logs."""
        had_parts = bool(execution.parts)
        try:
            self._table.check_can_run(execution, task)
            local = next(t for t in execution.routing.routes.tasks if t.index == task)
            self._queue.assign(execution.id, [local], execution.certificate.plan.request.steps)
            self._queue.extend(execution.id, execution.claims.delivered)
            if execution.claims.steps is not None:
                self._queue.end(execution.id, execution.claims.steps)
        except SplitUpError as error:
            self._table.fail(execution.id, task, first_step, str(error))
            return
        execution.add_part(task, self._table.new_session(), send_from=first_step)
        execution.life.use(self._table.now_s())
        if not had_parts:
            self._table.listener.on_begun(execution)
        self._outputs.open_links(execution)
        outlets = execution.parts[task].outlets
        readers = tuple(sorted({reader for outlet in outlets for reader in outlet.readers}))
        for sealed in execution.routing.takeovers.values():  # before tensors that follow from them
            self._outputs.send(readers, sealed)
        self._replay.start(execution, task)


def _is_replaced(execution: Execution, signed: SignedTakeover) -> bool:
    """Return whether a takeover names a candidate after this node."""
    tasks, takeover = execution.certificate.plan.tasks, signed.takeover
    names = tasks[takeover.task][: takeover.candidate] if takeover.task < len(tasks) else ()
    return execution.node in names
