from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.cpu import native_kernels, vector_codegen
from splitup.cpu.native_kernels import decode_kernel, encode_kernel, is_supported
from splitup.cpu.vector_match import VectorKernel
from splitup.graph.ir import Graph, encode_float
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder
from tests.parameters import some_of

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs x86-64 with AVX2, FMA and F16C")
ROWS: Final = 5
HOSTILE: Final = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-39, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 127.5, -149.6],
    np.float32,
)


def draw(*shape: int, hostile: float = 0.2) -> np.ndarray:
    random = np.random.default_rng(shape)
    values = random.standard_normal(shape, dtype=np.float32) * 8
    return np.where(random.random(shape) < hostile, random.choice(HOSTILE, shape), values)


def constant(b: Builder, value: float) -> int:
    return b.const("float32", encode_float(float(np.float32(value))))


@pytest.fixture(autouse=True, scope="module")
def _device() -> Iterator[None]:
    select_device()
    with pytest.MonkeyPatch.context() as patch:  # small kernels are divided among threads, too
        patch.setattr(native_kernels, "SEQUENCE_WORK", 0)
        patch.setattr(vector_codegen, "THREAD_WORK", 0)
        yield


def find_kernels(graph: Graph) -> list[Any]:
    """Return the vector kernels of a graph in order; all its kernels have to be native."""
    schedule = compile_graph(check_graph(graph), "CPU")
    assert all(launch.kind == "native" for launch in schedule.launches)
    return [schedule.natives[launch.index] for launch in schedule.launches]


def run(graph: Graph, *inputs: np.ndarray, native: bool = True) -> bytes:
    """Return what one thread gives, and so do three."""
    data = [array.tobytes() for array in inputs]
    found = set()
    for threads in (1, 3):
        program = TaskProgram.from_graph(
            check_graph(graph),
            lambda name: memoryview(b""),
            uses_native_code=native,
            threads=threads,
        )
        found |= {bytes(program.run(program.new_state(), data)[0]) for _ in range(2)}
    (only,) = found
    return only


def make_rows(width: int, make: Callable[[Builder, int, int], int]) -> Graph:
    """Return the graph of y = make(x, z) of rows of a width."""
    b = Builder()
    x, z = (b.rows(name, "float32", "T", ROWS, width) for name in "xz")
    return b.graph({"y": b.store("float32", make(b, x, z))})


def _unary(op: str, b: Builder, x: int, z: int) -> int:
    return b.add(op, "float32", x)


def _binary(op: str, b: Builder, x: int, z: int) -> int:
    return b.add(op, "float32", x, z)


def _choose(op: str, b: Builder, x: int, z: int) -> int:
    return b.add("WHERE", "float32", b.add(op, "bool", x, z), x, constant(b, -1e30))


def _silu(b: Builder, x: int, z: int) -> int:
    power = b.add("EXP2", "float32", b.add("MUL", "float32", x, constant(b, -1.4426950216293335)))
    below = b.add("ADD", "float32", constant(b, 1.0), power)
    divided = b.add("MUL", "float32", x, b.add("RECIPROCAL", "float32", below))
    return b.add("MUL", "float32", divided, z)


def _integers(b: Builder, x: int, z: int) -> int:
    whole = b.add("CAST", "int32", x)
    shifted = b.add(
        "SHR", "int32", b.add("SHL", "int32", whole, b.const("int32", "7")), b.const("int32", "3")
    )
    is_less = b.add("CMPLT", "bool", shifted, b.add("CAST", "int32", z))
    both = b.add("AND", "bool", is_less, b.add("CMPNE", "bool", whole, b.const("int32", "3")))
    other = b.add("ADD", "int32", shifted, b.const("int32", "-5"))
    return b.add("CAST", "float32", b.add("WHERE", "int32", both, other, whole))


