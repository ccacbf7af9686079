"""A node's presence: what it tells the committee every second, and what it loads by the answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

from splitup import limits
from splitup.crypto.keys import Identity
from splitup.errors import InvalidModel, PeerFault, Refused, SplitUpError
from splitup.net.cache import Cache
from splitup.net.http import SignedClient
from splitup.protocol.certificates import CommitteeView
from splitup.wire import Heartbeat
from splitup_node.engine import Engine
from splitup_node.health import Health
from splitup_node.residents import Residents
from splitup_node.specialise import DemandEntry, choose_task, merge_demand, parse_demand
from splitup_node.supervisor import TaskFailed, WorkerLost

HEARTBEAT_TYP: Final = "splitup-heartbeat"

_log = logging.getLogger("splitup.node.presence")


class Presence:
    """Sends heartbeats; takes from their answers which tasks are wanted, and loads them."""

    def __init__(
        self,
        identity: Identity,
        http: SignedClient,
        engine: Engine,
        residents: Residents,
        cache: Cache,
        health: Health,
        *,
        get_committee: Callable[[], CommitteeView],
        get_determinism: Callable[[], str],
    ) -> None:
        self._identity = identity
        self._http = http
        self._engine = engine
        self._residents = residents
        self._cache = cache
        self._health = health
        self._get_committee = get_committee
        self._get_determinism = get_determinism
        self.boot_id = secrets.token_hex(32)
        self._sequence = 0
        self._block_number = 0
        self._demand: tuple[DemandEntry, ...] = ()
        self._demand_changed = asyncio.Event()
        self._news = asyncio.Event()
        self._unloadable: dict[str, float] = {}  # task_id -> when to try again

    async def beat(self) -> None:
        """Send a heartbeat per period, and one at once when a task was loaded."""
        while True:
            self._news.clear()
            try:
                await self._send_heartbeat()
            except SplitUpError as error:
                _log.warning("%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.HEARTBEAT_PERIOD_S):
                    await self._news.wait()

    async def _send_heartbeat(self) -> None:
        committee = self._get_committee()
        self._sequence += 1
        beat = Heartbeat(
            node=self._identity.address,
            boot_id=self.boot_id,
            sequence=self._sequence,
            sent_at_ms=int(time.time() * 1000),
            block_number=self._block_number,
            queue_ms=self._engine.runs.queue_ms,
            resident=self._get_offers(),
            vram_free_bytes=max(0, self._residents.free_bytes),
            determinism=self._get_determinism()[:200],
            speed_mflops=self._engine.runs.speed_mflops,
            bandwidth_kbps=self._cache.bandwidth_kbps,
        )
        token = self._http.sign(HEARTBEAT_TYP, committee.domain.committee, beat)
        answers = await asyncio.gather(
            *(
                self._http.post_token(
                    f"{member.endpoint}/v1/heartbeat", token, timeout_s=limits.HEARTBEAT_TIMEOUT_S
                )
                for member in committee.members
            ),
            return_exceptions=True,
        )
        refusals = {str(answer) for answer in answers if isinstance(answer, Refused)}
        refused = all(isinstance(answer, Refused) for answer in answers)
        self._health.note_refusals(refusals if refused else set(), len(answers))
        demands = []
        for answer in answers:
            if isinstance(answer, SplitUpError):
                _log.debug("heartbeat: %s", answer)
                continue
            if isinstance(answer, BaseException):
                raise answer
            try:
                demands.append(parse_demand(answer.get("tasks")))
            except PeerFault as fault:  # of one member; the others' answers count
                _log.warning("heartbeat: %s", fault)
                continue
            block = answer.get("block")
            if isinstance(block, int) and 0 <= block < 2**53:
                self._block_number = max(self._block_number, block)
        self._demand = merge_demand(demands)
        self._demand_changed.set()

    def _get_offers(self) -> tuple[str, ...]:
        """Return what this node takes work for."""
        if self._health.trouble:
            return ()
        return tuple(sorted(task.task_id for task in self._residents.tasks))

    async def specialise(self) -> None:
        """Load one task after the other, by demand, for as long as there is memory.

        The next choice waits for answers that can know of the last one, and of what others loaded
        meanwhile: nodes that fill up by an old list leave tasks that nobody has room for.
        """
        while True:
            self._demand_changed.clear()
            await self._demand_changed.wait()
            now_s = time.monotonic()
            choice = choose_task(
                self._identity.address,
                self._demand,
                self._residents.programs,
                {task for task, retry_s in self._unloadable.items() if now_s < retry_s},
                self._residents.free_bytes,
            )
            if choice is None:
                continue
            try:
                await self._residents.ensure(choice.model_id, choice.task)
                self._news.set()
                await asyncio.sleep(limits.DEMAND_AGE_S)
                self._news.set()
            except (InvalidModel, TaskFailed, WorkerLost) as error:  # it may be what kills workers
                _log.error("task %s cannot be loaded: %s", choice.task_id[:12], error)
                self._unloadable[choice.task_id] = time.monotonic() + limits.LOAD_RETRY_S
            except SplitUpError as error:  # the store, the gateway, the worker: soon again
                _log.warning("task %s waits: %s", choice.task_id[:12], error)
