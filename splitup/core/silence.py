"""What is said while a program waits for somebody who does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from splitup.core import tuning


class SilenceAlarm:
    """Calls ``warn`` once when nothing is noted for ``tuning.QUIET_S`` inside its ``with``."""

    def __init__(self, warn: Callable[[], None]) -> None:
        self._warn = warn
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self.note_progress()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def note_progress(self) -> None:
        """Begin to wait anew."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(tuning.QUIET_S, self._warn)
