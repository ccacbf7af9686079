"""Pools of leases over sessions that only count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from splitup.client.leases import Lease, LeaseOptions, LeasePool
from splitup.core.errors import (
    ExecutionFailed,
)
from splitup.messages.snapshots import ModelHolders
from tests.builders import HANG_S

ANN, BOB = "key ann", "key bob"


class Sessions:
    """Stands for a network: opens sessions and keeps count of them."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.ended: list[Any] = []
        self.errors: list[Exception] = []
        self.unplanned: list[ExecutionFailed] = []  # whose refunds do not come
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: ModelHolders | None = None  # by members

    async def look(self, _: str) -> ModelHolders | None:
        return self.seen

    @asynccontextmanager
    async def session(
        self,
        model: str,
        *,
        steps: int,
        deadline_s: float,
        verify: str | None,
        on_failure: Callable[[ExecutionFailed], None],
    ) -> AsyncIterator[Any]:
        if self.unplanned:
            on_failure(self.unplanned.pop(0))
            await asyncio.Event().wait()  # for the refund
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        session = SimpleNamespace(
            plan=SimpleNamespace(request=SimpleNamespace(steps=steps)),
            steps=0,
            failure=None,
            loading=set(),
            execution_id=f"0x{len(self.opened):064x}",
            manifest=SimpleNamespace(text=None),
        )
        self.opened.append(session)
        try:
            yield session
        finally:
            self.ended.append(session)


async def settle(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  (the condition has no event)
            await asyncio.sleep(0)


@asynccontextmanager
async def make_pool(
    sessions: Sessions | None = None, **options: Any
) -> AsyncIterator[tuple[LeasePool, Sessions]]:
    sessions = sessions or Sessions()
    pool = LeasePool(sessions, "model", LeaseOptions(**options))  # type: ignore[arg-type]
    pool.open()
    try:
        yield pool, sessions
    finally:
        await pool.close()
        assert len(sessions.ended) == len(sessions.opened), "every execution is ended"


async def use(
    pool: LeasePool, steps: int = 1, prompt: list[int] | None = None, principal: str = ANN
) -> Lease:
    async with pool.borrow(principal, prompt or [1], steps) as lease:
        lease.session.steps += steps
        return lease
