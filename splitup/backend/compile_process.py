"""Compiles one task in a confined process that ends with it: ``compile_apart``.

The kernel cache keeps what this process returns. It has seen no other task, so that no task can put
code into another one's place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from splitup.core import tuning
from splitup.core.errors import InvalidModel
from splitup.sandbox.child import Answer, Child, ChildDied, ChildFailed, serve
from splitup.sandbox.confinement import confine


async def compile_apart(graph: bytes, device: str, device_index: int) -> bytes | None:
    """Return the bytes of a task's schedule; None when launch sizes are expressions.

    ``device`` is what tinygrad's DEV says. Raises InvalidModel for a graph that breaks a rule or
    ends its compiler.
    """
    child = await Child.start(__name__, [device, str(device_index)], device=device)
    try:
        _, made = await child.ask(
            {},
            [graph],
            timeout_s=tuning.LOAD_TIMEOUT_S,
            max_bytes=tuning.KERNEL_CACHE_BYTES,
        )
    except (ChildDied, ChildFailed) as error:
        raise InvalidModel(f"the task cannot be compiled: {error}") from None
    finally:
        await child.close()
    return bytes(made[0]) if made else None


def main() -> None:
    device, device_index = sys.argv[1], int(sys.argv[2])
    confine(device)

    def answer(question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        from splitup.backend.devices import select_device
        from splitup.backend.native_code import find_native_code
        from splitup.backend.schedule import compile_graph
        from splitup.backend.schedule_bytes import encode_schedule
        from splitup.graph.rules import load_graph

        graph = load_graph(bytes(buffers[0]))
        opened = select_device(device_index).device
        made = encode_schedule(compile_graph(graph, opened), find_native_code(opened))
        return {}, [] if made is None else [made]

    serve(answer)


if __name__ == "__main__":
    main()
