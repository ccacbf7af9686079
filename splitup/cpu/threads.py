"""Threads that run one sequence of kernels together, each its parts of it.

The kernels are machine code, during which Python's global lock is released. Between them the
threads wait for each other without Python: waking a thread takes as long as a small kernel. No
result depends on which thread computes which part.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from splitup.cpu.assembler import R8, RAX, RDI, RDX, RSI, Assembler, Mem
from splitup.cpu.machine_code import load_code

_Job = tuple[Callable[..., Any], Sequence[Any]]
_SPINS: Final = 500  # with a pause each, before another thread gets the processor
_SCHED_YIELD: Final = 24  # the number of the system call on x86-64


@functools.cache
def get_kernel_threads(threads: int) -> KernelThreads:
    """Return this process's threads."""
    return KernelThreads(threads)


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Return first and end of at most ``parts`` nearly equal parts."""
    parts = min(parts, length)
    edges = [length * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


class KernelThreads:
    """``threads - 1`` threads beside the caller's, started when they are first needed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()  # several programs share the threads
        self._process = 0  # in which they were started
        self._arrived = ctypes.c_uint64(0)
        self._expected = [ctypes.c_uint64(0) for _ in range(threads)]
        self._barriers = [
            tuple(map(ctypes.c_uint64, (*map(ctypes.addressof, (self._arrived, own)), threads)))
            for own in self._expected
        ]

    def get_barrier(self, thread: int) -> tuple[int, Sequence[ctypes.c_uint64]]:
        """Return the address and the arguments of a function that waits for the other threads."""
        return load_code(assemble_barrier).address, self._barriers[thread]

    def run(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> None:
        """Call machine code in all threads; ``arguments`` are those of each.

        It returns when the caller's own call has. The others end with a barrier, which that waits
        for.
        """
        with self._lock:
            if self._process != os.getpid():
                self._start()
            for one in arguments[1:]:
                self._jobs.put((function, one))
            function(*arguments[0])

    def _start(self) -> None:
        for word in (self._arrived, *self._expected):
            word.value = 0
        for number in range(1, self.threads):
            name = f"kernel-{number}"
            threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        self._process = os.getpid()


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        function, arguments = jobs.get()
        function(*arguments)


def assemble_barrier() -> bytes:
    """Return the code of a function that returns once all threads are in it.

    Its arguments are the address of the number of calls so far, the address of the number that this
    thread waits for, and how many threads there are.
    """
    asm = Assembler()
    asm.load(R8, Mem(RSI))
    asm.add(R8, RDX)
    asm.store(Mem(RSI), R8)
    asm.increment_shared(Mem(RDI))
    asm.label("again")
    asm.set_const(RDX, _SPINS)
    asm.label("wait")
    asm.load(RAX, Mem(RDI))
    asm.compare(RAX, R8)
    asm.jump("jge", "passed")
    asm.pause()
    asm.count_down(RDX, "wait")
    asm.set_const(RAX, _SCHED_YIELD)
    asm.call_system()
    asm.jump("jmp", "again")
    asm.label("passed")
    asm.ret()
    return asm.finish()
