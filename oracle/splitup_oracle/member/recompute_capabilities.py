"""In which determinism classes this member can recompute a disputed task, asked once per class."""

from __future__ import annotations

import asyncio
import logging

from splitup.core import tuning
from splitup.core.errors import SplitUpError
from splitup_oracle.member import sandbox

_log = logging.getLogger("splitup.oracle.abilities")


class RecomputeCapabilities:
    """Tries classes as nodes name them, one after the other, each in a process of its own."""

    def __init__(self) -> None:
        self._known: dict[str, bool | None] = {}  # None: being tried, or waiting for it
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def can_recompute(self, determinism: str) -> bool:
        """Return whether this machine computes in a class; what is not known yet counts as so.

        Of more names than a network has classes, the last ones count as unable.
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
        """Stop trying."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _try(self, determinism: str) -> None:
        async with self._turn:
            try:
                found = await sandbox.find_class(determinism)
            except (SplitUpError, OSError) as error:
                _log.warning("nothing can be recomputed as '%s' here: %s", determinism, error)
                found = ""
            self._known[determinism] = found == determinism
            if found and found != determinism:
                _log.warning("this machine computes as '%s', not as '%s'", found, determinism)
