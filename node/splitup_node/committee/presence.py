"""Heartbeats to the committee, and the tasks that a node loads by their answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Final

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel, SplitUpError
from splitup.crypto.keys import Identity
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.snapshots import Heartbeat
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView
from splitup.storage.task_cache import TaskCache
from splitup_node.committee.heartbeat_sender import HeartbeatSender
from splitup_node.execution.engine import Engine
from splitup_node.health import Health
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.tasks.placement import (
    DemandEntry,
    ModelTask,
    Trade,
    Trader,
    choose_task,
    choose_unlisted,
    merge_demand,
)
from splitup_node.worker.supervisor import TaskFailed, WorkerLost

_log = logging.getLogger("splitup.node.presence")
_REFUSALS: Final = (InvalidModel, TaskFailed, WorkerLost)  # the task may be what killed the worker


class Presence:
    """Sends heartbeats; their answers say which tasks are wanted, and those are loaded."""

    def __init__(
        self,
        identity: Identity,
        http: SignedClient,
        engine: Engine,
        loaded_tasks: LoadedTasks,
        cache: TaskCache,
        health: Health,
        *,
        get_committee: Callable[[], CommitteeView],
        get_determinism: Callable[[], str],
        is_leaving: Callable[[], Awaitable[bool]],
    ) -> None:
        self._identity = identity
        self._heartbeat_sender = HeartbeatSender(http, lambda signed: engine.note_replaced(signed))
        self._engine = engine
        self._loaded_tasks = loaded_tasks
        self._cache = cache
        self._health = health
        self._get_committee = get_committee
        self._get_determinism = get_determinism
        self._is_leaving = is_leaving
        self.boot_id = secrets.token_hex(32)
        self._sequence = 0
        self._refusals = 0  # of the latest heartbeats, one after the other
        self._demand: tuple[DemandEntry, ...] = ()
        self._demand_changed = asyncio.Event()
        self._heartbeat_due = asyncio.Event()
        self._pinged_at = -math.inf
        self._is_urgent = False  # the next heartbeat goes to all members, due or not
        self._stated: tuple[tuple[str, ...], str] | None = None  # offers and class, told to all
        self._failures: Counter[ModelTask | str] = Counter()  # of tasks, and of models' files
        self._unloadable: dict[ModelTask | str, float] = {}  # when to try again
        self._problems: dict[ModelTask, SplitUpError] = {}  # why it was not loaded
        self._trader = Trader(identity.address)
        self._withdrawn = ""  # the task that is about to be unloaded: not offered any more
        self.trades: deque[dict[str, str | int]] = deque(maxlen=tuning.SHOWN_TRADES)

    async def send_heartbeats(self) -> None:
        """Send each member one per period, and all of them one when what is offered has changed.

        A node that all members refuse, because it was slashed or leaves, sends them less often.
        """
        try:
            while True:
                self._is_urgent = self._heartbeat_due.is_set()
                self._heartbeat_due.clear()
                try:
                    await self._send_heartbeat()
                except SplitUpError as error:
                    _log.warning("%s", error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(compute_pause_s(self._refusals)):
                        await self._heartbeat_due.wait()
        finally:
            await self._heartbeat_sender.close()

    def note_ping(self) -> None:
        """Send the heartbeats that members wait for no longer: one that pings us may have woken."""
        self._pinged_at = time.monotonic()

    async def _send_heartbeat(self) -> None:
        committee = self._get_committee()
        self._sequence += 1
        beat = Heartbeat(
            node=self._identity.address,
            boot_id=self.boot_id,
            sequence=self._sequence,
            sent_at_ms=int(time.time() * 1000),
            block_hash=ZERO_BYTES32,  # replaced by the block that each member named last
            queue_ms=self._engine.step_loop.queue_ms,
            resident=self._get_offers(),
            vram_free_bytes=max(0, self._loaded_tasks.free_bytes),
            determinism=self._get_determinism()[:200],
            speed_mflops=self._engine.step_loop.speed_mflops,
            bandwidth_kbps=self._cache.bandwidth_kbps,
            loading=bool(self._loaded_tasks.loading),
        )
        stated = (beat.resident, beat.determinism)
        only_due = stated == self._stated and not self._is_urgent
        self._stated = stated
        if not await self._heartbeat_sender.send(
            beat, committee, only_due=only_due, pinged_at=self._pinged_at
        ):
            return
        is_refused = self._heartbeat_sender.is_refused(committee)
        self._refusals = self._refusals + 1 if is_refused else 0
        demands = self._heartbeat_sender.get_demands()
        if 3 * len(demands) > len(committee.members):
            self._demand = merge_demand(demands, len(committee.members))
            self._loaded_tasks.keep_listed({entry.task_id for entry in self._demand})
            self._demand_changed.set()
        failures = self._heartbeat_sender.list_failures(committee)
        if is_refused and await self._is_leaving():
            failures = set()  # as its owner wishes
        self._health.note_heartbeats(failures, len(committee.members))

    def _get_offers(self) -> tuple[str, ...]:
        """Return the tasks that this node takes work for."""
        if self._health.trouble:
            return ()
        held = (task.task_id for task in self._loaded_tasks.tasks)
        return tuple(sorted(task_id for task_id in held if task_id != self._withdrawn))

    async def place_tasks(self) -> None:
        """Load one task after the other, by demand, while there is memory; then trade.

        The next choice waits for a list that knows of the last one, and of what other nodes have
        loaded meanwhile: nodes that fill up by an old list leave tasks that nobody has room for.
        A node with room for all that is listed leaves none, and takes the next list at once.
        """
        while True:
            self._demand_changed.clear()
            await self._demand_changed.wait()
            if self._loaded_tasks.is_waited_for:
                continue  # what an execution needs comes first
            now_s = time.monotonic()
            waiting = {what for what, retry_s in self._unloadable.items() if now_s < retry_s}
            excluded = {
                entry.key
                for entry in self._demand
                if entry.key in waiting or entry.model_id in waiting
            }
            choice = choose_task(
                self._identity.address,
                self._demand,
                self._loaded_tasks.programs,
                excluded,
                self._loaded_tasks.free_bytes,
            )
            if choice is None and await self._free_unlisted(excluded):
                self._heartbeat_due.set()
            elif choice is None and self._trader.is_due(time.time()):
                choice = await self._trade(excluded)
            if choice is not None and await self._load(choice):
                self._heartbeat_due.set()
                if not self._has_room_for_all(excluded):
                    await asyncio.sleep(tuning.DEMAND_AGE_S)
                    self._heartbeat_due.set()

    def _has_room_for_all(self, excluded: Collection[ModelTask]) -> bool:
        left = {
            entry.task_id: entry.vram_bytes
            for entry in self._demand
            if entry.task_id not in self._loaded_tasks.programs and entry.key not in excluded
        }
        return sum(left.values()) <= self._loaded_tasks.free_bytes

    async def _load(self, choice: DemandEntry) -> bool:
        try:
            is_loaded = await self._loaded_tasks.place(choice.model_id, choice.task)
        except SplitUpError as error:
            self._note_failure(choice, error)
            return False
        self._problems.pop(choice.key, None)
        self._failures.pop(choice.model_id, None)
        return is_loaded

    async def _free_unlisted(self, excluded: Collection[ModelTask]) -> bool:
        """Unload an idle task of a model that is gone, if others lack memory; return if it was."""
        loaded_tasks = self._loaded_tasks
        for task_id in choose_unlisted(self._demand, loaded_tasks.programs, excluded):
            try:
                if await loaded_tasks.unload(task_id, partial(self._is_unused, task_id)):
                    return True
            except SplitUpError as error:
                _log.warning("%s is not unloaded: %s", task_id[:12], error)
        return False

    def list_problems(self) -> list[dict[str, str | int | bool]]:
        """Return the wanted tasks that could not be loaded, and why; a refused one waits long."""
        return [
            {
                "model_id": entry.model_id,
                "task": entry.task,
                "task_id": entry.task_id,
                "reason": str(self._problems[entry.key]),
                "is_refused": isinstance(self._problems[entry.key], _REFUSALS),
            }
            for entry in self._demand
            if entry.key in self._problems
        ]

    def _note_failure(self, choice: DemandEntry, error: SplitUpError) -> None:
        """Try others before the task, or before its model: anybody can register a broken one."""
        is_new = choice.key not in self._problems
        self._problems[choice.key] = error
        what: ModelTask | str
        if isinstance(error, _REFUSALS):  # each try costs seconds of CPU
            _log.error("task %s cannot be loaded: %s", choice.task_id[:12], error)
            what, retry_s = choice.key, tuning.LOAD_RETRY_S
        else:  # the store, the gateway, the memory or the disk: tried again soon, said once
            level = logging.WARNING if is_new else logging.DEBUG
            _log.log(level, "task %s is not loaded yet: %s", choice.task_id[:12], error)
            what, retry_s = choice.model_id, tuning.LOAD_FETCH_RETRY_S
        self._failures[what] += 1
        doublings = min(self._failures[what] - 1, tuning.LOAD_RETRY_DOUBLINGS)
        self._unloadable[what] = time.monotonic() + retry_s * 2**doublings

    # ---- trades --------------------------------------------------------------------------------

    async def _trade(self, excluded: Collection[ModelTask]) -> DemandEntry | None:
        """Unload a task for one that too few serve, if there is such; return the latter."""
        loaded_tasks = self._loaded_tasks
        idle = set(loaded_tasks.programs) - loaded_tasks.used - self._engine.table.list_used()
        rooms = {task_id: loaded_tasks.get_room(task_id) for task_id in idle}
        trade = self._trader.choose(
            self._demand, loaded_tasks.programs, rooms, excluded, time.time()
        )
        if trade is None or not await self._give_up(trade):
            return None
        return trade.wanted

    async def _give_up(self, trade: Trade) -> bool:
        """Unload a task for another one; return whether there is room for that now.

        The node stops to offer the task some time before it unloads it, so that plans made before
        the members knew of it still find the task.
        """
        given, wanted = trade.given, trade.wanted
        label = next(t.label for t in self._loaded_tasks.tasks if t.task_id == given.task_id)
        try:
            await self._loaded_tasks.prepare(wanted.model_id, wanted.task)
        except SplitUpError as error:
            self._note_failure(wanted, error)
            return False
        self._withdrawn = given.task_id
        self._heartbeat_due.set()
        try:
            await asyncio.sleep(tuning.TRADE_NOTICE_S)
            self._demand_changed.clear()
            await self._demand_changed.wait()  # for a list that knows that the task is not offered
            if not self._trader.confirms(trade, self._demand):
                self._trader.note(trade, time.time(), made=False)
                return False
            if not await self._loaded_tasks.unload(
                given.task_id, partial(self._is_unused, given.task_id)
            ):
                return False
        except SplitUpError as error:
            _log.warning("%s is not traded: %s", label, error)
            return False
        finally:
            self._withdrawn = ""
            self._heartbeat_due.set()
        self._trader.note(trade, time.time(), made=True)
        _log.info(
            "unloaded %s, which %d operators serve, to load task %d of %s, which %d serve",
            label,
            given.operators,
            wanted.task,
            wanted.model_id,
            wanted.operators,
        )
        self.trades.append(
            {
                "given": given.task_id,
                "label": label,
                "operators": given.operators,
                "wanted": wanted.task_id,
                "wanted_operators": wanted.operators,
                "at_s": int(time.time()),
            }
        )
        return True

    def _is_unused(self, task_id: str) -> bool:
        return task_id not in self._engine.table.list_used()


def compute_pause_s(refusals: int) -> float:
    """Return the seconds until the next heartbeat; the first refusals may come before a block."""
    doublings = min(max(0, refusals - tuning.HEARTBEAT_REFUSALS), 10)
    return min(limits.HEARTBEAT_PERIOD_S * 2.0**doublings, tuning.HEARTBEAT_REFUSED_S)
