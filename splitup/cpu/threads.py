"""Threads that compute parts of a kernel in parallel.

The functions they call are machine code, during which Python's global lock is released. No result
depends on which thread computes which part.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

_Job = tuple[Callable[[Any], Any], Any]


@functools.cache
def get_kernel_threads(threads: int) -> KernelThreads:
    """Return this process's threads."""
    return KernelThreads(threads)


class KernelThreads:
    """``threads - 1`` threads beside the caller's, started when they are first needed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # several programs share the threads
        self._started = False

    def run(self, function: Callable[[Any], Any], arguments: Sequence[Any]) -> None:
        """Call the function, which must not raise, on each argument; return when all are done."""
        with self._lock:
            if not self._started:
                self._start()
            for argument in arguments[1:]:
                self._jobs.put((function, argument))
            function(arguments[0])
            for _ in arguments[1:]:
                self._done.get()

    def _start(self) -> None:
        self._started = True
        for number in range(1, self.threads):
            name = f"kernel-{number}"
            threading.Thread(
                target=_work, args=(self._jobs, self._done), name=name, daemon=True
            ).start()


def _work(jobs: queue.SimpleQueue[_Job], done: queue.SimpleQueue[None]) -> None:
    while True:
        function, argument = jobs.get()
        function(argument)
        done.put(None)
