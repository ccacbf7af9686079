"""Noise in every rounding: how much of a result is defined."""

from __future__ import annotations

import numpy as np

from splitup.core import limits
from splitup.graph.arrays import Array
from splitup.graph.ir import Graph, encode_float
from splitup.graph.noise import add_noise
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder, compute_graph

SIZE = 64


def compute(graph: Graph, *inputs: Array, keys: dict[str, bytes] | None = None) -> Array:
    params = {("INPUT", place): value for place, value in enumerate(inputs)}
    for place, data in enumerate((keys or {}).values()):
        params["WEIGHT", place] = np.frombuffer(data, "<i4")
    return compute_graph(graph, params)[graph.outputs[0].node].astype(np.float64)


def measure(graph: Graph, *inputs: Array, seed: str = "seed") -> float:
    """Return the relative L2 distance between the result with and without noise."""
    exact = compute(graph, *inputs)
    made, keys = add_noise(check_graph(graph), seed)
    noisy = compute(made, *inputs, keys=keys)
    return float(np.linalg.norm(noisy - exact) / np.linalg.norm(exact))


def make_dot_products() -> Graph:
    """y = W x, both inputs."""
    b = Builder()
    w, x = b.input("w", "float32", SIZE, SIZE), b.input("x", "float32", SIZE)
    product = b.add(
        "MUL",
        "float32",
        b.add("PERMUTE", "float32", w, arg=(1, 0)),
        b.add("RESHAPE", "float32", x, arg=(SIZE, 1)),
    )
    total = b.add("REDUCE", "float32", product, arg=("ADD", 1))
    return b.graph({"y": b.store("float32", total)})


def test_noise_is_as_large_as_rounding_where_results_are_defined() -> None:
    rng = np.random.default_rng(1)
    w, x = rng.random((SIZE, SIZE), np.float32), rng.random(SIZE, np.float32)
    assert 1e-8 < measure(make_dot_products(), w, x) < 1e-6


def test_sums_that_cancel_are_not_defined() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(SIZE)
    w = rng.standard_normal((SIZE, SIZE))
    w -= np.outer(w @ x, x) / (x @ x)  # orthogonal to the input that somebody chose
    distance = measure(make_dot_products(), w.astype(np.float32), x.astype(np.float32))
    assert distance > 0.1


def test_chaos_from_integers_alone_is_not_defined() -> None:
    b = Builder()
    tokens = b.input("tokens", "int32", SIZE)
    value = b.add(
        "MUL",
        "float32",
        b.add("CAST", "float32", tokens),
        b.const("float32", encode_float(1 / 128)),
    )
    for _ in range(60):
        left = b.add("SUB", "float32", b.const("float32", encode_float(1.0)), value)
        both = b.add("MUL", "float32", value, left)
        value = b.store(
            "float32", b.add("MUL", "float32", both, b.const("float32", encode_float(3.9375)))
        )
    graph = b.graph({"y": value})
    assert measure(graph, np.arange(1, SIZE + 1, dtype=np.int32)) > 0.1


def test_what_does_not_round_gets_no_noise() -> None:
    b = Builder()
    table, index = b.input("table", "float16", SIZE, 2), b.input("index", "int32", 3)
    row = b.add("LOOKUP", "float16", table, index)
    largest = b.add("MAX", "float16", row, b.add("NEG", "float16", row))
    graph = b.graph({"y": b.store("float32", b.add("CAST", "float32", largest))})
    made, keys = add_noise(check_graph(graph), "seed")
    assert made.nodes == graph.nodes and not keys and made.weights == graph.weights


def test_the_seed_decides_and_zero_stays_zero() -> None:
    rng = np.random.default_rng(1)
    w, x = rng.random((SIZE, SIZE), np.float32), rng.random(SIZE, np.float32)
    graph = make_dot_products()
    assert measure(graph, w, x) == measure(graph, w, x) != measure(graph, w, x, seed="other")
    noisy, keys = add_noise(check_graph(graph), "seed")
    assert not compute(noisy, w, np.zeros_like(x), keys=keys).any()


def test_code_does_not_depend_on_the_seed() -> None:
    first, other = (add_noise(check_graph(make_dot_products()), seed)[0] for seed in ("a", "b"))
    assert first.nodes == other.nodes and first.weights != other.weights


def test_a_task_of_as_many_inputs_as_may_be_gets_noise() -> None:
    """Nor does it help to have a weight of the keys' name."""
    b = Builder()
    value = b.weight("noise0", np.ones((8, SIZE), np.float32))
    inputs = [b.input(f"x{place}", "float32", SIZE) for place in range(limits.MAX_PORTS)]
    for start in range(0, len(inputs), 8):
        rows = b.add("STACK", "float32", *inputs[start : start + 8])
        value = b.store("float32", b.add("ADD", "float32", value, rows))
    graph = check_graph(b.graph({"y": value}))
    noisy, keys = add_noise(graph, "seed")
    assert [*keys] == ["noise1"] and len(noisy.weights) == 2 and noisy.inputs == graph.inputs


def test_rows_of_a_symbol_are_taken_as_they_come() -> None:
    b = Builder()
    x = b.rows("x", "float32", "T", 5, SIZE)
    graph = b.graph({"y": b.store("float32", b.add("MUL", "float32", x, x))})
    for rows in (1, 5):
        assert 0 < measure(graph, np.full((rows, SIZE), 1.1, np.float32)) < 1e-6