FORMS: Final[dict[str, Callable[[Builder, int, int], int]]] = {
    **{op: functools.partial(_unary, op) for op in ("EXP2", "LOG2", "SQRT", "RECIPROCAL")},
    **{op: functools.partial(_binary, op) for op in ("ADD", "SUB", "MUL", "FDIV", "MAX")},
    **{op: functools.partial(_choose, op) for op in ("CMPLT", "CMPNE", "CMPEQ")},
    "silu": _silu,
    "integers": _integers,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", some_of([8, 40], 40))
def test_numbers_have_the_bits_of_scalar_code(form: str, width: int) -> None:
    graph = make_rows(width, FORMS[form])
    assert [type(kernel) for kernel in find_kernels(graph)] == [VectorKernel]
    for rows in (ROWS, 1):
        x, z = draw(rows, width), draw(rows, width, hostile=0.1)
        assert run(graph, x, z) == run(graph, x, z, native=False)


def reduce(b: Builder, op: str, x: int) -> int:
    """Return the reduction of each row of x [T, width]."""
    return b.add("REDUCE", "float32", b.add("PERMUTE", "float32", x, arg=(1, 0)), arg=(op, 1))


def make_softmax(width: int) -> Graph:
    """Return exp(x - max) / sum of rows, and with it what is masked, where z is less than 0."""

    def make(b: Builder, x: int, z: int) -> int:
        hidden = b.add("CMPLT", "bool", z, constant(b, 0.0))
        x = b.store("float32", b.add("WHERE", "float32", hidden, constant(b, -1e30), x))
        greatest = b.add("RESHAPE", "float32", reduce(b, "MAX", x), arg=("T", 1))
        below = b.add("SUB", "float32", x, b.store("float32", greatest))
        power = b.add("EXP2", "float32", below)
        power = b.store("float32", power)
        total = b.store("float32", reduce(b, "ADD", power))
        share = b.add("RECIPROCAL", "float32", b.add("RESHAPE", "float32", total, arg=("T", 1)))
        return b.add("MUL", "float32", power, share)

    return make_rows(width, make)


def test_rows_of_softmax_agree_in_steps_of_any_length() -> None:
    width = 64
    graph = make_softmax(width)
    kinds = [type(kernel) for kernel in find_kernels(graph)]
    assert kinds == [VectorKernel] * 5  # masked, maximum, power, sum, share
    x, z = draw(ROWS, width, hostile=0.0), np.ones((ROWS, width), np.float32)
    for row in range(ROWS):
        z[row, 8 * row + row :] = -1.0  # behind the sequence; equal numbers are computed once
    z[2, 3] = z[3, 16:24] = -1.0
    whole = run(graph, x, z)
    single = [run(graph, x[row : row + 1], z[row : row + 1]) for row in range(ROWS)]
    assert whole == b"".join(single)
    hidden = np.where(z < 0, -np.inf, x.astype(np.float64))[1:]
    exact = np.exp2(hidden - hidden.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    given = np.frombuffer(whole, np.float32).reshape(ROWS, width)
    np.testing.assert_allclose(given[1:], exact, rtol=2e-6, atol=1e-30)
    assert not given[1:][z[1:] < 0].any()


def make_reduction(op: str, width: int) -> Graph:
    b = Builder()
    x = b.rows("x", "float32", "T", ROWS, width)
    return b.graph({"y": b.store("float32", reduce(b, op, x))})


def test_a_sum_adds_one_number_after_the_other_and_zeros_change_no_bit() -> None:
    width = 136
    graph = make_reduction("ADD", width)
    (kernel,) = find_kernels(graph)
    assert kernel.shape.reduction == "sum"
    values = draw(ROWS, width, hostile=0.0)
    values[1, 5:61] = values[2, :64] = values[3, 7:] = values[4] = 0.0
    values[4, 9] = -0.0
    assert run(graph, values) == np.add.accumulate(values, axis=1)[:, -1].tobytes()
    apart = np.zeros_like(values)
    apart[:, 1::2] = values[:, : width // 2]
    values[:, width // 2 :] = 0.0
    assert run(graph, apart) == run(graph, values)


def test_of_zeros_the_first_is_the_maximum() -> None:
    width = 24
    graph = make_reduction("MAX", width)
    values = np.full((ROWS, width), -1.0, np.float32)
    values[0, [3, 9]] = 0.0, -0.0
    values[1, [9, 3, 20]] = 0.0, -0.0, 0.0
    values[2, [8, 15]] = -0.0, 0.0
    given = np.frombuffer(run(graph, values), np.float32)
    assert np.signbit(given).tolist() == [False, True, True, True, True]
    assert given.tolist() == [0.0, 0.0, 0.0, -1.0, -1.0]
    assert given.tobytes() == run(graph, values, native=False)


def test_a_maximum_is_that_of_all_numbers_and_never_nan() -> None:
    width = 16
    b = Builder()
    x = b.rows("x", "float32", "T", width, width)
    graph = b.graph({"y": b.store("float32", reduce(b, "MAX", x))})
    (kernel,) = find_kernels(graph)
    assert kernel.shape.reduction == "maximum"
    values = np.full((width, width), np.nan, np.float32)
    np.fill_diagonal(values, np.arange(width) - 7.5)
    assert run(graph, values) == (np.arange(width, dtype=np.float32) - 7.5).tobytes()


def test_what_reduces_and_does_more_is_cut_in_two() -> None:
    width, b = 16, Builder()
    x = b.rows("x", "float32", "T", ROWS, width)
    total = reduce(b, "ADD", b.add("MUL", "float32", x, x))
    graph = b.graph({"y": b.store("float32", b.add("SQRT", "float32", total))})
    launches = compile_graph(check_graph(graph), "CPU").launches
    assert [launch.kind for launch in launches] == ["native", "executable"]
    values = draw(ROWS, width, hostile=0.0)
    given = np.frombuffer(run(graph, values), np.float32)
    np.testing.assert_allclose(given, np.linalg.norm(values, axis=1), rtol=1e-6)


def test_what_is_padded_or_no_whole_vector_stays_with_tinygrad() -> None:
    for width, pads in ((16, True), (12, False)):
        b = Builder()
        x = b.rows("x", "float32", "T", ROWS, width)
        if pads:
            x = b.add("PAD", "float32", x, arg=((0, "T"), (8, 2 * width)))
        graph = b.graph({"y": b.store("float32", b.add("SQRT", "float32", x))})
        launches = compile_graph(check_graph(graph), "CPU").launches
        assert [launch.kind for launch in launches] == ["executable"]


def test_kernels_are_kept_as_plain_data() -> None:
    for kernel in find_kernels(make_softmax(64)):
        assert decode_kernel(encode_kernel(kernel)) == kernel
