"""Symbols: proved by the rules, bound by every step, and without influence on a row's bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.cost import compute_vram_bytes
from splitup.graph.ir import Arg, Graph, Symbol, parse_graph
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder

MOST = 9


def one(op: str, *srcs: str, arg: Arg = None) -> Graph:
    """Return a graph of one operation on [T, 4, 6], and on others by name."""
    b = Builder()
    nodes = {
        "x": b.rows("x", "float32", "T", MOST, 4, 6),
        "r": b.rows("r", "float32", "R", MOST, 4, 6),
        "i": b.rows("i", "int32", "R", MOST),
        "f": b.input("f", "float32", 12, 4, 6),
        "v": b.input("v", "float32", 6),
    }
    node = b.add(op, "float32", *(nodes[src] for src in srcs or ("x",)), arg=arg)
    return b.graph({"y": b.store("float32", node)})


def infer(graph: Graph) -> tuple[object, ...]:
    return check_graph(graph).values[-1].dims


@pytest.mark.parametrize(
    ("graph", "dims"),
    [
        (one("RESHAPE", arg=("T", 24)), ("T", 24)),
        (one("RESHAPE", arg=(1, "T", 1, 2, 12)), None),  # a symbol in memory is in front
        (one("RESHAPE", arg=("T", 1, 2, 12)), ("T", 1, 2, 12)),
        (one("EXPAND", "v", arg=("T",)), ("T", 6)),
        (one("ADD", "x", "v"), ("T", 4, 6)),
        (one("REDUCE", arg=("ADD", 1)), (4, 6)),
        (one("REDUCE", arg=("MAX", 2)), (6,)),
        (one("SHRINK", arg=((0, "T"), (1, 2), (0, 6))), ("T", 2, 6)),
        (one("SHRINK", arg=((0, 1), (0, 4), (0, 6))), (1, 4, 6)),
        (one("SHRINK", "f", arg=((0, "T"), (0, 4), (0, 6))), ("T", 4, 6)),
        (one("PAD", arg=((0, "T"), (1, 9), (0, 6))), ("T", 9, 6)),
        (one("LOOKUP", "x", "i"), ("R", 4, 6)),
        (one("LOOKUP", "f", "i"), ("R", 4, 6)),
        (one("FLIP", arg=(0, 1, 1)), ("T", 4, 6)),
    ],
)
def test_shapes_are_proved_with_symbols(graph: Graph, dims: tuple[object, ...] | None) -> None:
    if dims is None:
        with pytest.raises(InvalidModel, match="only the first axis may be a symbol"):
            check_graph(graph)
        return
    assert infer(graph) == dims
    again = parse_graph(graph.to_bytes())
    assert again == graph and again.to_bytes() == graph.to_bytes()


@pytest.mark.parametrize(
    ("graph", "rule"),
    [
        (one("RESHAPE", arg=("R", 24)), "shape"),
        (one("RESHAPE", arg=(24, "T")), "shape"),
        (one("RESHAPE", arg=(9, 24)), "shape"),
        (one("RESHAPE", arg=("T", "T", 24)), "shape"),
        (one("RESHAPE", arg=("U", 24)), "size"),
        (one("EXPAND", arg=("t",)), "size"),
        (one("PERMUTE", arg=("T", 0, 1)), "argument"),
        (one("FLIP", arg=(1, 0, 0)), "shape"),
        (one("ADD", "x", "r"), "shape"),
        (one("ADD", "x", "f"), "shape"),
        (one("STACK", "x", "r"), "shape"),
        (one("SHRINK", arg=((0, 2), (0, 4), (0, 6))), "shape"),
        (one("SHRINK", arg=((1, 1), (0, 4), (0, 6))), "shape"),
        (one("SHRINK", arg=((0, "R"), (0, 4), (0, 6))), "shape"),
        (one("SHRINK", arg=((0, "T"), (0, "T"), (0, 6))), "shape"),
        (one("SHRINK", "f", arg=((1, "T"), (0, 4), (0, 6))), "shape"),
        (one("PAD", arg=((0, 12), (0, 4), (0, 6))), "shape"),
        (one("PAD", "v", arg=((0, "T"),)), "shape"),
        (one("LOOKUP", "x", "r"), "dtype"),
        (one("LOOKUP", "x"), "arity"),
        (one("LOOKUP", "x", "i", arg=1), "argument"),
    ],
)
def test_a05_every_rule_holds_for_symbols(graph: Graph, rule: str) -> None:
    with pytest.raises(InvalidModel, match=f"'{rule}'"):
        check_graph(graph)


LEGAL = one("NEG")
WIDE = TensorSpec("x", "float32", (MOST + 1, 4, 6), "T")


@pytest.mark.parametrize(
    "graph",
    [
        replace(LEGAL, symbols=()),
        replace(LEGAL, symbols=(*LEGAL.symbols, Symbol("U", 3))),  # no input binds it
        replace(LEGAL, symbols=(*LEGAL.symbols, Symbol("T", 3))),
        replace(LEGAL, symbols=(Symbol("T", 0), LEGAL.symbols[1])),
        replace(one("NEG", "v"), symbols=(Symbol("T", 1), LEGAL.symbols[1])),
        replace(LEGAL, symbols=(Symbol("T", 2**31), LEGAL.symbols[1])),
        replace(LEGAL, symbols=(Symbol("T", 8), LEGAL.symbols[1])),
        replace(LEGAL, symbols=tuple(Symbol("ABCDE"[i] * 2, 2) for i in range(5))),
        replace(LEGAL, inputs=(WIDE, *LEGAL.inputs[1:])),
        replace(LEGAL, inputs=(replace(WIDE, rows="t"), *LEGAL.inputs[1:])),
    ],
)
def test_a05_symbols_are_bound_and_bounded(graph: Graph) -> None:
    with pytest.raises(InvalidModel, match="'ports'"):
        check_graph(graph)


def test_a05_a_state_and_a_weight_have_no_symbol() -> None:
    b = Builder()
    b.rows("x", "float32", "T", MOST)
    b.states.append(TensorSpec("s", "float32", (MOST,), "T"))
    stored = b.store("float32", b.add("STATE", "float32", arg=0))
    with pytest.raises(InvalidModel, match="a state has a symbol"):
        check_graph(b.graph({"y": stored}, [stored]))
    b.states = [TensorSpec("s", "float32", (MOST,))]
    stored = b.store("float32", 0)
    with pytest.raises(InvalidModel, match="another dtype or shape"):
        check_graph(b.graph({"y": stored}, [stored]))


def compile_picker() -> tuple[TaskProgram, np.ndarray]:
    """y = (x * w summed over its last axis)[i], and the same of the first row: [R, 8], [1, 8]."""
    b = Builder()
    w = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    x = b.rows("x", "float32", "T", MOST, 6)
    index = b.rows("i", "int32", "R", MOST)
    weight = b.add("RESHAPE", "float32", b.weight("w", w), arg=(1, 8, 6))
    wide = b.add("RESHAPE", "float32", x, arg=("T", 1, 6))
    product = b.add("MUL", "float32", wide, weight)
    turned = b.add("PERMUTE", "float32", product, arg=(2, 0, 1))
    total = b.store("float32", b.add("REDUCE", "float32", turned, arg=("ADD", 1)))
    picked = b.store("float32", b.add("LOOKUP", "float32", total, index))
    first = b.store("float32", b.add("SHRINK", "float32", total, arg=((0, 1), (0, 8))))
    graph = b.graph({"y": picked, "first": first})
    program = TaskProgram(graph.to_bytes(), b.safetensors())
    assert program.allocated_bytes <= compute_vram_bytes(check_graph(graph))
    return program, w


def test_a_step_binds_its_rows_and_the_bytes_of_a_row_do_not_change() -> None:
    program, w = compile_picker()
    x = np.random.default_rng(2).normal(size=(MOST, 6)).astype(np.float32)
    rows = []
    for row in range(MOST):
        data, first = program.run(program.new_state(), [x[row].tobytes(), bytes(4)])
        assert data == first
        rows.append(data)
    np.testing.assert_allclose(
        np.frombuffer(b"".join(rows), np.float32).reshape(-1, 8), x @ w.T, rtol=1e-4
    )
    for count in (MOST, 2, 1, 5):
        for index in ([0], [count - 1, 0], [0, count, -1, MOST, 2**31 - 1, -(2**31)]):
            given, first = program.run(
                program.new_state(), [x[:count].tobytes(), np.array(index, np.int32).tobytes()]
            )
            wanted = [rows[i] if 0 <= i < count else bytes(32) for i in index]
            assert given == b"".join(wanted) and first == rows[0]


def test_rows_that_disagree_or_do_not_fit_are_refused() -> None:
    b = Builder()
    x, y = b.rows("x", "float32", "T", 4, 3), b.rows("y", "float32", "T", 4)
    total = b.add("ADD", "float32", x, b.add("RESHAPE", "float32", y, arg=("T", 1)))
    program = TaskProgram(b.graph({"z": b.store("float32", total)}).to_bytes(), None)
    state = program.new_state()
    (given,) = program.run(state, [bytes(24), bytes(8)])
    assert len(given) == 24
    with pytest.raises(InvalidInput, match="'y' has 1 rows; another one of this step has 2"):
        program.run(state, [bytes(24), bytes(4)])
    for sizes in ((0, 0), (60, 20), (13, 4), (24, 9)):
        with pytest.raises(InvalidInput, match="bytes"):
            program.run(state, [bytes(size) for size in sizes])


def test_a_spec_with_rows() -> None:
    spec = TensorSpec("x", "float16", (4, 3), "T")
    assert (spec.nbytes, spec.row_bytes, str(spec)) == (24, 6, "float16[T <= 4, 3]")
    assert [length for length in range(40) if spec.accepts(length)] == [6, 12, 18, 24]
    assert spec.get_shape(12) == (2, 3)
    fixed = TensorSpec("x", "float16", (4, 3))
    assert [length for length in range(40) if fixed.accepts(length)] == [24]
