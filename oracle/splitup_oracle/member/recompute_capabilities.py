"""The determinism classes in which this member can recompute tasks, tested once per class."""

from __future__ import annotations

import asyncio
import logging

from splitup.core import tuning
from splitup.core.errors import SplitUpError
from splitup_oracle.member import recomputation

_log = logging.getLogger("splitup.oracle.recompute_capabilities")


class RecomputeCapabilities:
    """Tests the classes that nodes name, one after the other, each in a process of its own."""

    def __init__(self) -> None:
        self._known: dict[str, bool | None] = {}  # None: not tested yet
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def can_recompute(self, determinism: str) -> bool:
        """Return whether this machine computes in a class; True while the test is not over.

        Classes beyond ``tuning.MAX_CLASSES`` are not tested and give False.
        """
        if determinism not in self._known:
            if len(self._known) >= tuning.MAX_CLASSES:
                return False
            self._known[determinism] = None
            task = asyncio.get_running_loop().create_task(self._try(determinism))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._known[determinism] is not False

    async def close(self) -> None:
        """Cancel all tests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _try(self, determinism: str) -> None:
        async with self._turn:
            try:
                found = await recomputation.find_class(determinism)
            except (SplitUpError, OSError) as error:
                _log.warning("nothing can be recomputed as '%s' here: %s", determinism, error)
                found = ""
            self._known[determinism] = found == determinism
            if found and found != determinism:
                _log.warning("this machine computes as '%s', not as '%s'", found, determinism)
