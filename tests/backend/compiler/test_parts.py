"""Equal values of a graph are scheduled once, and give the kernels that they have together."""

from __future__ import annotations

import numpy as np
import pytest

from splitup.backend.compiler import lowering
from splitup.backend.compiler.parts import GraphPart, find_parts
from splitup.backend.compiler.schedule import Schedule, compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.graph.ir import Graph, encode_float
from splitup.graph.rules import CheckedGraph, check_graph
from tests.graph.graphs import Builder


def add_layer(b: Builder, x: int, weight: int, scale: str) -> int:
    """Return a norm over rows [8, 48] in memory, and their product with a matrix in memory."""
    total = b.add("REDUCE", "float32", b.add("PERMUTE", "float32", x, arg=(1, 0)), arg=("ADD", 1))
    inverse = b.add("RESHAPE", "float32", b.add("RECIPROCAL", "float32", total), arg=(8, 1))
    normed = b.store("float32", b.add("MUL", "float32", x, inverse))
    left = b.add("RESHAPE", "float32", normed, arg=(8, 48, 1))
    right = b.add("RESHAPE", "float32", weight, arg=(1, 48, 48))
    product = b.add("MUL", "float32", left, right)
    product = b.add("PERMUTE", "float32", product, arg=(1, 0, 2))
    summed = b.add("REDUCE", "float32", product, arg=("ADD", 1))
    factor = b.const("float32", encode_float(float(scale)))
    return b.store("float32", b.add("MUL", "float32", summed, factor))


def make_layers(*scales: str) -> Graph:
    b = Builder()
    x = b.input("x", "float32", 8, 48)
    for number, scale in enumerate(scales):
        weight = b.weight(f"w{number}", np.full((48, 48), number, np.float32))
        x = add_layer(b, x, weight, scale)
    return b.graph({"y": x})


def make_shared(*, is_symbolic: bool) -> Graph:
    """Return two values that need one sum of each row, and stretch it over the row."""
    b = Builder()
    rows = "T" if is_symbolic else 8
    x = b.rows("x", "float32", "T", 8, 48) if is_symbolic else b.input("x", "float32", 8, 48)
    columns = b.add("PERMUTE", "float32", x, arg=(1, 0))
    total = b.add("REDUCE", "float32", columns, arg=("ADD", 1))
    wide = b.add("RESHAPE", "float32", total, arg=(rows, 1))
    first = b.store("float32", b.add("MUL", "float32", x, wide))
    return b.graph({"y": first, "z": b.store("float32", b.add("ADD", "float32", first, wide))})


def keep_whole(graph: CheckedGraph) -> tuple[GraphPart, ...]:
    roots = tuple(dict.fromkeys(output.node for output in graph.outputs))
    return (GraphPart(roots, tuple(range(len(graph.nodes))), (), 0),)


def compile_both(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> tuple[Schedule, Schedule]:
    """Return the schedule of a graph in parts, and as a whole."""
    checked, device = check_graph(graph), select_device().device
    apart = compile_graph(checked, device, uses_native_code=False)
    monkeypatch.setattr(lowering, "find_parts", keep_whole)
    return apart, compile_graph(checked, device, uses_native_code=False)


def test_equal_layers_are_one_pattern() -> None:
    parts = find_parts(check_graph(make_layers("0.5", "0.5", "2", "0.5")))
    assert [part.pattern for part in parts] == [0, 1, 0, 1, 0, 5, 0, 1]
    assert [len(part.buffers) for part in parts] == [2, 3] * 4


def test_a_temporary_of_several_values_is_a_part() -> None:
    graph = check_graph(make_shared(is_symbolic=False))
    assert [(part.pattern, part.is_temporary) for part in find_parts(graph)] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    (whole,) = find_parts(check_graph(make_shared(is_symbolic=True)))
    assert len(whole.roots) == 2


@pytest.mark.parametrize(
    "graph",
    [
        make_layers("0.5", "0.5", "2", "0.5"),
        make_shared(is_symbolic=False),
        make_shared(is_symbolic=True),
    ],
    ids=["layers", "shared", "rows"],
)
def test_parts_give_the_schedule_of_the_whole(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, whole = compile_both(graph, monkeypatch)
    assert apart == whole
