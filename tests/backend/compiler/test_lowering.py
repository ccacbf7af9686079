"""Every operation means what its name says: computed by tinygrad, compared with numpy."""

from __future__ import annotations

import math

import numpy as np

from splitup.backend.compiler.lowering import LOWERINGS
from splitup.backend.runtime import TaskProgram
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.graph.ir import encode_float
from splitup.graph.operations.table import ARITHMETIC, MOVEMENT, OPERATIONS
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder

A = np.array([[1.5, -2.25, 3.0], [-0.5, 0.75, 8.0]], np.float32)
B = np.array([[2.0, 0.5, -1.0], [4.0, 0.75, 3.0]], np.float32)
K = np.array([[7, -7, 13], [-13, 0, 255]], np.int32)
J = np.array([[3, 5, -6], [9, 12, 77]], np.int32)


def run(
    builder: Builder, outputs: dict[str, int], inputs: list[np.ndarray]
) -> dict[str, np.ndarray]:
    graph = builder.graph(outputs)
    check_graph(graph)
    program = TaskProgram(graph.to_bytes(), builder.safetensors() if builder.weights else None)
    data = [array_to_bytes(s, x) for s, x in zip(program.inputs, inputs, strict=True)]
    results = program.run(program.new_state(), data)
    return {s.name: bytes_to_array(s, r) for s, r in zip(program.outputs, results, strict=True)}


def test_every_operation_of_the_format_is_lowered() -> None:
    assert set(LOWERINGS) == set(OPERATIONS)


