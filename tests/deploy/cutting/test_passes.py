from __future__ import annotations

from collections import Counter

from splitup_deploy.cutting.passes import (
    LARGE_KERNEL_US,
    materialise_reductions,
    materialise_shared_reductions,
)
from splitup_deploy.frontends.tracing import TracedModel

from splitup.graph.ir import Graph
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder


def count_stores(model: TracedModel) -> int:
    check_graph(model.graph)
    return Counter(node.op for node in model.graph.nodes)["CONTIGUOUS"]


def model(graph: Graph, labels: dict[int, str] | None = None) -> TracedModel:
    return TracedModel(graph, labels or {}, {})


def make_reductions() -> tuple[Graph, int]:
    """One reduction read by two stored values, one read by one, one of constants alone."""
    b = Builder()
    x = b.input("x", "float32", 4, 2)
    shared = b.add("REDUCE", "float32", x, arg=("ADD", 1))
    single = b.add("REDUCE", "float32", x, arg=("MAX", 1))
    constant = b.add("REDUCE", "int32", b.add("IOTA", "int32", arg=4), arg=("ADD", 1))
    first = b.store("float32", b.add("ADD", "float32", shared, single))
    scaled = b.add("MUL", "float32", shared, b.add("CAST", "float32", constant))
    second = b.store("float32", scaled)
    return b.graph({"first": first, "second": second}), second


def test_shared_reductions_are_stored_once() -> None:
    graph, second = make_reductions()
    before = model(graph, {second: "second"})
    after = materialise_shared_reductions(before)
    assert count_stores(after) == count_stores(before) + 1
    assert after.labels == {after.graph.outputs[1].node: "second"}
    assert materialise_shared_reductions(after).graph == after.graph


def test_all_reductions_of_data_are_stored() -> None:
    graph, _ = make_reductions()
    after = materialise_reductions(model(graph))
    assert count_stores(after) == count_stores(model(graph)) + 2
    assert materialise_reductions(after).graph == after.graph


def test_large_kernels_are_divided() -> None:
    b = Builder()
    x = b.input("x", "float32", 4)
    for _ in range(50):
        x = b.add("EXP2", "float32", x)
    after = materialise_reductions(model(b.graph({"y": b.store("float32", x)})))
    assert count_stores(after) == 10
    assert all(kernel.cost_us <= 2 * LARGE_KERNEL_US for kernel in check_graph(after.graph).kernels)
    assert materialise_reductions(after).graph == after.graph


def test_a_value_read_through_many_views_is_stored() -> None:
    b = Builder()
    x = b.input("x", "float32", 4096)
    for level in range(11):
        shifted = b.add("SHRINK", "float32", x, arg=((2**level, 4096 - 2**level),))
        shifted = b.add("PAD", "float32", shifted, arg=((0, 4096),))
        x = b.add("MUL", "float32", x, shifted)
    after = materialise_reductions(model(b.graph({"y": b.store("float32", x)})))
    assert 2 <= count_stores(after) <= 4
