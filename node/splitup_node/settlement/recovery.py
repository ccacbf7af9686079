"""What a node does after a crash with the executions that it had not reported.

An execution that its client had ended is completed: inputs and most outputs are in the store, so
the tasks are run again from the logs, the node's own log is completed, and the digests are the same
as without the crash. An execution that was under way has been taken over by another node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitup.core import tuning
from splitup.core.errors import Refused, SplitUpError
from splitup.messages.completions import SignedEnd, SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import LogName
from splitup.protocol.execution.task_queue import LocalTask
from splitup.storage.journal import Journal
from splitup.storage.log_store import LogPatience
from splitup.storage.task_cache import TaskCache
from splitup_node.execution.engine import Engine
from splitup_node.execution.kept.executions import Execution, OpenStore, make_execution
from splitup_node.settlement.task_replay import TaskReplay, append_output, recompute
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.recovery")


@dataclass(frozen=True, slots=True)
class Unreported:
    """An execution of the node's last run; ``end`` is None when it was still under way."""

    certificate: PlanCertificate
    end: SignedEnd | None
    takeovers: tuple[SignedTakeover, ...]


def make_end_value(execution: Execution) -> dict[str, Any]:
    """Return what the journal stores at an execution's end."""
    takeovers = [
        signed.model_dump(mode="json") for signed in execution.executor_map.takeovers.values()
    ]
    end = None if execution.claims.end is None else execution.claims.end.model_dump(mode="json")
    return {"end": end, "takeovers": takeovers}


def read_unreported(journal: Journal, now_s: float) -> list[Unreported]:
    """Return the executions that were assigned and have no completion; delete expired ones."""
    completed = {execution_id for execution_id, _ in journal.items("completion")}
    ended = dict(journal.items("ended"))
    found = []
    for execution_id, value in journal.items("assignment"):
        certificate = PlanCertificate.from_value(value["certificate"])
        if execution_id in completed or certificate.plan.request.deadline <= now_s:
            for kind in ("assignment", "ended"):
                journal.delete(kind, execution_id)
            continue
        known = ended.get(execution_id, {"end": None, "takeovers": []})
        takeovers = tuple(SignedTakeover.from_value(entry) for entry in known["takeovers"])
        end = None if known["end"] is None else SignedEnd.from_value(known["end"])
        found.append(Unreported(certificate, end, takeovers))
    return found


@dataclass(frozen=True, slots=True)
class Recovery:
    """Completes executions that had ended before a crash."""

    node: str
    engine: Engine
    workers: Workers
    loaded_tasks: LoadedTasks
    cache: TaskCache
    open_store: OpenStore
    now_s: Callable[[], float]

    async def run(self, lost: Unreported) -> Execution:
        """Run every task of this node in an ended execution again; return it with its digests.

        Tries until the deadline is near, then raises the last error of loading, store or worker;
        at once when the gateway says that the execution is over.
        """
        deadline_s = lost.certificate.plan.request.deadline
        while True:
            try:
                return await self._try(lost)
            except SplitUpError as error:
                if isinstance(error, Refused) and error.is_final:
                    raise
                if self.now_s() + tuning.LOAD_RETRY_S / 10 > deadline_s:
                    raise
                _log.warning("an execution of the last run cannot be completed yet: %s", error)
            await asyncio.sleep(tuning.RPC_BACKOFF_MAX_S)

    async def _try(self, lost: Unreported) -> Execution:
        request = lost.certificate.plan.request
        manifest = await self.cache.fetch_manifest(request.model_id)
        execution = make_execution(lost.certificate, manifest, self.node, self.open_store)
        for signed in lost.takeovers:
            execution.executor_map.apply(signed)
            execution.routing.renew(signed.takeover.task)
        execution.claims.conclude(lost.end)
        patience = LogPatience(is_drawn=False, now_s=self.now_s)
        for local in execution.routing.routes.tasks:
            async with self.loaded_tasks.use(request.model_id, local.index) as program:
                await self._run_task(execution, local, program, patience)
        await execution.record.writer.finish()
        return execution

    async def _run_task(
        self, execution: Execution, local: LocalTask, program: int, patience: LogPatience
    ) -> None:
        task = local.index
        first = [await execution.record.writer.resume(task, port) for port in range(local.outputs)]

        async def log(step: int, outputs: Sequence[bytes | memoryview]) -> None:
            for port, data in enumerate(outputs):
                if step >= first[port]:
                    name = LogName.of(task, port, execution.node, step, apart=True)
                    await append_output(execution.record.writer, execution.store, name, data)

        part = execution.add_part(task, self.engine.table.new_session())
        replay = TaskReplay(
            execution.store,
            execution.certificate.plan.request,
            execution.manifest,
            execution.executor_map.executors,
            task,
            execution.claims.steps or 0,
            patience,
        )
        part.digests = await recompute(self.engine, self.workers, program, replay, log)
