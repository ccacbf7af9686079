from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinygrad.uop import Ops

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.dtypes import round_float
from splitup.graph.ir import Arg, Graph, GraphOutput, Node, Update, encode_float
from splitup.graph.operations.table import OPERATIONS
from splitup.graph.rules import check_graph, check_task, load_graph
from tests.builders import HANG_S
from tests.graph.graphs import Builder, make_legal


def one(op: str, dtype: str, *shapes: tuple[int, ...], of: str = "", arg: Arg = None) -> Graph:
    """A graph of one operation on inputs of these shapes, all of dtype ``of``."""
    b = Builder()
    operands = [b.input(f"x{i}", of or dtype, *shape) for i, shape in enumerate(shapes)]
    return b.graph({"y": b.store(dtype, b.add(op, dtype, *operands, arg=arg))})


def test_the_legal_graph_is_legal() -> None:
    values = check_graph(make_legal()).values
    assert (values[-1].dtype, values[-1].shape) == ("float32", (4,))


DENIED = sorted({op.name for op in Ops} - set(OPERATIONS))


@pytest.mark.parametrize("op", [*DENIED, "EVAL", "", "input", "CONST\n"])
def test_a02_denied_operations(op: str) -> None:
    for srcs in ((), (0,)):
        graph = replace(make_legal(), nodes=(*make_legal().nodes, Node(op, "float32", srcs)))
        with pytest.raises(InvalidModel, match=r"node 6 .* 'op'"):
            load_graph(graph.to_bytes())


def test_a02_the_list_of_denied_operations_holds_those_that_carry_code() -> None:
    dangerous = "CUSTOM CUSTOMI CUSTOM_FUNCTION PROGRAM LINEAR SOURCE BINARY INS CALL PYLITERAL"
    assert set(dangerous.split()) <= set(DENIED)
    assert {"STORE", "LOAD", "INDEX", "AFTER", "COPY", "BUFFER", "PARAM"} <= set(DENIED)


LISTS = st.lists(st.integers(-3, 9), max_size=4).map(tuple)
PAIRS = st.lists(st.tuples(st.integers(-3, 9), st.integers(-3, 9)), max_size=4).map(tuple)


@given(
    op=st.sampled_from(["RESHAPE", "EXPAND", "PERMUTE", "PAD", "SHRINK", "FLIP", "REDUCE"]),
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple),
    arg=st.one_of(
        LISTS, PAIRS, st.none(), st.integers(-1, 3), st.tuples(st.just("ADD"), st.integers(-1, 4))
    ),
)
def test_a03_movement_stays_inside_its_operand(op: str, shape: tuple[int, ...], arg: Arg) -> None:
    """What the rules accept, numpy can do on exactly the same elements."""
    try:
        values = check_graph(one(op, "float32", shape, arg=arg)).values
    except InvalidModel:
        return
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    assert isinstance(arg, tuple)
    if op == "SHRINK":
        y = x
        for axis, (offset, size) in enumerate(arg):  # type: ignore[misc]
            assert 0 <= offset and offset + size <= shape[axis]
            y = np.take(y, range(offset, offset + size), axis)
    elif op == "PAD":
        y = (
            x
            if not arg
            else np.pad(x, [(o, n - o - s) for (o, n), s in zip(arg, shape, strict=True)])
        )  # type: ignore[misc]
    elif op == "PERMUTE":
        y = x.transpose(arg)  # type: ignore[arg-type]
    elif op == "RESHAPE":
        y = x.reshape(arg)  # type: ignore[arg-type]
    elif op == "EXPAND":
        y = np.broadcast_to(x, (*arg, *shape))  # type: ignore[arg-type]
    elif op == "FLIP":
        y = np.flip(x, [axis for axis, flip in enumerate(arg) if flip])
    else:
        y = x.sum(tuple(range(arg[1])))  # type: ignore[arg-type]
    assert values[1].shape == y.shape


