"""A gate is proved, never believed: bit by bit, whatever the other inputs and weights hold."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest

from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec, holds_zeros, is_zero
from splitup.graph.gates import check_gate, compute_zero_step, find_gate, is_gate, shut
from splitup.graph.ir import Graph, encode_float
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder

ROWS = ("T", 4)


def make_expert(how: str) -> Graph:
    """A task of x [T, 2] and gates [T] that multiplies x by a weight and then by the gates."""
    b = Builder()
    x = b.rows("x", "float32", *ROWS, 2)
    gates = b.rows("gates", "float32", *ROWS)
    weight = b.weight("w", np.array([math.inf, 2.0], np.float32))
    product = b.store("float32", b.add("MUL", "float32", x, weight))
    column = b.add("RESHAPE", "float32", gates, arg=("T", 1))
    gated = b.add("MUL", "float32", product, column)
    zero = b.const("float32", encode_float(0.0))
    minus = b.const("float32", encode_float(-0.0))
    on, off = b.add("CMPNE", "bool", column, zero), b.add("CMPEQ", "bool", column, zero)
    below = b.add("CMPLT", "bool", zero, column)
    one = b.const("float32", encode_float(1.0))
    results = {
        "select": lambda: b.add("WHERE", "float32", on, gated, zero),
        "select the other way": lambda: b.add("WHERE", "float32", off, zero, gated),
        "select if positive": lambda: b.add("WHERE", "float32", below, gated, column),
        "multiply": lambda: gated,
        "select minus zero": lambda: b.add("WHERE", "float32", on, gated, minus),
        "select one": lambda: b.add("WHERE", "float32", on, gated, one),
        "select the wrong way": lambda: b.add("WHERE", "float32", off, gated, zero),
        "add": lambda: b.add("ADD", "float32", b.add("WHERE", "float32", on, gated, zero), product),
        "divide": lambda: b.add("FDIV", "float32", column, x),
    }
    graph = b.graph({"y": b.store("float32", results[how]())})
    check_graph(graph)
    return graph


@pytest.mark.parametrize("how", ["select", "select the other way", "select if positive"])
def test_selecting_is_proof(how: str) -> None:
    graph = check_graph(make_expert(how))
    assert find_gate(graph) == 1 and not is_gate(graph, 0)
    check_gate(graph, 1)
    check_gate(graph, None)
    weights = {"w": np.array([math.inf, 2.0], np.float32).tobytes()}
    program = TaskProgram.from_graph(graph, lambda name: memoryview(weights[name]))
    for rows in (1, 3):
        specs = graph.inputs, program.outputs
        inputs, outputs = compute_zero_step(*specs, 1, 4 * rows)
        assert [len(data) for data in (*inputs, *outputs)] == [8 * rows, 4 * rows, 8 * rows]
        nan = np.full((rows, 2), math.nan, np.float32).tobytes()
        for x in (nan, inputs[0]):  # zeros are as good as any
            assert program.run(program.new_state(), [x, inputs[1]]) == outputs


@pytest.mark.parametrize(
    "how",
    ["multiply", "select minus zero", "select one", "select the wrong way", "add", "divide"],
)
def test_anything_else_is_not(how: str) -> None:
    graph = check_graph(make_expert(how))
    assert find_gate(graph) is None
    for port in (0, 1, 2, -1):
        with pytest.raises(InvalidModel, match="gate"):
            check_gate(graph, port)


def test_a_task_with_state_has_no_gate() -> None:
    b = Builder()
    gate, old = b.input("gate", "int32", 2), b.state("s", "int32", 2)
    update = b.store("int32", b.add("ADD", "int32", old, gate))
    product = b.store("int32", b.add("MUL", "int32", update, gate))
    assert find_gate(check_graph(b.graph({"y": product}, [update]))) is None


def test_a_gate_says_how_many_rows_there_are() -> None:
    b = Builder()
    gate, x = b.rows("gate", "int32", "T", 4), b.rows("x", "int32", "R", 4)
    first = b.add("SHRINK", "int32", gate, arg=((0, 1),))
    total = b.store("int32", b.add("MUL", "int32", first, x))
    assert find_gate(check_graph(b.graph({"y": total}))) is None
    b = Builder()
    gate, x = b.input("gate", "int32", 1), b.input("x", "int32", 4)
    graph = check_graph(b.graph({"y": b.store("int32", b.add("MUL", "int32", gate, x))}))
    assert find_gate(graph) == 0  # integers have no infinities
    specs = graph.inputs, [TensorSpec("y", "int32", (4,))]
    assert compute_zero_step(*specs, 0, 4) == ([bytes(4), bytes(16)], [bytes(16)])


def test_zeros_by_their_digest() -> None:
    assert is_zero(hashlib.sha256(bytes(8)).digest(), 8)
    assert not is_zero(hashlib.sha256(bytes(8)).digest(), 4)
    assert not is_zero(hashlib.sha256(b"\0\0\0\1").digest(), 4)
    assert not is_zero(b"", 2**62)  # never hashed
    assert holds_zeros(bytes(9)) and not holds_zeros(memoryview(b"\0\0\1"))
    specs = [TensorSpec("g", "float32", (1,))], [TensorSpec("y", "int32", (2,))]
    assert shut(*specs, 0, [bytes(4)]) == ([bytes(4)], [bytes(8)])
    minus = struct.pack("<f", -0.0)
    assert shut(*specs, 0, [minus]) is None  # its bytes are none
    assert shut(*specs, None, [bytes(4)]) is None
