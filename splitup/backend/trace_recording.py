"""Record the value trace of a task on this process's device, or run one kernel of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from splitup.backend.runtime import TaskProgram
from splitup.graph.ir import count_rows
from splitup.graph.rules import CheckedGraph
from splitup.graph.value_trace import ValueLayout, expose_values

Keep = Callable[[bytes], None]


def record_trace(
    graph: CheckedGraph,
    get_bytes: Callable[[str], memoryview],
    steps: Sequence[Sequence[bytes]],
    keep: Keep = lambda data: None,
) -> list[bytes]:
    """Compute ``steps`` from zero state; return the digests of all leaves in order.

    ``keep`` is called with the bytes of every leaf, which a dispute may ask for later.
    """
    rows = [count_rows(graph.inputs, inputs) for inputs in steps]
    layout = ValueLayout(
        graph, tuple(tuple(bound[symbol.name] for symbol in graph.symbols) for bound in rows)
    )
    programs = [
        TaskProgram.from_graph(part, get_bytes, is_foreign=True) for part in expose_values(graph)
    ]
    states = [program.new_state() for program in programs]
    digests = []
    for inputs in steps:
        leaves = list(inputs)
        for program, state in zip(programs, states, strict=True):
            leaves += program.run(state, inputs)
        for data in leaves:
            keep(data)
            digests.append(hashlib.sha256(data).digest())
    assert len(digests) == layout.count
    return digests


def run_kernel(region: CheckedGraph, operands: Sequence[bytes]) -> bytes:
    """Return the one value of a graph of ``value_trace.cut_region``, as this device computes it."""
    program = TaskProgram.from_graph(region, lambda name: memoryview(b""), is_foreign=True)
    (result,) = program.run(program.new_state(), operands)
    return bytes(result)
