"""What is predicted for one value in memory."""

from __future__ import annotations

import numpy as np
import pytest
from splitup_deploy.cutting.partition import find_regions
from splitup_deploy.cutting.timing import Clock

from bench.measure.prediction import LAUNCH_PS, ProcessorClock
from splitup.graph.ir import Graph
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder


def predict(graph: Graph, clock: type[Clock] = ProcessorClock) -> int:
    (region,) = find_regions(graph, {})
    return clock(check_graph(graph)).predict_ps(region.root, region.nodes)


def make_lookup(length: int) -> Graph:
    """Look up 2 rows of a table that is scaled where it is read, as quantised ones are."""
    b = Builder()
    table = b.add("CAST", "float32", b.weight("w", np.zeros((length, 8), np.uint8)))
    table = b.add("MUL", "float32", table, b.const("float32", "0" * 16))
    places = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=length), arg=(length, 1, 1))
    wanted = b.add("RESHAPE", "int32", b.input("rows", "int32", 2), arg=(1, 2, 1))
    hit = b.add("CMPEQ", "bool", places, wanted)
    table = b.add("RESHAPE", "float32", table, arg=(length, 1, 8))
    picked = b.add("WHERE", "float32", hit, table, b.const("float32", "0" * 16))
    return b.graph({"y": b.store("float32", b.add("REDUCE", "float32", picked, arg=("ADD", 1)))})


@pytest.mark.parametrize("clock", [Clock, ProcessorClock])
def test_a_lookup_takes_as_long_as_what_it_finds(clock: type[Clock]) -> None:
    assert predict(make_lookup(4_000), clock) == predict(make_lookup(40), clock)


def test_a_product_takes_as_long_as_its_whole_matrix() -> None:
    def make(out: int) -> Graph:
        b = Builder()
        weight = b.add("CAST", "float32", b.weight("w", np.zeros((out, 64), np.uint8)))
        x = b.input("x", "float32", 1, 64)
        product = b.add("PERMUTE", "float32", b.add("MUL", "float32", x, weight), arg=(1, 0))
        total = b.add("REDUCE", "float32", product, arg=("ADD", 1))
        return b.graph({"y": b.store("float32", total)})

    ratio = (predict(make(8_000)) - LAUNCH_PS) / (predict(make(4_000)) - LAUNCH_PS)
    assert ratio == pytest.approx(2, rel=1e-3)
