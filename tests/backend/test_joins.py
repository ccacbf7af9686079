"""Tasks that only join bytes are found, no others, and give the bytes that kernels give."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from splitup.backend.joins import find_join
from splitup.backend.runtime import TaskProgram
from splitup.graph.ir import Arg, Graph, encode_float
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder

ROWS, WIDTHS = 3, (2, 1, 4)
SIZE = sum(WIDTHS)


def choose(b: Builder, middle: int, left: int, right: int, ones: Arg = (1, SIZE)) -> int:
    place = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=SIZE), arg=ones)
    is_left = b.add("CMPLT", "bool", place, b.const("int32", str(middle)))
    return b.add("WHERE", "float32", is_left, left, right)


def build(
    middles: tuple[int, int] = (2, 3),
    offsets: tuple[int, ...] = (0, 2, 3),
    order: tuple[int, ...] = (0, 1, 2),
    change: Callable[[Builder, int], int] = lambda b, node: node,
) -> Graph:
    """Return the join of three inputs of rows, as the compiler writes it."""
    b = Builder()
    inputs = [b.rows(f"x{n}", "float32", "T", ROWS, width) for n, width in enumerate(WIDTHS)]
    pads = [
        b.add("PAD", "float32", inputs[n], arg=((0, "T"), (offset, SIZE)))
        for n, offset in zip(order, offsets, strict=True)
    ]
    right = choose(b, middles[1], pads[1], pads[2])
    return b.graph({"y": b.store("float32", change(b, choose(b, middles[0], pads[0], right)))})


def test_the_join_of_rows_gives_the_bytes_of_kernels() -> None:
    graph = build()
    join = find_join(check_graph(graph))
    assert join is not None and join.pieces == ((0, 8), (1, 4), (2, 16))
    program = TaskProgram.from_graph(check_graph(graph), lambda name: memoryview(b""))
    plain = TaskProgram.from_graph(check_graph(graph), lambda name: memoryview(b""))
    plain._join = None
    rng = np.random.default_rng(0)
    for rows in (1, 3, 2):
        parts = [rng.integers(0, 256, (rows, 4 * width), np.uint8) for width in WIDTHS]
        inputs = [memoryview(part.tobytes()) for part in parts]  # NaNs and -0.0 among them
        expected = np.concatenate(parts, 1).tobytes()
        assert program.run(program.new_state(), inputs) == [expected]
        assert plain.run(plain.new_state(), inputs) == [expected]


def negate(b: Builder, node: int) -> int:
    return b.add("MUL", "float32", node, b.const("float32", encode_float(-1.0)))


@pytest.mark.parametrize(
    "graph",
    [
        functools.partial(build, middles=(3, 3)),  # one side is empty
        functools.partial(build, middles=(1, 3)),  # a zero of the padding would show
        functools.partial(build, offsets=(0, 3, 3)),
        functools.partial(build, order=(0, 2, 1), offsets=(0, 2, 3)),  # the longer one is cut off
        functools.partial(build, change=negate),
    ],
)
def test_anything_else_is_no_join(graph: Callable[[], Graph]) -> None:
    assert find_join(check_graph(graph())) is None


def test_a_tree_of_shared_nodes_ends_soon() -> None:
    """Were every path followed, there would be 2^20 of them."""
    b = Builder()
    x = b.input("x", "float32", 1, 1)
    node = b.add("PAD", "float32", x, arg=((0, 1), (0, SIZE)))
    for _ in range(20):
        node = choose(b, 1, node, node)
    graph = b.graph({"y": b.store("float32", node)})
    assert find_join(check_graph(graph)) is None
