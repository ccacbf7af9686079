"""The event loop of all programs: uvloop where it is installed, which halves the time of a hop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop; asyncio's own where there is no uvloop (on Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, on such a loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)
