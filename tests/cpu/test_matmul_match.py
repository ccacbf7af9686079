from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.cpu.matmul_match import Matmul
from splitup.cpu.matmul_shape import Bound, LookupShape, MatmulShape, ProductKind
from splitup.cpu.native_kernels import bind_matmul, is_supported
from splitup.cpu.vector_match import VectorKernel
from splitup.graph.ir import Graph
from splitup.graph.memory import BUFFER_ALIGNMENT
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder
from tests.parameters import some_of

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs x86-64 with AVX2, FMA and F16C")
KINDS: list[ProductKind] = ["float32", "float16", "bfloat16", "int8"]


def make_b(kind: ProductKind, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a random matrix as it is stored, and the float32 values that it stands for."""
    random = np.random.default_rng(n * k)
    values = random.standard_normal((n, k), dtype=np.float32)
    if kind == "float32":
        return values, values
    if kind == "float16":
        half = values.astype(np.float16)
        return half, half.astype(np.float32)
    if kind == "int8":
        whole = values.round().astype(np.int8)
        return whole, whole.astype(np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    return upper, (upper.astype(np.uint32) << 16).view(np.float32)


def multiply(
    kind: ProductKind, a: np.ndarray, b: np.ndarray, n: int, *, threads: int = 1
) -> np.ndarray:
    """Return a [t, k] times the transpose of a stored matrix, by style dot."""
    t, k = a.shape
    out = np.full((t, n), np.nan, np.float32)
    shape = MatmulShape("dot", kind, k, 4, 4 * n, 4 * k, 4, b.nbytes // n, 0)
    return call(Matmul(shape, (0, 1, 2), n, t, "", ((0, 0, 0),)), out, a, b, threads=threads)


def call(
    matmul: Matmul,
    out: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    threads: int = 1,
    rows: Any = None,
) -> np.ndarray:
    addresses = [array.ctypes.data for array in (out, a, b)]
    bind_matmul(matmul, addresses, threads, rows or {})()
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_gives_the_sums(kind: ProductKind) -> None:
    for n, k, t in [(1, 32, 1), (3, 64, 2), (8, 96, 1), (12, 32, 3), (13, 160, 4), (31, 32, 7)]:
        a = np.random.default_rng(t).standard_normal((t, k), dtype=np.float32)
        stored, values = make_b(kind, n, k)
        exact = a.astype(np.float64) @ values.astype(np.float64).T
        np.testing.assert_allclose(multiply(kind, a, stored, n), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_neither_rows_nor_tiles_nor_threads(kind: ProductKind) -> None:
    n, k, t = 136, 2048, 8
    a = np.random.default_rng(1).standard_normal((t, k), dtype=np.float32)
    stored, _ = make_b(kind, n, k)
    whole = multiply(kind, a, stored, n)
    for row in range(t):
        alone = multiply(kind, np.ascontiguousarray(a[row : row + 1]), stored, n)
        assert alone.tobytes() == whole[row : row + 1].tobytes()
    for first, count in ((0, 1), (5, 11), (130, 6)):
        part = np.ascontiguousarray(stored[first : first + count])
        columns = multiply(kind, a, part, count)
        assert columns.tobytes() == whole[:, first : first + count].tobytes()
    assert n * k * t >= 2**20  # enough for threads to be used
    for threads in (2, 3, 64):
        assert multiply(kind, a, stored, n, threads=threads).tobytes() == whole.tobytes()


def test_the_order_of_a_sum_is_the_documented_one() -> None:
    random = np.random.default_rng(2)
    a, b = (random.standard_normal((1, 24), dtype=np.float32) for _ in range(2))
    lanes = np.zeros(8, np.float32)
    for start in range(0, 24, 8):  # one rounding per step: exact in double, then to single
        exact = a[0, start : start + 8].astype(np.longdouble) * b[0, start : start + 8]
        lanes = (exact + lanes).astype(np.float32)
    pairs = lanes[0::2] + lanes[1::2]
    expected = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    assert multiply("float32", a, b, 1)[0, 0] == expected


def test_outer_products_and_tables_of_offsets() -> None:
    heads, t, k, n = 3, 5, 7, 24
    random = np.random.default_rng(3)
    a = random.standard_normal((t, heads, k), dtype=np.float32)
    b = random.standard_normal((k, heads, n), dtype=np.float32)
    out = np.zeros((heads, t, n), np.float32)
    shape = MatmulShape("outer", "float32", k, 4, 4 * n, 4 * heads * k, 4, 0, 4 * heads * n)
    table = tuple((4 * head * t * n, 4 * head * k, 4 * head * n) for head in range(heads))
    matmul = Matmul(shape, (0, 1, 2), n, t, "", table)
    expected = np.zeros_like(out)
    for step in range(k):  # k ascends; the product is exact in double
        exact = a[:, :, step].T[:, :, None].astype(np.float64) * b[step][:, None, :]
        expected = (exact + expected).astype(np.float32)
    np.testing.assert_array_equal(call(matmul, out, a, b), expected)


def test_rows_may_be_known_only_at_launch() -> None:
    n, k = 5, 32
    a = np.ones((4, k), np.float32)
    stored, values = make_b("float32", n, k)
    shape = MatmulShape("dot", "float32", k, 4, 4 * n, 4 * k, 4, 4 * k, 0)
    rows = {"T": ctypes.c_uint64(0)}
    for count in (0, 1, 4):
        rows["T"].value = count
        out = np.zeros((4, n), np.float32)
        call(Matmul(shape, (0, 1, 2), n, 4, "T", ((0, 0, 0),)), out, a, stored, rows=rows)
        assert np.all(out[count:] == 0)
        np.testing.assert_allclose(out[:count], (a @ values.T)[:count], atol=1e-5)


def look_up(
    style: str, a: np.ndarray, b: np.ndarray, numbers: np.ndarray, bound: Bound, threads: int = 1
) -> np.ndarray:
    """Return products of a [rows, t, k] and the rows of b [places, n or k] that numbers choose.

    Numbers are int32 [rows, n] for "dot", [rows, k] for "outer"; the result is [rows, t, n].
    """
    rows, t, k = a.shape
    n = numbers.shape[1] if style == "dot" else b.shape[1]
    out = np.full((rows, t, n), np.nan, np.float32)
    strides = (b.strides[0], 4, 4 * t * n, 4 * t * k, numbers.strides[0])
    lookup = LookupShape(bound, len(b) - 1, *strides)
    kind = b.dtype.name
    shape = MatmulShape(style, kind, k, 4, 4 * n, 4 * k, 4, 0, 0, lookup)  # type: ignore[arg-type]
    matmul = Matmul(shape, (0, 1, 2, 3), n, t, "", ((0, 0, 0),), rows)
    addresses = [array.ctypes.data for array in (out, a, b, numbers)]
    bind_matmul(matmul, addresses, threads, {})()
    return out


@pytest.mark.parametrize("style", ["dot", "outer"])
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rows_looked_up_give_the_bits_of_the_same_numbers_in_float32(
    dtype: str, style: str, t: int
) -> None:
    random = np.random.default_rng(t)
    b = random.standard_normal((64, 24)).astype(np.float16)
    if dtype == "int8":
        b = random.integers(-128, 128, (64, 24), dtype=np.int8)
    numbers = random.integers(0, 64, (2, 13), dtype=np.int32)
    a = random.standard_normal((2, t, 24 if style == "dot" else 13), dtype=np.float32)
    given = look_up(style, a, b, numbers, "mask")
    assert given.tobytes() == look_up(style, a, b.astype(np.float32), numbers, "mask").tobytes()


@pytest.mark.parametrize("bound", ["mask", "clamp"])
@pytest.mark.parametrize(("t", "n", "rows"), [(1, 1, 2), (2, 13, 1), (3, 24, 5), (7, 40, 2)])
def test_rows_looked_up_give_the_bits_of_rows_side_by_side(
    bound: Bound, t: int, n: int, rows: int
) -> None:
    places, k = 64, 24
    random = np.random.default_rng(n)
    a = random.standard_normal((rows, t, k), dtype=np.float32)
    b = random.standard_normal((places, k), dtype=np.float32)
    numbers = random.integers(-100, 200, (rows, n), dtype=np.int32)
    numbers[0, 0] = np.iinfo(np.int32).min
    chosen = numbers & (places - 1) if bound == "mask" else np.clip(numbers, 0, places - 1)
    given = look_up("dot", a, b, numbers, bound)
    for row in range(rows):
        side_by_side = np.ascontiguousarray(b[chosen[row]])
        assert given[row].tobytes() == multiply("float32", a[row], side_by_side, n).tobytes()
    # the same numbers count k in the other style
    a = random.standard_normal((rows, t, n), dtype=np.float32)
    given = look_up("outer", a, b, numbers, bound)
    expected = np.zeros((rows, t, k), np.float32)
    for step in range(n):  # exact in double
        exact = a[:, :, step, None].astype(np.float64) * b[chosen[:, step]][:, None]
        expected = (exact + expected).astype(np.float32)
    np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize("style", ["dot", "outer"])
def test_threads_divide_rows_that_are_looked_up(style: str) -> None:
    rows, t, k, n = 8, 3, 128, 512
    random = np.random.default_rng(4)
    a = random.standard_normal((rows, t, k), dtype=np.float32)
    b = random.standard_normal((96, k if style == "dot" else n), dtype=np.float32)
    numbers = random.integers(0, 96, (rows, n if style == "dot" else k), dtype=np.int32)
    assert rows * t * k * n >= 2**20
    whole = look_up(style, a, b, numbers, "clamp")
    for threads in (2, 3):
        assert look_up(style, a, b, numbers, "clamp", threads).tobytes() == whole.tobytes()


# ---- finding them in graphs ----------------------------------------------------------------------


def project(b: Builder, x: int, weight: int, rows: int, n: int, k: int) -> int:
    """Return the nodes of x [rows, k] times the transpose of a float32 value [n, k]."""
    wide = b.add("RESHAPE", "float32", x, arg=(rows, 1, k))
    wide = b.add("RESHAPE", "float32", wide, arg=(rows, k))
    wide = b.add("EXPAND", "float32", wide, arg=(n,))  # [n, rows, k]
    many = b.add("EXPAND", "float32", weight, arg=(rows,))  # [rows, n, k]
    many = b.add("PERMUTE", "float32", many, arg=(1, 0, 2))
    product = b.add("MUL", "float32", wide, many)
    product = b.add("PERMUTE", "float32", product, arg=(2, 1, 0))  # [k, rows, n]
    return b.add("REDUCE", "float32", product, arg=("ADD", 1))  # [rows, n]


def make_layer(rows: int, k: int, n: int, dtype: str = "float16") -> tuple[Builder, Graph]:
    """y = x + project(x, w): a sum with more to do in its kernel."""
    b = Builder()
    x = b.input("x", "float32", rows, k)
    values = np.random.default_rng(k).standard_normal((n, k)).astype(dtype)
    w = b.add("CAST", "float32", b.weight("w", values))
    total = b.add("ADD", "float32", project(b, x, w, rows, n, k), x)
    return b, b.graph({"y": b.store("float32", total)})


def find_natives(graph: Graph) -> list[type | None]:
    """Return what native code computes each kernel of a graph, None for tinygrad's."""
    select_device()
    schedule = compile_graph(check_graph(graph), "CPU")
    return [
        type(schedule.natives[one.index]) if one.kind == "native" else None
        for one in schedule.launches
    ]


def run(b: Builder, graph: Graph, x: np.ndarray, threads: int = 1) -> np.ndarray:
    program = TaskProgram(graph.to_bytes(), b.safetensors(), threads=threads)
    # a cut takes no memory; predicted are whole blocks for x and w too
    assert 0 <= program.vram_bytes - program.allocated_bytes < 2 * BUFFER_ALIGNMENT
    (result,) = program.run(program.new_state(), [x.tobytes()])
    return np.frombuffer(result, np.float32).reshape(x.shape)


def test_a_kernel_that_does_more_is_cut_in_two_and_rows_agree() -> None:
    k = n = 128
    x = np.random.default_rng(5).standard_normal((7, k)).astype(np.float32)
    b, graph = make_layer(7, k, n)
    assert find_natives(graph) == [Matmul, VectorKernel]
    weights = np.frombuffer(b.weight_bytes["w"], np.float16).reshape(n, k).astype(np.float32)
    many = run(b, graph, x)
    np.testing.assert_allclose(many, x + x @ weights.T, atol=1e-4)
    assert run(b, graph, x, threads=2).tobytes() == many.tobytes()
    b, graph = make_layer(1, k, n)
    for row in range(7):
        assert run(b, graph, x[row : row + 1]).tobytes() == many[row : row + 1].tobytes()


@pytest.mark.parametrize(("k", "n"), [(20, 20), (8, 8)])
def test_what_does_not_fit_is_no_matmul(k: int, n: int) -> None:
    x = np.random.default_rng(6).standard_normal((3, k)).astype(np.float32)
    b, graph = make_layer(3, k, n)
    assert Matmul not in find_natives(graph)
    weights = np.frombuffer(b.weight_bytes["w"], np.float16).reshape(n, k).astype(np.float32)
    np.testing.assert_allclose(run(b, graph, x), x + x @ weights.T, atol=1e-5)


def test_sums_that_the_result_has_no_room_for_stay_with_tinygrad() -> None:
    k = n = 128
    x = np.random.default_rng(7).standard_normal((3, k)).astype(np.float32)
    b = Builder()
    values = np.random.default_rng(k).standard_normal((n, k)).astype(np.float32)
    product = project(b, b.input("x", "float32", 3, k), b.weight("w", values), 3, n, k)
    graph = b.graph({"y": b.store("float16", b.add("CAST", "float16", product))})
    assert [launch.kind for launch in compile_graph(check_graph(graph), "CPU").launches] == [
        "executable"
    ]
    program = TaskProgram(graph.to_bytes(), b.safetensors())
    assert program.allocated_bytes == program.vram_bytes
    (result,) = program.run(program.new_state(), [x.tobytes()])
    given = np.frombuffer(result, np.float16).reshape(3, n)
    np.testing.assert_allclose(given, x @ values.T, rtol=1e-3, atol=1e-3)


# in the second, x with its gaps is as large as the weights: 24 * (48 + 16) = 32 * 48
@pytest.mark.parametrize(("rows", "k", "n"), [(9, 64, 48), (24, 48, 32)])
def test_a_kernel_with_symbolic_rows_is_cut_in_two_and_rows_agree(
    rows: int, k: int, n: int
) -> None:
    b = Builder()
    x, z = b.rows("x", "float32", "T", rows, k), b.rows("z", "float32", "T", rows, n)
    values = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    w = b.weight("w", values)
    wide = b.add("EXPAND", "float32", x, arg=(n,))
    many = b.add("EXPAND", "float32", w, arg=("T",))
    many = b.add("PERMUTE", "float32", many, arg=(1, 0, 2))
    product = b.add("MUL", "float32", wide, many)
    product = b.add("PERMUTE", "float32", product, arg=(2, 1, 0))
    total = b.add("REDUCE", "float32", product, arg=("ADD", 1))
    graph = b.graph({"y": b.store("float32", b.add("ADD", "float32", z, total))})
    assert find_natives(graph) == [Matmul, VectorKernel]
    program = TaskProgram(graph.to_bytes(), b.safetensors())
    xs = np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)
    single = []
    for row in xs:
        inputs = [row.tobytes(), np.ones(n, np.float32).tobytes()]
        single += program.run(program.new_state(), inputs)
    for count in (1, 4, rows):
        inputs = [xs[:count].tobytes(), np.ones((count, n), np.float32).tobytes()]
        (result,) = program.run(program.new_state(), inputs)
        assert result == b"".join(single[:count])
        given = np.frombuffer(result, np.float32).reshape(count, n)
        np.testing.assert_allclose(given, xs[:count] @ values.T + 1, atol=1e-4)


