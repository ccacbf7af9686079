"""A session of a target worker that runs on the market: it borrows a paid execution."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import numpy.typing as npt

from splitup.client.leases import Lease, LeasePool
from splitup.decode.step import StepInput, make_arrays
from splitup_speculation.sessions import refuse_step


class LeasedModel:
    """Computes on the market's nodes; a lease is borrowed at the first step."""

    def __init__(self, pool: LeasePool, chunk: int, steps: int) -> None:
        """Take leases of ``pool`` that have at least so many ``steps`` left."""
        self._pool = pool
        self._chunk = chunk
        self._steps = steps
        self._lease: Lease | None = None
        self._stack = AsyncExitStack()
        self._order = asyncio.Lock()

    async def compute(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Return the logits of a step; the next one may be sent meanwhile.

        Raises Refused when the lease has no step left, and what a session raises.
        """
        async with self._order:
            if self._lease is None:
                borrowed = self._pool.borrow("", step.tokens, self._steps)
                self._lease = await self._stack.enter_async_context(borrowed)
            if not self._lease.can_go_on(1, asyncio.get_running_loop().time()):
                raise refuse_step("the session's paid steps or seconds are used up")
            self._lease.contents.feed(step)
            result = self._lease.session.submit(make_arrays(step, self._chunk))
        logits: npt.NDArray[np.float32] = (await result)["logits"]
        return logits

    async def end(self) -> None:
        """Give the lease back."""
        await self._stack.aclose()
