from __future__ import annotations

import numpy as np

from splitup.graph.cost import (
    BYTES_PER_NANO_USDC,
    FLOPS_PER_NANO_USDC,
    compute_flops,
    compute_price_nano_usdc,
    compute_vram_bytes,
)
from splitup.graph.ir import encode_float
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder, make_legal


def test_memory_counts_every_buffer() -> None:
    graph = make_legal()  # input, weight, old and new state: 256 bytes each; y is the new state
    assert compute_vram_bytes(check_graph(graph)) == 4 * 256


def test_a_matrix_product_costs_two_operations_per_element() -> None:
    b = Builder()
    x = b.add("RESHAPE", "float32", b.input("x", "float32", 8), arg=(8, 1))
    w = b.weight("w", np.zeros((8, 16), np.float32))
    product = b.add("MUL", "float32", x, w)
    y = b.store("float32", b.add("REDUCE", "float32", product, arg=("ADD", 1)))
    graph = b.graph({"y": y})
    assert compute_flops(check_graph(graph)) == 2 * 8 * 16


def test_a_lookup_costs_what_it_gives() -> None:
    b = Builder()
    index = b.add("RESHAPE", "int32", b.input("i", "int32", 1), arg=(1, 1))
    rows = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=1000), arg=(1000, 1))
    hit = b.add("CMPEQ", "bool", rows, index)
    w = b.weight("t", np.zeros((1000, 16), np.float32))
    picked = b.add("WHERE", "float32", hit, w, b.const("float32", encode_float(0.0)))
    y = b.store("float32", b.add("REDUCE", "float32", picked, arg=("ADD", 1)))
    graph = b.graph({"y": y})
    assert compute_flops(check_graph(graph)) == 16


def test_prices_are_whole_and_never_nothing() -> None:
    assert compute_price_nano_usdc(0, 0) == 1
    assert compute_price_nano_usdc(3 * FLOPS_PER_NANO_USDC, 2 * BYTES_PER_NANO_USDC) == 5