def test_arithmetic() -> None:
    b = Builder()
    a, c = b.input("a", "float32", 2, 3), b.input("b", "float32", 2, 3)
    i, j = b.input("i", "int32", 2, 3), b.input("j", "int32", 2, 3)
    positive = b.add("MUL", "float32", a, a)
    seven, two = b.const("int32", "7"), b.const("int32", "2")
    less = b.add("CMPLT", "bool", a, c)
    operations = {
        "EXP2": ("float32", (a,), np.exp2(A)),
        "LOG2": ("float32", (positive,), np.log2(A * A)),
        "SIN": ("float32", (a,), np.sin(A)),
        "SQRT": ("float32", (positive,), np.abs(A)),
        "RECIPROCAL": ("float32", (a,), 1 / A),
        "TRUNC": ("float32", (a,), np.trunc(A)),
        "NEG": ("int32", (i,), -K),
        "ADD": ("float32", (a, c), A + B),
        "MUL": ("float32", (a, c), A * B),
        "SUB": ("int32", (i, j), K - J),
        "FDIV": ("float32", (a, c), A / B),
        "POW": ("float32", (positive, c), np.power(A * A, B)),
        "MAX": ("int32", (i, j), np.maximum(K, J)),
        "CMPLT": ("bool", (a, c), A < B),
        "CMPEQ": ("bool", (a, c), A == B),
        "CMPNE": ("bool", (a, c), A != B),
        "AND": ("int32", (i, j), K & J),
        "OR": ("int32", (i, j), K | J),
        "XOR": ("int32", (i, j), K ^ J),
        "SHL": ("int32", (j, two), J << 2),
        "SHR": ("int32", (i, two), K >> 2),
        "CDIV": ("int32", (i, seven), np.trunc(K / 7).astype(np.int32)),
        "CMOD": ("int32", (i, seven), np.fmod(K, 7)),
        "FLOORDIV": ("int32", (i, seven), K // 7),
        "FLOORMOD": ("int32", (i, seven), K % 7),
        "WHERE": ("float32", (less, a, c), np.where(A < B, A, B)),
    }
    assert set(operations) == set(ARITHMETIC)
    outputs = {
        name: b.store(dtype, b.add(name, dtype, *srcs))
        for name, (dtype, srcs, _) in operations.items()
    }
    results = run(b, outputs, [A, B, K, J])
    for name, (_, _, wanted) in operations.items():
        np.testing.assert_allclose(results[name], wanted, rtol=2e-6, atol=1e-6, err_msg=name)


def test_movement_and_reduction() -> None:
    b = Builder()
    a = b.input("a", "float32", 2, 3)
    operations = {
        "RESHAPE": ((3, 2), A.reshape(3, 2)),
        "EXPAND": ((4, 1), np.broadcast_to(A, (4, 1, 2, 3))),
        "PERMUTE": ((1, 0), A.T),
        "PAD": (((1, 4), (2, 6)), np.pad(A, ((1, 1), (2, 1)))),
        "SHRINK": (((1, 1), (1, 2)), A[1:2, 1:3]),
        "FLIP": ((0, 1), A[:, ::-1]),
    }
    assert set(operations) == MOVEMENT
    outputs = {
        name: b.store("float32", b.add(name, "float32", a, arg=arg))
        for name, (arg, _) in operations.items()
    }
    sums = {"ADD": A.sum(0), "MAX": A.max(0), "MUL": A.prod(0)}
    for name in sums:
        node = b.add("REDUCE", "float32", a, arg=(name, 1))
        outputs[name] = b.store("float32", node)
    outputs["STACK"] = b.store("float32", b.add("STACK", "float32", a, a, a))
    wide = b.add("ADD", "float32", a, b.add("SHRINK", "float32", a, arg=((0, 1), (0, 3))))
    outputs["broadcast"] = b.store("float32", wide)
    results = run(b, outputs, [A])
    for name, (_, wanted) in operations.items():
        np.testing.assert_array_equal(results[name], wanted, err_msg=name)
    for name, wanted in sums.items():
        np.testing.assert_allclose(results[name], wanted, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(results["STACK"], np.stack([A, A, A]))
    np.testing.assert_array_equal(results["broadcast"], A + A[:1])


def test_sources_and_conversions() -> None:
    weight = np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3)
    b = Builder()
    a = b.input("a", "float32", 2, 3)
    w = b.weight("w", weight)
    iota = b.add("IOTA", "int32", arg=5)
    half = b.add("CAST", "float16", a)
    outputs = {
        "iota": b.store("int32", iota),
        "weight": b.store("float32", b.add("CAST", "float32", w)),
        "half": b.store("float16", half),
        "bits": b.store("uint32", b.add("BITCAST", "uint32", a)),
        "int": b.store("int32", b.add("CAST", "int32", a)),
        "inf": b.store(
            "float32", b.add("ADD", "float32", a, b.const("float32", encode_float(math.inf)))
        ),
        "copy": b.store("float32", a),
        "big": b.store(
            "int64",
            b.add("ADD", "int64", b.add("CAST", "int64", iota), b.const("int64", str(-(2**62)))),
        ),
    }
    results = run(b, outputs, [A])
    np.testing.assert_array_equal(results["iota"], np.arange(5))
    np.testing.assert_array_equal(results["weight"], weight.astype(np.float32))
    np.testing.assert_array_equal(results["half"], A.astype(np.float16))
    np.testing.assert_array_equal(results["bits"], A.view(np.uint32))
    np.testing.assert_array_equal(results["int"], A.astype(np.int32))
    np.testing.assert_array_equal(results["inf"], np.full_like(A, np.inf))
    np.testing.assert_array_equal(results["copy"], A)
    np.testing.assert_array_equal(results["big"], np.arange(5) - 2**62)


def test_a03_a_lookup_outside_its_table_gives_zero() -> None:
    """The one-hot sum, which tinygrad turns into a load, is guarded for every index."""
    table = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
    b = Builder()
    index = b.add("RESHAPE", "int32", b.input("i", "int32", 5), arg=(5, 1, 1))
    rows = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=4), arg=(1, 4, 1))
    hit = b.add("CMPEQ", "bool", rows, index)
    w = b.add("RESHAPE", "float32", b.weight("t", table), arg=(1, 4, 3))
    picked = b.add("WHERE", "float32", hit, w, b.const("float32", encode_float(0.0)))
    front = b.add("PERMUTE", "float32", picked, arg=(1, 0, 2))
    y = b.store("float32", b.add("REDUCE", "float32", front, arg=("ADD", 1)))
    wild = np.array([2, -1, 4, 2**31 - 1, -(2**31)], np.int32)
    result = run(b, {"y": y}, [wild])["y"]
    np.testing.assert_array_equal(result, [[7, 8, 9]] + [[0, 0, 0]] * 4)


def test_axes_of_one_element_are_folded() -> None:
    """Found with a task of one expert: tinygrad cannot fold a lookup among one."""
    b = Builder()
    index = b.add("RESHAPE", "int32", b.input("i", "int32", 2), arg=(1, 2, 1))
    place = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=1), arg=(1, 1, 1))
    hit = b.add("CMPEQ", "bool", place, index)
    table = b.weight("t", np.arange(3, dtype=np.float32).reshape(1, 1, 3))
    zero = b.const("float32", encode_float(0.0))
    found = b.add("REDUCE", "float32", b.add("WHERE", "float32", hit, table, zero), arg=("ADD", 1))
    scaled = b.add("MUL", "float32", found, b.input("x", "float32", 2, 3))
    folded = b.add("PERMUTE", "float32", scaled, arg=(1, 0))
    y = b.store("float32", b.add("REDUCE", "float32", folded, arg=("ADD", 1)))
    program = TaskProgram(b.graph({"y": y}).to_bytes(), b.safetensors())
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    (data,) = program.run(program.new_state(), [np.array([0, 1], np.int32).tobytes(), x.tobytes()])
    assert np.frombuffer(data, np.float32).tolist() == [0 + 2 + 6, 0]