def test_a04_cycles_and_missing_edges() -> None:
    legal = make_legal()
    for srcs in ((6,), (7,), (-1,), (10**9,)):
        nodes = (*legal.nodes, Node("NEG", "float32", srcs))
        with pytest.raises(InvalidModel, match="'arity'"):
            load_graph(replace(legal, nodes=nodes).to_bytes())
    for bad in (
        GraphOutput("y", 6),
        GraphOutput("y", -1),
        GraphOutput("y", 0),
        GraphOutput("y y", 5),
    ):
        with pytest.raises(InvalidModel, match="'ports'"):
            load_graph(replace(legal, outputs=(bad,)).to_bytes())
    for updates in ((), (Update(0, 5), Update(0, 5)), (Update(1, 5),), (Update(0, 3),)):
        with pytest.raises(InvalidModel, match="'ports'"):
            check_graph(replace(legal, updates=updates))
    with pytest.raises(InvalidModel, match="outputs"):
        check_graph(replace(legal, outputs=()))


@contextmanager
def quickly() -> Iterator[None]:
    """Expect InvalidModel in good time."""
    start = time.process_time()
    with pytest.raises(InvalidModel):
        yield
    assert time.process_time() - start < HANG_S


def test_a04_a_million_nodes_and_a_chain_of_1e5_are_refused_quickly() -> None:
    head = b'{"format":"splitup.graph","inputs":[],"nodes":['
    node = b'["CONST","bool",[],"1"]'
    tail = b'],"outputs":[],"states":[],"updates":[],"version":1,"weights":[]}'
    for count in (1_000_000, limits.MAX_GRAPH_NODES + 1):
        data = head + b",".join([node] * count) + tail
        with quickly():
            load_graph(data)
    chain = [Node("INPUT", "float32", (), 0)]
    for index in range(limits.MAX_GRAPH_DEPTH + 5):
        chain.append(Node("CONTIGUOUS" if index % 100 else "NEG", "float32", (index,)))
    graph = Graph(
        (TensorSpec("x", "float32", (1,)),), (), (), tuple(chain), (GraphOutput("y", 1),), ()
    )
    with pytest.raises(InvalidModel, match="'depth'"):
        check_graph(graph)
    data = graph.to_bytes()
    with quickly():
        load_graph(data)
    longer = replace(graph, nodes=tuple(chain * 4))
    with quickly():
        check_graph(longer)


def make_blocks(count: int) -> Graph:
    """Return a graph of 4 · count + 1 nodes, with one kernel a block."""
    b = Builder()
    x = b.input("x", "float32", 4)
    for _ in range(count):
        x = b.store("float32", b.add("ADD", "float32", b.add("EXP2", "float32", x), x))
    return b.graph({"y": x})


