"""How a node that takes over a task catches up: it reads the logs of the producers of its inputs.

Each input port is read from its first step on until the stored log meets the frames of its
producer, which sends again all that the store may lack. The new node runs every step itself: it
needs the state, and it commits to all steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from splitup.core import tuning
from splitup.core.errors import PeerFault, SplitUpError
from splitup.messages.base import CLIENT
from splitup.messages.storage import LogName
from splitup.net.object_transfer import NotStored
from splitup.protocol.execution.log_segments import LogEntry, LogNameer
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.task_queue import PortId, Tensor
from splitup.storage.log_store import iter_log, read_tensor
from splitup_node.execution.execution_table import ExecutionTable
from splitup_node.execution.kept.executions import Execution, Schedule, Spawn
from splitup_node.execution.kept.parts import Part

_log = logging.getLogger("splitup.node.replay")


class Replay:
    """Feeds the queue with the past inputs of tasks that this node has taken over."""

    def __init__(self, table: ExecutionTable, schedule: Schedule, spawn: Spawn) -> None:
        self._table = table
        self._queue = table.queue
        self._schedule = schedule
        self._spawn = spawn
        self._ran: dict[tuple[str, int], asyncio.Event] = {}  # by task, while it catches up

    def start(self, execution: Execution, task: int) -> None:
        """Begin to catch up with one task."""
        self._spawn(self._catch_up(execution, execution.parts[task]))

    def on_run(self, execution: Execution, task: int) -> None:
        """Note that a step of a task has run."""
        if (event := self._ran.get((execution.id, task))) is not None:
            event.set()

    async def _catch_up(self, execution: Execution, part: Part) -> None:
        key = execution.id, part.task
        ran = self._ran[key] = asyncio.Event()
        sources = dict.fromkeys(get_sources(execution.manifest, part.task))
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    group.create_task(self._feed(execution, part, source))
        except* SplitUpError as failures:

            def find_step() -> tuple[int, int] | None:
                is_here = self._is_current(execution, part)
                return (part.task, self._get_step(execution, part)) if is_here else None

            await self._table.fail_unless_replaced(
                execution, find_step, "its past inputs cannot be read", failures.exceptions[0]
            )
        finally:
            if self._ran.get(key) is ran:  # otherwise the task has left, and come back
                del self._ran[key]
            self._schedule()

    async def _feed(self, execution: Execution, part: Part, source: PortId) -> None:
        """Read the log of one port until the queue already has its next step.

        What is wrong with the log is its author's fault: this task then lacks inputs, as its
        progress says, and the client finds out who it is.
        """
        if source[0] in execution.parts:  # produced here: nobody else sends what is not stored yet
            name = LogName.of(*source, execution.node, 0)
            for entry in execution.record.writer.get_unstored(*source):
                await self._offer_entry(execution, part, name, entry)
        broken = ""
        while self._is_current(execution, part):  # the task may have left already
            author = execution.executor_map.get_author(source[0])
            if author == broken:
                await asyncio.sleep(tuning.LOG_POLL_S)
                continue
            spec = execution.routing.routes.specs[source]
            reader = LogNameer(execution.id, *source, author, spec.accepts)
            wait = partial(self._is_expected, execution, part, reader)
            try:
                async for entries in iter_log(execution.store, reader, wait=wait):
                    await self._offer(execution, part, reader, entries)
                    if not self._is_missing(execution, part, source, reader.next_step):
                        return
            except (NotStored, PeerFault) as fault:
                _log.warning("the log of an input of %s is not read: %s", execution.id, fault)
                broken = author
                continue
            if not self._is_missing(execution, part, source, reader.next_step):
                return  # otherwise another node produces this port now: read its log from the start

    def _is_missing(self, execution: Execution, part: Part, source: PortId, step: int) -> bool:
        if not self._is_current(execution, part) or step == execution.claims.steps:
            return False
        return not self._queue.has(execution.id, source, step, part.task)

    def _is_expected(self, execution: Execution, part: Part, reader: LogNameer) -> bool:
        """Return whether to wait for the reader's next segment, which is not stored yet."""
        name = reader.name
        source = name.task, name.port
        same = name.node == execution.executor_map.get_author(name.task)
        return same and self._is_missing(execution, part, source, reader.next_step)

    async def _offer(
        self,
        execution: Execution,
        part: Part,
        reader: LogNameer,
        entries: list[LogEntry],
    ) -> None:
        """Offer one segment to the queue once the task is at most REPLAY_AHEAD_STEPS behind it.

        Of the client's, no step that it has not signed for: nobody signs a log, and it would owe
        nothing for what was computed out of it alone.
        """
        ran = self._ran.get((execution.id, part.task))
        while (
            ran is not None
            and self._is_current(execution, part)
            and entries[0].step > self._get_step(execution, part) + tuning.REPLAY_AHEAD_STEPS
        ):
            ran.clear()
            await ran.wait()
        for entry in entries:
            while reader.name.task == CLIENT and self._is_current(execution, part):
                if entry.step < execution.claims.signed_steps:
                    break
                self._schedule()
                await asyncio.sleep(tuning.LOG_POLL_S)
            if not self._is_current(execution, part):
                return
            if entry.step < self._get_step(execution, part):
                continue
            await self._offer_entry(execution, part, reader.name, entry)
        self._schedule()

    async def _offer_entry(
        self, execution: Execution, part: Part, name: LogName, entry: LogEntry
    ) -> None:
        source, data = (name.task, name.port), entry.data
        if data is None:  # an object of its own, of up to 1 GiB
            release = self._queue.reserve(execution.id, entry.step, entry.length)
            try:
                data = await read_tensor(execution.store, name, entry)
            finally:
                release()
        if self._is_current(execution, part):
            tensor = Tensor(entry.digest, data, time.time_ns())
            self._queue.offer(execution.id, source, entry.step, tensor, task=part.task)

    def _get_step(self, execution: Execution, part: Part) -> int:
        return self._queue.get_progress(execution.id).get(part.task, 0)

    def _is_current(self, execution: Execution, part: Part) -> bool:
        return not execution.life.is_over and execution.parts.get(part.task) is part
