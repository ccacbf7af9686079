"""The event loop of all programs: uvloop where it is installed, which halves the time of a hop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

T = TypeVar("T")
_FILES: Final = 65_536  # open files of a process: far more connections than its bounds allow


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop; asyncio's own where there is no uvloop (on Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, on such a loop."""
    _allow_files()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)


@contextlib.contextmanager
def catch_signals(stopped: asyncio.Event) -> Iterator[None]:
    """Set ``stopped`` when the process is asked to end."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _allow_files() -> None:
    """Raise the number of files that this process may open: most systems begin with 1,024."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES:
        wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
