"""The reference against numpy, against Python's exact arithmetic, and against the runtime."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.backend.runtime import TaskProgram
from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.arrays import decode_array, encode_array, round_array
from splitup.graph.dtypes import FLOATS, INTEGERS, round_float
from splitup.graph.error_bound import compute_bounds, compute_node, is_within
from splitup.graph.ir import Node, encode_float
from splitup.graph.operations.table import ARITHMETIC, OPERATIONS, PARAMS
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder, compute_graph, list_operands, list_region, make_counter

FLOAT32 = st.floats(width=32)


def run(op: str, dtype: str, *arrays: np.ndarray, arg: object = None) -> np.ndarray:
    return compute_node(Node(op, dtype, tuple(range(len(arrays))), arg), arrays)  # type: ignore


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_bytes_come_and_go_unchanged(dtype: str) -> None:
    spec = TensorSpec("x", dtype, (2, 3))
    data = bytes([1, 0] * 3) if dtype == "bool" else bytes(range(spec.nbytes))
    assert encode_array(dtype, decode_array(spec, data)) == data
    with pytest.raises(InvalidInput):
        decode_array(spec, data + b"\0")


@given(st.floats())
def test_rounding_is_that_of_the_rules(value: float) -> None:
    for dtype in sorted(set(FLOATS) - {"bfloat16"}):
        with np.errstate(all="ignore"):
            result = float(round_array(dtype, np.array(value)))
        assert encode_float(result) == encode_float(round_float(value, dtype))


@given(FLOAT32)
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    result = float(round_array("bfloat16", np.array(value, np.float32)))
    wanted = round_float(value, "bfloat16")
    assert result == wanted or (math.isnan(result) and math.isnan(wanted))


@given(st.lists(FLOAT32, min_size=1, max_size=50), st.sampled_from(["ADD", "MUL", "MAX"]))
def test_folds_are_sequential(numbers: list[float], kind: str) -> None:
    array = np.array(numbers, np.float32)
    operation = {"ADD": np.add, "MUL": np.multiply, "MAX": np.maximum}[kind]
    total = array[0]
    with np.errstate(all="ignore"):
        for number in array[1:]:
            total = operation(total, number)
    result = run("REDUCE", "float32", array, arg=(kind, 1))
    assert result.shape == ()
    assert result == total or (np.isnan(result) and np.isnan(total))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_partial_sums_are_rounded_to_the_dtype(dtype: str) -> None:
    ones = np.ones(4096, np.float16 if dtype == "float16" else np.float32)
    stuck = 2048 if dtype == "float16" else 256  # where adding one no longer changes anything
    assert run("REDUCE", dtype, ones, arg=("ADD", 1)) == stuck


def test_small_integers_are_folded_in_their_own_width() -> None:
    assert run("REDUCE", "int8", np.full(3, 100, np.int8), arg=("ADD", 1)) == 300 - 256
    result = run("REDUCE", "uint8", np.full((2, 2), 20, np.uint8), arg=("MUL", 2))
    assert result == 160000 % 256 and result.dtype == np.uint8


@given(st.integers(-128, 127), st.integers(1, 127))
def test_integer_division(a: int, b: int) -> None:
    x, y = np.array(a, np.int8), np.array(b, np.int8)
    quotient = int(Fraction(a, b))  # int() goes towards zero
    assert run("CDIV", "int8", x, y) == quotient
    assert run("CMOD", "int8", x, y) == a - quotient * b
    assert run("FLOORDIV", "int8", x, y) == a // b
    assert run("FLOORMOD", "int8", x, y) == a % b


@given(st.floats(), st.sampled_from(sorted(INTEGERS)))
def test_a_float_becomes_the_nearest_integer_towards_zero(value: float, dtype: str) -> None:
    info = np.iinfo(dtype)
    wanted = 0 if math.isnan(value) else value
    if not math.isinf(value) and not math.isnan(value):
        wanted = math.trunc(value)
    clamped = int(min(max(wanted, info.min), info.max))
    assert int(run("CAST", dtype, np.array(value))) == clamped


@given(FLOAT32)
def test_functions_are_correctly_rounded(value: float) -> None:
    x = np.array(value, np.float32)
    assert run("SIN", "float32", x) == np.float32(math.sin(value)) if math.isfinite(value) else True
    exponent = max(-300.0, min(300.0, value))
    if not math.isnan(value):
        with np.errstate(all="ignore"):
            assert run("EXP2", "float32", x) == np.float32(2.0**exponent)
    if value > 0 and math.isfinite(value):
        assert run("LOG2", "float32", x) == np.float32(math.log2(value))


def test_functions_at_the_edges() -> None:
    x = np.array([math.inf, -math.inf, math.nan, 0.0, -1.0])
    np.testing.assert_array_equal(
        run("EXP2", "float64", x), [math.inf, 0, math.nan, 1, 0.5], strict=True
    )
    np.testing.assert_array_equal(
        run("LOG2", "float64", x), [math.inf, math.nan, math.nan, -math.inf, math.nan]
    )
    assert np.isnan(run("SIN", "float64", x)[:3]).all()
    for angle in (1e22, 2.0**1000, -3e38, 5e6):  # reduced exactly
        assert abs(float(run("SIN", "float64", np.array(angle))) - math.sin(angle)) < 1e-15
    bases = np.array([2.0, -2.0, -2.0, 0.0, 0.0, 0.0, 1.0])
    powers = np.array([0.5, 3.0, 0.5, 2.0, -1.0, 0.0, math.nan])
    np.testing.assert_allclose(
        run("POW", "float64", bases, powers),
        [math.sqrt(2), -8, math.nan, 0, math.inf, 1, 1],
        rtol=1e-15,
    )


def test_nan_is_the_positive_quiet_one() -> None:
    zero = np.zeros(1, np.float32)
    made = run("FDIV", "float32", zero, zero)
    assert made.view(np.uint32)[0] == 0x7FC00000
    kept = decode_array(TensorSpec("x", "float32", (1,)), struct.pack("<I", 0xFFC00001))
    assert run("RESHAPE", "float32", kept, arg=()).view(np.uint32) == 0xFFC00001


def test_bitcasts_see_the_bits_of_the_dtype() -> None:
    one = decode_array(TensorSpec("x", "bfloat16", (1,)), struct.pack("<H", 0x3F80))
    assert run("BITCAST", "uint16", one)[0] == 0x3F80
    assert run("BITCAST", "bfloat16", np.array([0x4000], np.uint16))[0] == 2.0
    assert run("BITCAST", "int32", np.array([1.0], np.float32))[0] == 0x3F800000


def test_what_is_too_large_is_refused_before_it_is_allocated() -> None:
    wide = run("EXPAND", "float32", np.zeros(1024, np.float32), arg=(2**20,))
    for op in ("NEG", "CONTIGUOUS"):
        with pytest.raises(InvalidInput, match="too large for the reference"):
            run(op, "float32", wide)
    with pytest.raises(InvalidInput, match=str(limits.MAX_REFERENCE_ELEMENTS)):
        run("RESHAPE", "float32", wide, arg=(2**30,))


def test_a_region_ends_where_values_are_in_memory() -> None:
    b = make_counter()
    first = len(b.nodes) - 1
    two = b.const("float32", encode_float(2.0))
    second = b.store("float32", b.add("MUL", "float32", first, two))
    graph = b.graph({"z": second}, [first])
    assert list_region(graph, second) == [two, second - 1, second]
    assert list_operands(graph, list_region(graph, second)) == [first]
    assert list_operands(graph, list_region(graph, first)) == [0, 1, 2]


def make_everything() -> Builder:
    """One output per arithmetic operation and dtype, and one per conversion and fold."""
    b = Builder()
    size = 33
    sources = {
        dtype: (b.input(f"x-{dtype}", dtype, 2, size), b.input(f"y-{dtype}", dtype, 2, size))
        for dtype in ("float16", "float32", "float64", "int32", "uint8", "int64")
    }
    for dtype, (x, y) in sources.items():
        for op in sorted(ARITHMETIC):
            arity, dtypes = OPERATIONS[op].arity, OPERATIONS[op].dtypes
            if dtype not in dtypes or op in ("POW", "WHERE"):
                continue
            if op in ("CDIV", "CMOD", "FLOORDIV", "FLOORMOD", "SHL", "SHR"):
                operands = [x, b.const(dtype, "3")]
            else:
                operands = [x, y][:arity]
            result = "bool" if op.startswith("CMP") else dtype
            value = b.add(op, result, *operands)
            if op.startswith("CMP"):
                value = b.add("WHERE", dtype, value, x, y)
            b.store(b.nodes[value].dtype, value)
        for kind in ("ADD", "MAX"):
            b.store(dtype, b.add("REDUCE", dtype, x, arg=(kind, 2)))
            b.store(dtype, b.add("REDUCE", dtype, b.add("MUL", dtype, x, y), arg=(kind, 1)))
        for other in ("float32", "int32", "float16"):
            if other != dtype:
                b.store(other, b.add("CAST", other, x))
    return b


@pytest.mark.long  # in small: each operation above
def test_the_runtime_agrees_within_the_bound_that_follows_from_its_operands() -> None:
    b = make_everything()
    outputs = [index for index, node in enumerate(b.nodes) if node.op == "CONTIGUOUS"]
    graph = check_graph(b.graph({f"o{index}": index for index in outputs}))
    values = graph.values
    rng = np.random.default_rng(5)
    inputs = []
    for spec in graph.inputs:
        numbers = rng.uniform(0.5, 4.0, spec.shape)
        inputs.append(
            numbers.astype(spec.dtype)
            if spec.dtype[0] == "f"
            else rng.integers(0, 100, spec.shape).astype(spec.dtype)
        )
    program = TaskProgram(graph.to_bytes(), None)
    results = program.run(program.new_state(), [array.tobytes() for array in inputs])
    params = {("INPUT", position): array for position, array in enumerate(inputs)}
    plain = compute_graph(graph, params)
    inexact = 0
    for output, result in zip(graph.outputs, results, strict=True):
        region = list_region(graph, output.node)
        known = {index: plain[index] for index in list_operands(graph, region)}
        bounds = compute_bounds(graph, region, known)
        value = values[output.node]
        claimed = decode_array(TensorSpec("o", value.dtype, value.shape), result)
        assert is_within(claimed, known[output.node], bounds[output.node]), graph.nodes[region[-2]]
        np.testing.assert_array_equal(known[output.node], plain[output.node])
        if value.dtype in INTEGERS:
            assert not bounds[output.node].any()
        elif value.dtype != "bool":
            # tight: a hundred units in the last place of what goes in are no honest error
            assert np.all(bounds[output.node] < 0.2 * np.abs(known[output.node]).max() + 0.2)
            off = claimed + (bounds[output.node].max() * 2 + 1e-3).astype(claimed.dtype)
            assert not is_within(off, known[output.node], bounds[output.node])
            inexact += bool((claimed != known[output.node]).any())
    assert inexact  # the test would say nothing if every kernel gave the reference's bytes


@given(st.lists(FLOAT32, min_size=2, max_size=30), st.randoms(use_true_random=False))
def test_any_order_of_a_sum_is_within_the_bound(numbers: list[float], random: object) -> None:
    array = np.array(
        [n if math.isfinite(n) and abs(n) < 1e30 else 1.0 for n in numbers], np.float32
    )
    b = Builder()
    x = b.input("x", "float32", len(array))
    y = b.store(
        "float32", b.add("REDUCE", "float32", b.add("MUL", "float32", x, x), arg=("ADD", 1))
    )
    known = {x: array}
    bounds = compute_bounds(check_graph(b.graph({"y": y})), [1, 2, 3], known)
    shuffled = array.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    with np.errstate(all="ignore"):
        for claimed in (
            (shuffled * shuffled).sum(),
            np.float32((array.astype(np.float64) ** 2).sum()),
        ):
            assert is_within(np.asarray(claimed), known[y], bounds[y])


def test_an_uncertain_choice_is_bounded_by_both_branches() -> None:
    b = Builder()
    x, y = b.input("x", "float32", 2), b.input("y", "float32", 2)
    total = b.add("REDUCE", "float32", b.add("STACK", "float32", x, y, x), arg=("ADD", 1))
    less = b.add(
        "CMPLT", "bool", total, b.const("float32", encode_float(round_float(0.3, "float32")))
    )
    one, two = (b.const("float32", encode_float(n)) for n in (1.0, 2.0))
    root = b.store("float32", b.add("WHERE", "float32", less, one, two))
    known = {x: np.float32([0.1, 5]), y: np.float32([0.1, 5])}
    bounds = compute_bounds(check_graph(b.graph({"z": root})), range(2, len(b.nodes)), known)
    np.testing.assert_array_equal(bounds[root], [1.0, 0.0])


def test_a_comparison_with_a_nan_that_not_every_kernel_has_is_uncertain() -> None:
    b = Builder()
    x, y = b.input("x", "float32", 2), b.input("y", "float32", 2)
    larger = b.add("MAX", "float32", x, y)
    root = b.store("bool", b.add("CMPNE", "bool", larger, b.const("float32", encode_float(9.0))))
    known = {x: np.float32([math.nan, 5]), y: np.float32([1, 1])}
    bounds = compute_bounds(check_graph(b.graph({"z": root})), range(2, len(b.nodes)), known)
    np.testing.assert_array_equal(bounds[root], [1.0, 0.0])


def test_64_bit_integers_have_to_be_equal() -> None:
    one, other = np.array([2**63 - 1]), np.array([2**63 - 2])
    assert is_within(one, one, np.zeros(1)) and not is_within(other, one, np.zeros(1))


def test_every_operation_but_params_has_a_reference_and_a_bound() -> None:
    assert {op for op, spec in OPERATIONS.items() if spec.compute is None} == PARAMS
    without = {op for op, spec in OPERATIONS.items() if spec.bound is None}
    assert without == {op for op, spec in OPERATIONS.items() if spec.arity == 0}


def test_s15_a_float_beyond_the_range_of_an_integer_has_no_bound() -> None:
    """Kernels wrap it, clamp it or give the least integer, and all of them are honest."""
    for dtype, numbers, is_bounded in (
        ("int8", [127.0, -128.0, 128.0, -129.0, math.nan], [True, True, False, False, False]),
        ("uint8", [255.0, 0.0, 256.0, -1.0, math.inf], [True, True, False, False, False]),
        ("int64", [2.0**30, -(2.0**30), 2.0**31, 2.0**63, -(2.0**40)], [True, True] + [False] * 3),
    ):
        b = Builder()
        y = b.store(dtype, b.add("CAST", dtype, b.input("x", "float32", 5)))
        graph = check_graph(b.graph({"y": y}))
        bounds = compute_bounds(graph, [1, 2], {0: np.array(numbers, np.float32)})
        assert np.isfinite(bounds[y]).tolist() == is_bounded


def test_s15_an_inexact_integer_that_may_wrap_has_no_bound() -> None:
    b = Builder()
    x = b.add("CAST", "int8", b.add("SQRT", "float32", b.input("x", "float32", 2)))
    y = b.store("int8", b.add("ADD", "int8", x, b.const("int8", "117")))
    graph = check_graph(b.graph({"y": y}))
    given: dict[int, np.ndarray] = {0: np.array([9.0, 100.0], np.float32)}
    bounds = compute_bounds(graph, list(range(1, len(graph.nodes))), given)
    assert given[y].tolist() == [120, 127] and np.isfinite(bounds[y]).tolist() == [True, False]


def test_scalars_in_memory_and_as_an_index_have_no_axis() -> None:
    b = Builder()
    table, index = b.input("t", "float32", 5), b.input("i", "int32", 1)
    scalar = b.store("int32", b.add("RESHAPE", "int32", index, arg=()))
    found = b.store("float32", b.add("LOOKUP", "float32", table, scalar))
    graph = b.graph({"y": found})
    for number, wanted in ((3, 4.0), (7, 0.0), (-1, 0.0)):
        params = {("INPUT", 0): np.arange(1, 6, dtype=np.float32)}
        params["INPUT", 1] = np.array([number], np.int32)
        value = compute_graph(graph, params)[found]
        assert value.shape == () and value == wanted
