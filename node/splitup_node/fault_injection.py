"""Places where a test can crash the node: ``CRASH_AT=name``, or ``name:5`` for the fifth time.

Without the variable a place costs one comparison. The process is killed without any cleanup.
"""

from __future__ import annotations

import os
import signal
from typing import Final

_NAME, _, _COUNT = os.environ.get("CRASH_AT", "").partition(":")
_WANTED: Final = _NAME
_left = int(_COUNT or "1")


def crash_point(name: str) -> None:
    """Kill this process if the environment names this place."""
    if name == _WANTED:
        _count_down()


def _count_down() -> None:
    global _left
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
