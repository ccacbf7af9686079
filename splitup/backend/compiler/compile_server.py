"""Compiles tasks for the daemon of a node, each in a fork of one confined process.

What it returns is kept and run as machine code (``splitup.backend.compiler.kernel_cache``). A fork
has seen no other task, and the process that forks looks into none, nor into what its forks return:
so no task can put code into another one's place. A worker could: it runs what was compiled.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.core import tuning
from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidModel
from splitup.sandbox.child import Answer, Child, ChildDied, ChildFailed, serve
from splitup.sandbox.confinement import confine

_MODULE: Final = "splitup.backend.compiler.compile_server"  # __name__ is another in the child


class CompileServer:
    """The daemon's side. The process starts with the first task and ends when none comes."""

    def __init__(self, device: str, device_index: int, cache: KernelCache) -> None:
        """``device`` is what tinygrad's DEV says, "" for any."""
        self._device = device
        self._device_index = device_index
        self._cache = cache
        self._child: Child | None = None
        self._waiting = 0
        self._closing: asyncio.TimerHandle | None = None

    async def find(
        self, graph: bytes, report: Mapping[str, str], memory_bytes: int, gate: int | None
    ) -> bytes:
        """Return what is kept of a task for a worker of this report, or ``compile`` it."""
        device = report["device"].partition(":")[0]
        key = (compute_digest(graph), report["determinism_class"], device)
        kernels = self._cache.load(*key)
        if kernels is None:
            async with self._cache.reserve():
                kernels = self._cache.load(*key)  # another daemon may have compiled it meanwhile
                if kernels is None:
                    kernels = await self.compile(graph, memory_bytes, gate)
                    self._cache.store(*key, kernels)
        return kernels

    async def compile(self, graph: bytes, memory_bytes: int, gate: int | None) -> bytes:
        """Return the bytes of a task's schedule.

        Raises InvalidModel for a graph that breaks a rule, needs more than ``memory_bytes``, is not
        shut by ``gate``, or takes too long to compile.
        """
        self._stay()
        if self._child is None or not self._child.is_running:
            self._child = Child(_MODULE, device=self._device)
        question = {
            "device_index": self._device_index,
            "memory_bytes": memory_bytes,
            "gate": gate,
        }
        self._waiting += 1
        try:
            _, made = await self._child.ask_apart(
                question,
                [graph],
                timeout_s=tuning.LOAD_TIMEOUT_S,
                max_bytes=tuning.KERNEL_CACHE_BYTES,
            )
        except ChildFailed as error:
            raise InvalidModel(str(error)) from None
        except ChildDied as error:
            raise InvalidModel(f"the task was given up while it was compiled: {error}") from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                loop = asyncio.get_running_loop()
                self._closing = loop.call_later(tuning.COMPILER_IDLE_S, self.close)
        if len(made) != 1:
            raise InvalidModel("compiling the task gave nothing")
        return bytes(made[0])

    def close(self) -> None:
        """End the process; it starts again with the next task."""
        self._stay()
        if self._child is not None:
            self._child.close()
            self._child = None

    def _stay(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def answer(question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
    """Compile a graph."""
    from splitup.backend.compiler.compile_process import compile_to_bytes
    from splitup.backend.runtime import describe_device, load_checked

    device = describe_device(question["device_index"]).device
    told = question["memory_bytes"], question["gate"]
    load = functools.partial(load_checked, bytes(buffers[0]), device, *told)
    return {}, [compile_to_bytes(load, device)]


def main() -> None:
    from splitup.backend.compiler import (
        compile_process as compile_process,  # opens what tells its memory
    )

    confine(os.environ.get("DEV", ""), forks=True)
    serve(answer)


if __name__ == "__main__":
    main()