def test_operands_of_one_size_are_not_mixed_up() -> None:
    n = k = rows = 64
    random = np.random.default_rng(8)
    x, z, values = (random.standard_normal((n, k)).astype(np.float32) for _ in range(3))
    b = Builder()
    residual = b.input("z", "float32", rows, n)
    product = project(b, b.input("x", "float32", rows, k), b.weight("w", values), rows, n, k)
    graph = b.graph({"y": b.store("float32", b.add("ADD", "float32", residual, product))})
    assert find_natives(graph) == [Matmul, VectorKernel]
    program = TaskProgram(graph.to_bytes(), b.safetensors())
    (result,) = program.run(program.new_state(), [z.tobytes(), x.tobytes()])
    given = np.frombuffer(result, np.float32).reshape(rows, n)
    np.testing.assert_allclose(given, z + x @ values.T, atol=1e-4)


def make_attention(context: int, rows: int = 5) -> Graph:
    """y = scores x keys', z = scores x values, of rows of a cache that numbers choose.

    x float32 [T, heads 2, groups 3, 16], w [T, 2, 3, context], numbers int32 [T, context];
    cache [context, 2, heads, 16].
    """
    b, heads, groups, width = Builder(), 2, 3, 16
    x = b.rows("x", "float32", "T", rows, heads, groups, width)
    w = b.rows("w", "float32", "T", rows, heads, groups, context)
    numbers = b.rows("numbers", "int32", "T", rows, context)
    cache = b.input("cache", "float32", context, 2, heads, width)
    if context & (context - 1) == 0:
        number = b.add("AND", "int32", numbers, b.const("int32", str(context - 1)))
    else:
        inverse, zero = b.const("int32", "-1"), b.const("int32", "0")
        number = b.add("MAX", "int32", numbers, zero)
        number = b.add("XOR", "int32", number, inverse)
        number = b.add("MAX", "int32", number, b.const("int32", str(-context)))
        number = b.add("XOR", "int32", number, inverse)
    number = b.add("RESHAPE", "int32", number, arg=("T", 1, context))
    number = b.add("RESHAPE", "int32", number, arg=("T", context))
    number = b.add("EXPAND", "int32", number, arg=(groups,))  # [groups, T, context]
    number = b.add("PERMUTE", "int32", number, arg=(1, 0, 2))
    found = []
    for part in range(2):
        bounds = ((0, context), (part, 1), (0, heads), (0, width))
        table = b.add("SHRINK", "float32", cache, arg=bounds)
        table = b.add("RESHAPE", "float32", table, arg=(context, heads, width))
        chosen = b.add("LOOKUP", "float32", table, number)  # [T, groups, context, heads, width]
        found.append(b.add("PERMUTE", "float32", chosen, arg=(0, 3, 1, 2, 4)))
    wide = b.add("RESHAPE", "float32", x, arg=("T", heads, groups, 1, width))
    product = b.add("MUL", "float32", wide, found[0])
    product = b.add("PERMUTE", "float32", product, arg=(4, 0, 1, 2, 3))
    y = b.add("REDUCE", "float32", product, arg=("ADD", 1))
    y = b.store("float32", b.add("ADD", "float32", y, w))
    wide = b.add("RESHAPE", "float32", w, arg=("T", heads, groups, context, 1))
    product = b.add("MUL", "float32", wide, found[1])
    product = b.add("PERMUTE", "float32", product, arg=(3, 0, 1, 2, 4))
    z = b.add("REDUCE", "float32", product, arg=("ADD", 1))
    return b.graph({"y": y, "z": b.store("float32", z)})


