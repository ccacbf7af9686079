"""The executions of one node: plans in, runs on the worker, completions out.

``step_loop.StepLoop`` is the path of a token through the node. ``Engine`` builds it with its parts,
begins executions, and ends them when the node stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from splitup.core import tuning
from splitup.core.background import BackgroundTasks
from splitup.core.errors import PeerFault
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages.completions import SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.net.links import Link, LinkAcceptor, LinkPool
from splitup_node.execution.batches import BatchScheduler
from splitup_node.execution.catch_up import Replay
from splitup_node.execution.execution_table import ExecutionTable, Listener
from splitup_node.execution.finishing import Finisher
from splitup_node.execution.handovers import Handovers
from splitup_node.execution.inbox import Inbox
from splitup_node.execution.kept.executions import Execution, OpenStore, make_execution
from splitup_node.execution.outputs import Outputs
from splitup_node.execution.step_loop import StepLoop
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.engine")


class Engine:
    """Runs the executions of one node. Not thread-safe: it lives in one event loop."""

    def __init__(
        self,
        identity: Identity,
        workers: Workers,
        programs: Mapping[str, int],  # task_id -> program; changes as tasks are loaded
        open_store: OpenStore,
        listener: Listener,
        *,
        allow_loopback: bool,
        get_state_limit: Callable[[], int],  # bytes that states may take on the device
        now_s: Callable[[], float] = time.time,  # the chain's time, which deadlines are in
        direct_bytes: int = tuning.DIRECT_BYTES,  # of large tensors sent ahead of the store
    ) -> None:
        self._node = identity.address
        self._open_store = open_store
        self._background = BackgroundTasks()
        self.table = table = ExecutionTable(
            identity, workers, programs, listener, now_s, spawn=self._background.start
        )
        self.pool = LinkPool(identity, _refuse_frame, allow_loopback=allow_loopback)
        self._outputs = Outputs(identity, self.pool, table, self._background.start, direct_bytes)
        replay = Replay(table, self._schedule, self._background.start)
        self._finisher = Finisher(workers, table, replay, self._background.start)
        handovers = Handovers(workers, table, self._outputs, replay, self._finisher)
        self._handovers = handovers
        self._inbox = Inbox(
            identity,
            table,
            handovers,
            self._finisher,
            self._background.start,
            self._schedule,
            self._outputs.check_links,
        )
        self.step_loop = StepLoop(
            workers,
            table,
            self._inbox,
            BatchScheduler(workers, table, programs, get_state_limit),
            self._outputs,
            self._finisher,
        )
        self.acceptor = LinkAcceptor(
            identity.address,
            self.step_loop.on_frame,
            may_open=table.may_open,
            on_opened=table.clients.on_opened,
            on_closed=table.clients.on_closed,
        )

    # ---- one execution -------------------------------------------------------------------------

    def is_expected(self, certificate: PlanCertificate) -> bool:
        """Return whether this node prepares to start a checked plan."""
        return self.table.parties.expected.get(certificate.plan.request.execution_id) == certificate

    def refuse(self, certificate: PlanCertificate, reason: str) -> None:
        """Remember why this node does not run an execution; tell its client when it connects."""
        if self.table.clients.refuse(certificate, reason):
            self._inbox.forget_early(certificate.plan.request.execution_id)

    def start(self, certificate: PlanCertificate, manifest: Manifest) -> Execution:
        """Take a checked plan: open connections, begin its tasks here, take early frames.

        Raises PeerFault when the plan does not fit the model, Unavailable when the node is full.
        """
        table = self.table
        execution = make_execution(certificate, manifest, self._node, self._open_store)
        mine = [task.index for task in execution.routing.routes.tasks]
        for task in mine:
            table.check_can_run(execution, task)
        if mine:
            steps = certificate.plan.request.steps
            table.queue.assign(execution.id, execution.routing.routes.tasks, steps)
        else:
            table.forget_standby()
        for task in mine:
            execution.add_part(task, table.new_session())
        execution.life.use(table.now_s())
        table.add(execution)
        if mine:
            table.listener.on_begun(execution)
        successors = execution.routing.find_readers(sorted(execution.routing.successors))
        self._outputs.open_links(execution, successors)
        self._inbox.take_early(execution)
        self.step_loop.schedule()
        return execution

    def note_replaced(self, signed: SignedTakeover) -> None:
        """Take a task's next executor from a member; the client may have kept it from this node.

        Raises PeerFault, BadSignature for what the client did not sign.
        """
        execution = self.table.by_id.get(signed.takeover.execution_id)
        if execution is not None:
            self._handovers.give_up(execution, signed)

    # ---- all executions ------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Stop what does not end, fail what cannot be paid, and forget what is over."""
        for execution in self.table.list_unended(now_s):
            self._finisher.stop_unended(execution, now_s)
        self.table.sweep(now_s)
        self._inbox.expire_early()

    def flush(self) -> None:
        """Begin to store log entries that are old enough."""
        for execution in self.table.by_id.values():
            if execution.parts and not execution.life.is_over:
                execution.record.writer.flush(age_s=tuning.SEGMENT_AGE_S)

    def on_worker_lost(self, reason: str) -> None:
        """Pause, and fail the executions that had begun on the worker that is gone."""
        self.step_loop.on_worker_lost(reason)
        self.table.fail_begun(reason)

    def resume(self) -> None:
        """Go on after a new worker has loaded the tasks; fail what needs one it could not load."""
        self.table.fail_unloaded()
        self.step_loop.resume()

    async def leave(self) -> None:
        """Take no new work and let what runs end, for ``tuning.LEAVE_S``; then fail the rest."""
        self.table.is_leaving = True
        ends_s = time.monotonic() + tuning.LEAVE_S
        while running := [e for e in self.table.by_id.values() if e.parts and not e.life.is_over]:
            if time.monotonic() > ends_s:
                for execution in running:
                    self.table.fail_slowest(execution, "the node is leaving")
                await asyncio.sleep(0)  # the failures are sent before the connections close
                return
            await asyncio.sleep(tuning.LEAVE_POLL_S)

    async def close(self) -> None:
        """Stop taking runs, let what is running or being stored end, and close every connection."""
        self.step_loop.pause()
        try:
            async with asyncio.timeout(tuning.WORKER_STOP_S):
                await self.step_loop.wait_idle()
                await asyncio.sleep(0)  # the callbacks of the last run
                await self._finisher.wait()
        except TimeoutError:
            _log.warning("the running step, or the last log, did not end in time")
        await self.acceptor.close()
        await self.pool.close()
        await self._background.close()
        for execution in self.table.by_id.values():
            await execution.record.close()

    def _schedule(self) -> None:
        self.step_loop.schedule()


def _refuse_frame(link: Link, data: bytes) -> None:
    raise PeerFault(
        f"node {link.peer} sent a frame against the direction of its link", peer=link.peer
    )
