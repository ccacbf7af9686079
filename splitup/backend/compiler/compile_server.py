"""Compiles tasks for the daemon of a node, each in a fork of one confined process.

What it returns is kept and run as machine code (``splitup.backend.compiler.kernel_cache``). A fork
has seen no other task, and the process that forks looks into none, nor into what its forks return:
so no task can put code into another one's place. A worker could: it runs what was compiled.

Tasks that differ in names and digests alone, as the blocks of a model do, are compiled once. What
compiles gets neither, so nobody's names can decide about the code that others run.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.core import tuning
from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidModel, TooSlow, Unavailable
from splitup.core.garbage_collection import pause_garbage_collection
from splitup.graph.ir import parse_graph, remove_names
from splitup.sandbox.child import ChildDied, ChildFailed
from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.serving import Answer
from splitup.sandbox.warm_child import WarmChild

if TYPE_CHECKING:
    from splitup.graph.rules import CheckedGraph

MODULE: Final = "splitup.backend.compiler.compile_server"  # __name__ is another in the child


class CompileServer:
    """The daemon's side. The process starts with the first task and ends when none comes."""

    def __init__(self, child: WarmChild, device_index: int, cache: KernelCache) -> None:
        """``child`` runs this module, or one that answers its questions, too."""
        self._child = child
        self._device_index = device_index
        self._cache = cache
        self._slow: Counter[tuple[str, bool]] = Counter()  # (task, noisy) -> tries too slow

    async def find(
        self,
        graph: bytes,
        report: Mapping[str, str],
        memory_bytes: int,
        gate: int | None,
        *,
        is_noisy: bool = False,
    ) -> bytes:
        """Return what is kept of a task for a worker of this report, or ``compile`` it.

        Raises what ``compile`` does.
        """
        device = report["device"].partition(":")[0]
        graph = await asyncio.to_thread(lambda: remove_names(parse_graph(graph)).to_bytes())
        task_id = compute_digest(graph) + ("/noise" if is_noisy else "")
        key = (task_id, report["determinism_class"], device)
        kernels = self._cache.load(*key)
        if kernels is None:
            async with self._cache.reserve():
                kernels = self._cache.load(*key)  # another daemon may have compiled it meanwhile
                if kernels is None:
                    kernels = await self.compile(graph, memory_bytes, gate, is_noisy=is_noisy)
                    self._cache.store(*key, kernels)
        return kernels

    async def compile(
        self, graph: bytes, memory_bytes: int, gate: int | None, *, is_noisy: bool = False
    ) -> bytes:
        """Return the bytes of a task's schedule, or of the task with noise.

        A task that took too long gets twice the time at the next try, and after some tries none.
        Raises InvalidModel for a graph that breaks a rule, needs more than ``memory_bytes``, or is
        not shut by ``gate``; TooSlow, and Unavailable where the machine or the process failed.
        """
        task = compute_digest(graph), is_noisy
        tries = self._slow[task]
        if tries >= tuning.SLOW_TRIES:
            raise TooSlow(f"compiling the task took too long here {tries} times; it is given up")
        question = {
            "device_index": self._device_index,
            "memory_bytes": memory_bytes,
            "gate": gate,
            "noisy": is_noisy,
            "patience": 2**tries,
        }
        try:
            _, made = await self._child.ask(
                question,
                [graph],
                timeout_s=2**tries * tuning.LOAD_TIMEOUT_S,
                max_bytes=tuning.KERNEL_CACHE_BYTES,
            )
        except ChildFailed as error:
            raise InvalidModel(str(error)) from None
        except ChildDied as error:
            raise Unavailable(f"the task could not be compiled here: {error}") from None
        except TooSlow:
            if len(self._slow) >= tuning.SLOW_TASKS:
                self._slow.clear()
            self._slow[task] += 1
            raise
        if len(made) != 1:
            raise InvalidModel("compiling the task gave nothing")
        return bytes(made[0])

    def close(self) -> None:
        """End the process; it starts again with the next task."""
        self._child.close()


def answer(question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
    """Compile a graph."""
    with pause_garbage_collection():
        from splitup.backend.compiler.compile_process import compile_to_bytes
        from splitup.backend.runtime import describe_device, load_checked
        from splitup.graph.noise import add_noise

    device = describe_device(question["device_index"]).device

    def load() -> CheckedGraph:
        told = question["memory_bytes"], question["gate"]
        graph = load_checked(bytes(buffers[0]), device, *told)
        return add_noise(graph, "")[0] if question["noisy"] else graph  # code for any seed

    return {}, [compile_to_bytes(load, device, patience=question["patience"])]


def main() -> None:
    with pause_garbage_collection():  # what follows opens what tells its memory
        from splitup.backend.compiler import compile_process as compile_process

    serve_confined(answer, os.environ.get("DEV", ""), forks=True)


if __name__ == "__main__":
    main()