@pytest.mark.parametrize("context", some_of([16, 12], 16))  # the other bound is in the next test
def test_products_of_rows_that_are_looked_up_are_found_and_are_those_of_tinygrad(
    context: int,
) -> None:
    graph = make_attention(context)
    assert find_natives(graph).count(Matmul) == 2
    random = np.random.default_rng(context)
    programs = [
        TaskProgram.from_graph(
            check_graph(graph), lambda name: memoryview(b""), uses_native_code=takes
        )
        for takes in (True, False)
    ]
    cache = random.integers(-9, 9, (context, 2, 2, 16)).astype(np.float32)  # sums are exact
    for rows in (5, 1):
        x = random.integers(-9, 9, (rows, 2, 3, 16)).astype(np.float32)
        w = random.integers(-9, 9, (rows, 2, 3, context)).astype(np.float32)
        numbers = random.integers(-2 * context, 2 * context, (rows, context), dtype=np.int32)
        inputs = [array.tobytes() for array in (x, w, numbers, cache)]
        one, other = (program.run(program.new_state(), inputs) for program in programs)
        assert one == other
        assert any(one[0]) and any(one[1])


@pytest.mark.parametrize("context", some_of([64, 44], 44))
def test_a_tail_that_names_one_row_changes_no_bit(context: int) -> None:
    """What attention does not see has one number and the factor +0.0; any other tail is summed."""
    graph = make_attention(context)
    ours, theirs = (
        TaskProgram.from_graph(
            check_graph(graph), lambda name: memoryview(b""), uses_native_code=takes
        )
        for takes in (True, False)
    )
    random = np.random.default_rng(context)
    for seen in (0, 1, 7, 8, 9, 20, context - 17, context - 8, context):
        cache = random.integers(-9, 9, (context, 2, 2, 16)).astype(np.float32)  # sums are exact
        x = random.integers(-9, 9, (5, 2, 3, 16)).astype(np.float32)
        w = random.integers(1, 9, (5, 2, 3, context)).astype(np.float32)
        numbers = np.full((5, context), -64, np.int32)  # row 0, either way
        numbers[:, :seen] = random.integers(0, context, (5, seen))
        w[:, :, :, seen:] = 0.0
        w[1] = 1.0  # a row whose factors are not zeros
        w[2, 1, 2, -1] = 3.0  # one factor
        w[3, :, :, seen:] = -0.0
        numbers[4, context - 9 :] = 5  # two runs of equal numbers
        for row in (None, np.inf, np.nan):  # 0 times them is NaN
            if row is not None:
                cache[0] = row
            inputs = [array.tobytes() for array in (x, w, numbers, cache)]
            one, other = (program.run(program.new_state(), inputs) for program in (ours, theirs))
            for given, wanted in zip(one, other, strict=True):
                given, wanted = np.frombuffer(given, np.float32), np.frombuffer(wanted, np.float32)
                np.testing.assert_array_equal(given, wanted)  # NaN's sign is not told


def test_a_lookup_that_may_be_outside_stays_with_tinygrad() -> None:
    graph = make_attention(16)
    nodes = list(graph.nodes)
    place = next(i for i, node in enumerate(nodes) if node.op == "AND")
    const = nodes[place].srcs[1]
    nodes[const] = replace(nodes[const], arg="31")
    launches = compile_graph(check_graph(replace(graph, nodes=tuple(nodes))), "CPU").launches
    assert all(launch.kind == "executable" for launch in launches)
