"""All executions that a node takes part in, and how one is failed, ended and forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from splitup.core import limits, tuning
from splitup.core.errors import Refused, SplitUpError, Unavailable
from splitup.core.latest import Latest
from splitup.crypto.keys import Identity
from splitup.messages.completions import SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.net.tensor_chunks import TensorChunks
from splitup.protocol.execution.task_queue import TaskQueue
from splitup_node.execution.client_links import ClientLinks
from splitup_node.execution.kept.executions import Execution, Spawn, get_first_task
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.executions")


class Listener(Protocol):
    """Gets notified of the beginning and the end of executions."""

    def on_begun(self, execution: Execution) -> None:
        """Note that this node runs tasks of an execution from now on."""

    def on_taken(self, execution: Execution, signed: SignedTakeover) -> None:
        """Note that this node takes a task over from another."""

    def on_replaced(self, execution: Execution, signed: SignedTakeover) -> None:
        """Note that the client has named a candidate after this node for a task."""

    def on_ended(self, execution: Execution) -> None:
        """Note that the client has said how many steps there were."""

    def on_finished(self, execution: Execution) -> None:
        """Note that all steps have run and every log segment is stored."""

    def on_failed(self, execution: Execution) -> None:
        """Note that this node has no more part in the execution; the client knows."""


class ExecutionTable:
    """The executions of one node with their queue, the tensors they wait for, and their clients."""

    def __init__(
        self,
        identity: Identity,
        workers: Workers,
        programs: Mapping[str, int],  # task_id -> program; changes as tasks are loaded
        listener: Listener,
        now_s: Callable[[], float] = time.time,  # the chain's time, which deadlines are in
        *,
        spawn: Spawn,
    ) -> None:
        self._spawn = spawn
        self._node = identity.address
        self._workers = workers
        self._programs = programs
        self._over: Latest[str, None] = Latest(tuning.MAX_FINISHED)
        self._next_session = 1
        self.listener = listener
        self.now_s = now_s
        self.by_id: OrderedDict[str, Execution] = OrderedDict()
        self.queue = TaskQueue()
        self.queue.tell_surplus = self._fail_largest
        self.chunks = TensorChunks()
        self.clients = ClientLinks(identity, self.by_id)
        self.parties = PlanParties()
        self.is_leaving = False  # the node takes no new work

    def is_known(self, execution_id: str) -> bool:
        """Return whether this execution was assigned before, running or over."""
        return (
            execution_id in self.by_id
            or execution_id in self._over
            or self.clients.is_refused(execution_id)
        )

    def may_open(self, key: str, execution_id: str) -> bool:
        """Return whether a key may open a data link; see ``PlanParties.may_open``."""
        parties, clients = self.parties, self.clients
        return parties.may_open(key, execution_id) or clients.is_told(key, execution_id)

    def add(self, execution: Execution) -> None:
        """Begin with an execution, whose parties may connect."""
        self.by_id[execution.id] = execution
        self.parties.add(execution.certificate)

    def list_used(self) -> set[str]:
        """Return the tasks that executions run here, or may yet ask this node to take over."""
        used = set()
        for execution in self.by_id.values():
            if not execution.life.is_over:
                pairs = zip(execution.manifest.tasks, execution.certificate.plan.tasks, strict=True)
                used |= {task.task_id for task, nodes in pairs if self._node in nodes}
        return used

    def check_can_run(self, execution: Execution, task: int) -> None:
        """Raise Unavailable when this node cannot begin to run a task."""
        if execution.manifest.tasks[task].task_id not in self._programs:
            raise Unavailable(f"task {task} of {execution.id} is not loaded on this node")
        if self.is_leaving:
            raise Unavailable("the node is leaving and takes no new work")

    def new_session(self) -> int:
        """Return a session of the worker that no execution uses."""
        self._next_session += 1
        return self._next_session - 1

    def fail(self, execution_id: str, task: int, step: int, reason: str) -> None:
        """Give an execution up and tell its client why; the client may choose another node."""
        execution = self.by_id.get(execution_id)
        if execution is None or execution.life.is_over:
            return
        execution.life.fail(reason[:500], self.now_s())
        _log.warning(
            "execution %s failed at task %d, step %d: %s", execution_id, task, step, reason
        )
        self.clients.tell_failure(execution, task, step)
        self.give_up(execution)

    def give_up(self, execution: Execution) -> None:
        """Store what an execution that failed has computed, which is owed; drop the rest."""
        for part in execution.parts.values():
            execution.claims.keep_lost(part)
        self.release(execution)
        execution.parts.clear()
        self._spawn(self._store_rest(execution))

    async def _store_rest(self, execution: Execution) -> None:
        writer = execution.record.writer
        try:
            await writer.finish()
        except SplitUpError as error:
            _log.warning("the rest of %s is not stored: %s", execution.id, error)
        execution.claims.limit_lost(writer.count_stored)
        writer.discard()
        self.listener.on_failed(execution)

    async def fail_unless_replaced(
        self,
        execution: Execution,
        find: Callable[[], tuple[int, int] | None],
        problem: str,
        error: Exception,
    ) -> None:
        """Fail an execution at the task and step that ``find`` returns, unless it returns None.

        A gateway refuses a node that was replaced, and may have heard of the takeover first, from
        the next executor: then the client's word is waited for.
        """
        late_s = tuning.TAKEOVER_LATE_S if isinstance(error, Refused) else 0.0
        ends_s = time.monotonic() + late_s
        while not execution.life.is_over and (found := find()) is not None:
            if time.monotonic() >= ends_s:
                self.fail(execution.id, *found, f"{problem}: {error}")
                return
            await asyncio.sleep(tuning.TAKEOVER_POLL_S)

    def fail_slowest(self, execution: Execution, reason: str) -> None:
        """Fail an execution at the task that has run the fewest steps."""
        progress = self.queue.get_progress(execution.id) or {get_first_task(execution): 0}
        task = min(progress, key=lambda index: (progress[index], index))
        self.fail(execution.id, task, progress[task], reason)

    def _fail_largest(self, execution_id: str) -> None:
        """Fail the execution whose tensors leave no room for those of others."""
        if (execution := self.by_id.get(execution_id)) is not None:
            self.fail_slowest(execution, "its tensors fill the node's buffers, which others need")

    def fail_begun(self, reason: str) -> None:
        """Fail the executions that had begun on the worker that is gone.

        State is lost there; and without it a fallback, which has the task loaded, is sooner ready
        than a new worker.
        """
        for execution in list(self.by_id.values()):
            progress = self.queue.get_progress(execution.id)
            for task, step in progress.items():
                if step:
                    self.fail(execution.id, task, step, f"its worker was lost: {reason}")

    def fail_unloaded(self) -> None:
        """Fail the executions that need a task which the new worker could not load."""
        for execution in list(self.by_id.values()):
            for task in list(execution.parts):
                if execution.manifest.tasks[task].task_id not in self._programs:
                    self.fail(execution.id, task, 0, "its task could not be loaded again")

    def list_unended(self, now_s: float) -> list[Execution]:
        """Return the executions whose client is gone, or leaves no time to commit after its end."""
        running = [e for e in self.by_id.values() if not e.life.is_over]
        late = [e for e in running if now_s > e.deadline_s - tuning.STOP_MARGIN_S]
        return [*late, *self._list_stale(now_s)]

    def _list_stale(self, now_s: float) -> list[Execution]:
        """Return the executions whose client has sent nothing for too long."""
        return [
            one
            for one in self.by_id.values()
            if one.parts
            and not (one.life.is_over or one.life.ended_at_s)
            and now_s > one.life.used_at_s + tuning.SESSION_IDLE_S
        ]

    def sweep(self, now_s: float) -> None:
        """Fail what is past its deadline or idle for long, and forget what is over."""
        for execution in list(self.by_id.values()):
            if not execution.life.is_over and now_s > execution.deadline_s:
                if execution.parts:
                    self.fail_slowest(execution, "the deadline passed")
                else:
                    self._forget(execution)
            if (
                execution.life.is_over
                and now_s > execution.life.ended_at_s + limits.EXECUTION_GRACE_S
            ):
                self._forget(execution)
        for execution in self._list_stale(now_s):
            reason = f"its session was idle for {tuning.SESSION_IDLE_S:g} s and its state dropped"
            self.fail_slowest(execution, reason)

    def release(self, execution: Execution) -> None:
        """Free the memory that an execution takes in the queue and on the device."""
        self.queue.drop(execution.id)
        self.chunks.drop(execution.id)
        self._workers.drop([part.session for part in execution.parts.values()])

    def forget_standby(self) -> None:
        """Make room for another plan that names this node as a fallback only."""
        standby = [e for e in self.by_id.values() if not e.parts and not e.life.is_over]
        if len(standby) >= tuning.MAX_STANDBY:
            self._forget(min(standby, key=lambda one: one.claims.has_work))

    def _forget(self, execution: Execution) -> None:
        del self.by_id[execution.id]
        self.parties.remove(execution.certificate)
        self.chunks.drop(execution.id)
        self._over[execution.id] = None


class PlanParties:
    """The keys that plans name, each as often as there are plans that name it."""

    def __init__(self) -> None:
        self._may_open: Counter[tuple[str, str]] = Counter()  # (key, execution, or "" for any)
        self.expected: dict[str, PlanCertificate] = {}  # by execution: this node prepares for it

    def may_open(self, key: str, execution_id: str) -> bool:
        """Return whether a key may open a link, for one execution or "" for all that it is in.

        A link for one execution is its client's.
        """
        return (key, execution_id) in self._may_open

    def add(self, certificate: PlanCertificate) -> None:
        """Let the parties of a checked plan connect."""
        self._may_open.update(_list_links(certificate))

    def remove(self, certificate: PlanCertificate) -> None:
        """Forget a plan that was added."""
        for name in _list_links(certificate):
            self._may_open[name] -= 1
            if not self._may_open[name]:
                del self._may_open[name]

    @contextmanager
    def expect(self, certificate: PlanCertificate) -> Iterator[None]:
        """Let the parties of a checked plan connect while this node prepares for it."""
        execution_id = certificate.plan.request.execution_id
        self.add(certificate)
        self.expected[execution_id] = certificate
        try:
            yield
        finally:
            self.expected.pop(execution_id, None)
            self.remove(certificate)


def _list_links(certificate: PlanCertificate) -> Iterator[tuple[str, str]]:
    request = certificate.plan.request
    yield request.client_key, request.execution_id
    yield request.client_key, ""
    for node in certificate.plan.nodes:
        yield node.signing_key, ""
