"""A child that starts with the first question and ends when none comes for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from splitup.core import tuning
from splitup.sandbox.child import Child
from splitup.sandbox.serving import Buffers


class WarmChild:
    """One child at a time; what it imported serves all questions, until it is idle or dies."""

    def __init__(self, module: str, device: str) -> None:
        """``device`` is what tinygrad's DEV says, "" for any."""
        self._module = module
        self._device = device
        self._child: Child | None = None
        self._waiting = 0
        self._closing: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Return the child's process id, None while there is none."""
        return None if self._child is None else self._child.pid

    async def ask(
        self,
        question: Mapping[str, Any],
        buffers: Buffers = (),
        *,
        timeout_s: float,
        max_bytes: int,
        files: Sequence[int] = (),
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the child's answer, as ``Child.ask`` does."""
        self._stay()
        if self._child is None or not self._child.is_running:
            self._child = Child(self._module, device=self._device)
        self._waiting += 1
        try:
            return await self._child.ask_apart(
                question, buffers, timeout_s=timeout_s, max_bytes=max_bytes, files=files
            )
        finally:
            self._waiting -= 1
            if not self._waiting:
                loop = asyncio.get_running_loop()
                self._closing = loop.call_later(tuning.COMPILER_IDLE_S, self.close)

    def close(self) -> None:
        """End the child; the next question starts another."""
        self._stay()
        if self._child is not None:
            self._child.close()
            self._child = None

    def _stay(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
