"""The determinism classes in which this member can recompute tasks, tested once per device."""

from __future__ import annotations

import asyncio
import logging

from splitup.core.background import BackgroundTasks
from splitup.core.errors import SplitUpError
from splitup.messages.determinism import find_device
from splitup_oracle.member.recomputation import Recomputer

_log = logging.getLogger("splitup.oracle.recompute_capabilities")


class RecomputeCapabilities:
    """Tests the devices of the classes that nodes name, one at a time, each in its own process.

    A machine computes in one class per device, so nodes that invent classes cause no further tests.
    """

    def __init__(self, recomputer: Recomputer) -> None:
        self._recomputer = recomputer
        self._found: dict[str, str | None] = {}  # device -> our class on it; None: not tested yet
        self._turn = asyncio.Lock()
        self._tests = BackgroundTasks()

    def can_recompute(self, determinism: str) -> bool:
        """Return whether this machine computes in a class; True while the test is not over."""
        device = find_device(determinism)
        if not device:
            return False
        if device not in self._found:
            self._found[device] = None
            self._tests.start(self._try(device, determinism))
        return self._found[device] in (None, determinism)

    async def close(self) -> None:
        """Cancel all tests."""
        await self._tests.close()

    async def _try(self, device: str, determinism: str) -> None:
        async with self._turn:
            try:
                found = await self._recomputer.find_class(determinism)
            except (SplitUpError, OSError) as error:
                _log.warning("nothing can be recomputed on %s here: %s", device, error)
                found = ""
            self._found[device] = found
            if found and found != determinism:
                _log.warning("this machine computes as '%s', not as '%s'", found, determinism)