def test_a_model_may_have_more_nodes_and_kernels_than_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bounds of a task hold for what is cut out of a model, and for what comes from others."""
    graph = make_blocks(40)
    pairs = sum(kernel.pairs for kernel in check_graph(graph).kernels)
    monkeypatch.setattr(limits, "MAX_GRAPH_NODES", len(graph.nodes) // 2)
    monkeypatch.setattr(limits, "MAX_GRAPH_PAIRS", pairs // 2 + 1)
    check_graph(graph)
    with pytest.raises(InvalidModel, match="a task of more than"):
        check_task(graph)
    with pytest.raises(InvalidModel, match="more than"):
        load_graph(graph.to_bytes())
    load_graph(make_blocks(19).to_bytes())
    monkeypatch.setattr(limits, "MAX_GRAPH_PAIRS", pairs // 8)
    with pytest.raises(InvalidModel, match="'compiling'"):
        load_graph(make_blocks(19).to_bytes())
    monkeypatch.setattr(limits, "MAX_MODEL_NODES", len(graph.nodes) - 1)
    with pytest.raises(InvalidModel, match="more than"):
        check_graph(graph)


def test_a04_a_chain_too_long_for_one_kernel_is_refused() -> None:
    def chain(length: int, stored: int) -> Graph:
        b = Builder()
        x = b.input("x", "float32", 4)
        for index in range(length):
            x = b.add("EXP2", "float32", x)
            x = b.add("RESHAPE", "float32", x, arg=(2, 2) if index % 2 else (4,))
            if index == stored:
                x = b.store("float32", x)
        return b.graph({"y": b.store("float32", x)})

    check_graph(chain(12, -1))
    check_graph(chain(24, 11))
    with pytest.raises(InvalidModel, match="'compiling'"):
        check_graph(chain(24, -1))


SHAPES = st.lists(st.integers(-(2**40), 2**40), max_size=1000).map(tuple)


@given(op=st.sampled_from(["RESHAPE", "EXPAND"]), shape=SHAPES)
def test_a05_shape_bombs_are_refused_before_allocating(op: str, shape: tuple[int, ...]) -> None:
    try:
        values = check_graph(one(op, "float32", (1,), arg=shape)).values
    except InvalidModel:
        return
    assert math.prod(values[1].shape) <= limits.MAX_VALUE_BYTES // 4
    assert len(values[1].shape) <= limits.MAX_RANK


@pytest.mark.parametrize(
    "graph",
    [
        one("EXPAND", "float32", (2,), arg=(1,) * 1000),
        one("EXPAND", "float32", (2,), arg=(2**31 - 1, 2**31 - 1)),
        one("EXPAND", "float32", (2,), arg=(2**35,)),
        one("EXPAND", "float32", (2,), arg=(0,)),
        one("PAD", "float64", (2, 2), arg=((0, 2**31 - 1), (0, 8))),
        one("IOTA", "int32", arg=2**31),
        one("IOTA", "int32", arg=True),
        replace(make_legal(), inputs=(TensorSpec("x", "float32", (2**31 - 1,) * 4),)),
        replace(make_legal(), states=(TensorSpec("s", "float32", (-4,)),)),
        replace(make_legal(), inputs=(TensorSpec("x", "float32", (4,) * 17),)),
    ],
)
def test_a05_overflow_and_rank(graph: Graph) -> None:
    start = time.perf_counter()
    with pytest.raises(InvalidModel):
        check_graph(graph)
    assert time.perf_counter() - start < HANG_S


def test_a05_cost_is_bounded() -> None:
    b = Builder()
    x = b.add("EXPAND", "float32", b.input("x", "float32", 1), arg=(2**30,))
    for _ in range(2**20 // 2**10):
        b.add("MUL", "float32", x, x)
    check_graph(b.graph({"y": b.store("float32", x)}))
    for _ in range(8000):
        big = b.add("EXPAND", "float32", 0, arg=(2**20, 2**20))
        b.add("MUL", "float32", big, big)
    graph = b.graph({"y": b.store("float32", x)})
    check_graph(graph)  # a whole model may take more than one task
    for load in (check_task, lambda graph: load_graph(graph.to_bytes())):
        with pytest.raises(InvalidModel, match="'cost'"):
            load(graph)


@pytest.mark.parametrize(
    ("graph", "rule"),
    [
        (one("SIN", "int32", (2,)), "dtype"),
        (one("ADD", "float32", (2,), (2,), of="int32"), "dtype"),
        (one("ADD", "float32", (2,), (3,)), "shape"),
        (one("CMPLT", "float32", (2,), (2,)), "dtype"),
        (one("WHERE", "float32", (2,), (2,), (2,)), "dtype"),
        (one("XOR", "float32", (2,), (2,)), "dtype"),
        (one("FDIV", "int32", (2,), (2,)), "dtype"),
        (one("BITCAST", "float16", (2,), of="float32"), "dtype"),
        (one("BITCAST", "bool", (2,), of="uint8"), "dtype"),
        (one("CAST", "float8", (2,), of="float32"), "dtype"),
        (one("ADD", "float32", (2,)), "arity"),
        (one("NEG", "float32", (2,), arg=1), "argument"),
        (one("REDUCE", "float32", (2,), arg=("SUB", 1)), "argument"),
        (one("REDUCE", "bool", (2,), arg=("ADD", 1)), "dtype"),
        (one("STACK", "float32", (2,), (3,)), "shape"),
        (one("STACK", "float32"), "arity"),
        (one("PERMUTE", "float32", (2, 3), arg=(0, 0)), "shape"),
        (one("FLIP", "float32", (2,), arg=(2,)), "argument"),
        (one("SHRINK", "float32", (4,), arg=((2, 3),)), "shape"),
        (one("CONST", "int8", arg="128"), "const"),
        (one("CONST", "int8", arg="-0"), "const"),
        (one("CONST", "uint8", arg="-1"), "const"),
        (one("CONST", "uint8", arg=7), "argument"),
        (one("CONST", "bool", arg="2"), "const"),
        (one("CONST", "float16", arg=encode_float(1e5)), "const"),
        (one("CONST", "float32", arg=encode_float(0.1)), "const"),
        (one("CONST", "float64", arg="7FF0000000000000"), "const"),
        (one("CONST", "float64", arg="7ff8000000000001"), "const"),
        (one("CDIV", "int32", (2,), (2,)), "division"),
    ],
)
def test_every_rule_names_itself(graph: Graph, rule: str) -> None:
    with pytest.raises(InvalidModel, match=f"'{rule}'"):
        check_graph(graph)


@pytest.mark.parametrize("op", ["CDIV", "CMOD", "FLOORDIV", "FLOORMOD", "SHL", "SHR"])
def test_integer_division_and_shifts_cannot_trap(op: str) -> None:
    def divide(by: str) -> Graph:
        b = Builder()
        x = b.input("x", "int32", 3)
        return b.graph({"y": b.store("int32", b.add(op, "int32", x, b.const("int32", by)))})

    check_graph(divide("7"))
    for by in ("-1", "32" if op in ("SHL", "SHR") else "0"):
        with pytest.raises(InvalidModel, match="'division'"):
            check_graph(divide(by))


def test_a_legal_node_does_not_excuse_one_that_looks_like_it() -> None:
    """Operations of one name on operands of one shape differ by argument, constant and source."""
    b = Builder()
    x, y = b.input("x", "int32"), b.input("y", "int32")
    seven, zero = b.const("int32", "7"), b.const("int32", "0")
    legal = b.add("FLOORDIV", "int32", x, seven)
    legal = b.add("FLOORDIV", "int32", legal, seven)
    wide = b.add("EXPAND", "int32", legal, arg=(2,))
    legal = b.add("REDUCE", "int32", wide, arg=("ADD", 1))
    check_graph(b.graph({"z": b.store("int32", legal)}))
    for op, srcs, arg, rule in (
        ("FLOORDIV", (x, zero), None, "division"),
        ("FLOORDIV", (x, y), None, "division"),
        ("FLOORDIV", (x, -1), None, "arity"),
        ("FLOORDIV", (x, seven), 1, "argument"),
        ("REDUCE", (wide,), ("ADD", True), "argument"),
        ("EXPAND", (x,), ("2",), "size"),
    ):
        graph = b.graph({"z": b.store("int32", legal)})
        bad = replace(graph, nodes=(*graph.nodes, Node(op, "int32", srcs, arg)))
        with pytest.raises(InvalidModel, match=rf"node {len(graph.nodes)} .*'{rule}'"):
            check_graph(bad)


@given(st.floats(width=64), st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
def test_rounding_is_idempotent_and_near(value: float, dtype: str) -> None:
    rounded = round_float(value, dtype)
    assert encode_float(round_float(rounded, dtype)) == encode_float(rounded)
    if dtype == "bfloat16" and math.isfinite(rounded) and 1e-30 < abs(value) < 1e30:
        assert abs(rounded - value) <= abs(value) * 2.0**-8
        bits = np.float32(rounded).view(np.uint32)
        assert bits & 0xFFFF == 0
