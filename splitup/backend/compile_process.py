"""Compiles one task in a confined process that ends with it: ``compile_apart``.

The kernel cache keeps what this process returns. It has seen no other task, so that no task can put
code into another one's place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from splitup.core import tuning
from splitup.core.errors import InvalidModel
from splitup.sandbox.child import Answer, Child, ChildDied, ChildFailed, serve
from splitup.sandbox.confinement import confine

_MODULE: Final = "splitup.backend.compile_process"  # __name__ is another in the child


async def compile_apart(graph: bytes, device: str, device_index: int) -> bytes | None:
    """Return the bytes of a task's schedule; None when launch sizes are expressions.

    ``device`` is what tinygrad's DEV says. Raises InvalidModel for a graph that breaks a rule or
    ends its compiler.
    """
    child = Child(_MODULE, device=device)
    try:
        _, made = await child.ask_apart(
            {"device_index": device_index},
            [graph],
            timeout_s=tuning.LOAD_TIMEOUT_S,
            max_bytes=tuning.KERNEL_CACHE_BYTES,
        )
    except (ChildDied, ChildFailed) as error:
        raise InvalidModel(f"the task cannot be compiled: {error}") from None
    finally:
        child.close()
    return bytes(made[0]) if made else None


def answer(question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
    """Compile a graph."""
    from splitup.backend.devices import select_device
    from splitup.backend.native_code import find_native_code
    from splitup.backend.schedule import compile_graph
    from splitup.backend.schedule_bytes import encode_schedule
    from splitup.graph.rules import load_graph

    graph = load_graph(bytes(buffers[0]))
    device = select_device(question["device_index"]).device
    made = encode_schedule(compile_graph(graph, device), find_native_code(device))
    return {}, [] if made is None else [made]


def main() -> None:
    confine(os.environ.get("DEV", ""))
    serve(answer)


if __name__ == "__main__":
    main()
