from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends.decoder.quantised import (
    DECODERS,
    SLOW_ON_CPU,
    count_bytes,
    dequantise,
)
from splitup_deploy.frontends.tinygrad_function import trace_function
from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.cpu.native_kernels import decode_kernel, encode_kernel, is_supported
from splitup.graph.rules import CheckedGraph, check_graph
from tests.parameters import some_of

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs x86-64 with AVX2, FMA and F16C")
GOLDEN = Path(__file__).parents[1] / "deploy" / "golden" / "gguf_blocks.npz"
FAST = [name for name in DECODERS if name not in SLOW_ON_CPU]
N = 13  # a tile of 8, one of 4 and one of 1


def draw_blocks(encoding: str, n: int, blocks: int) -> np.ndarray:
    """Return random blocks [n, blocks, bytes] whose scales are finite."""
    random = np.random.default_rng(n)
    golden = np.load(GOLDEN)
    if f"{encoding}/blocks" in golden:
        some = golden[f"{encoding}/blocks"].reshape(-1, golden[f"{encoding}/blocks"].shape[-1])
        return some[random.integers(0, len(some), (n, blocks))]
    drawn = random.integers(0, 256, (n, blocks, count_bytes(encoding, 32)), dtype=np.uint8)
    size = 4 if encoding.endswith("F32") else 2
    drawn[..., size - 1] = 0x30  # the upper byte of a small number
    if encoding.startswith("F8"):
        drawn[..., 2:] &= 0xF7  # not NaN
    return drawn


def make_graph(encoding: str, stored: np.ndarray, rows: int) -> tuple[CheckedGraph, Any]:
    """Return y = x [rows, k] times the transpose of a quantised matrix, and its weights."""
    weight = Tensor(stored).realize()
    k = dequantise(weight, encoding).shape[-1]

    def multiply(x: Tensor) -> Tensor:
        return x @ dequantise(weight, encoding).transpose()

    multiply.inputs = {"x": ("float32", (rows, k))}  # type: ignore[attr-defined]
    traced = trace_function(multiply, "multiply").read_weights()
    data = {name: b"".join(source.read()) for name, source in traced.weights.items()}
    return check_graph(traced.graph), lambda name: memoryview(data[name])


def multiply(encoding: str, stored: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    graph, get_bytes = make_graph(encoding, stored, len(x))
    program = TaskProgram.from_graph(graph, get_bytes, threads=threads)
    (result,) = program.run(program.new_state(), [x.tobytes()])
    return np.frombuffer(result, np.float32).reshape(len(x), -1)


@pytest.fixture(autouse=True)
def device() -> None:
    select_device()


# halves of bytes, a bit apart, scales of scales, tables, zero points
SOME = ("Q4_0", "Q5_0", "Q6_K", "IQ4_NL", "U8_BF16")


@pytest.mark.parametrize("encoding", some_of(FAST, *SOME))
def test_every_number_is_the_one_that_the_graph_says(encoding: str) -> None:
    """A row of x that is 1 at one place gives the weights there, without any rounding."""
    stored = draw_blocks(encoding, N, 3)
    values = dequantise(Tensor(stored), encoding).numpy()
    ones = np.eye(values.shape[1], dtype=np.float32)
    np.testing.assert_array_equal(multiply(encoding, stored, ones), values.T)
    x = np.random.default_rng(1).standard_normal((7, values.shape[1]), dtype=np.float32)
    many = multiply(encoding, stored, x)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    bound = np.abs(x).astype(np.float64) @ np.abs(values).astype(np.float64).T
    assert np.all(np.abs(many - exact) <= 2e-6 * bound)
    for row in (0, 6):  # a single row is multiplied in another way
        alone = multiply(encoding, stored, np.ascontiguousarray(x[row : row + 1]))
        assert alone.tobytes() == many[row : row + 1].tobytes()


@pytest.mark.parametrize("encoding", some_of(DECODERS, *SOME, "MXFP4"))
def test_the_list_of_slow_formats_is_true(encoding: str) -> None:
    graph, _ = make_graph(encoding, draw_blocks(encoding, N, 3), 3)
    schedule = compile_graph(graph, "CPU")
    assert ([one.kind for one in schedule.launches] == ["native"]) == (encoding not in SLOW_ON_CPU)
    for kernel in schedule.natives:
        assert decode_kernel(_make_lists(encode_kernel(kernel))) == kernel


def _make_lists(value: Any) -> Any:
    return list(map(_make_lists, value)) if isinstance(value, list | tuple) else value


def test_bits_do_not_depend_on_threads() -> None:
    stored = draw_blocks("Q4_K", 136, 3)
    x = np.random.default_rng(2).standard_normal((12, 768), dtype=np.float32)
    assert 136 * x.size >= 2**20  # enough for threads to be used
    whole = multiply("Q4_K", stored, x)
    assert multiply("Q4_K", stored, x, threads=3).tobytes() == whole.tobytes()


def test_a_matrix_of_long_rows_is_decoded_in_smaller_tiles() -> None:
    stored = draw_blocks("Q4_1", 9, 513)
    x = np.random.default_rng(3).standard_normal((2, 16_416), dtype=np.float32)
    values = dequantise(Tensor(stored), "Q4_1").numpy().astype(np.float64)
    given = multiply("Q4_1", stored, x)
    np.testing.assert_allclose(given, x @ values.T, rtol=0, atol=1e-4 * np.abs(values).max() * 32)


@pytest.mark.parametrize(("nodes", "is_native"), [(2, True), (40, False)])
def test_an_expression_that_doubles_with_every_node_is_left_to_tinygrad(
    nodes: int, is_native: bool
) -> None:
    """Written out it would have 2^40 nodes."""
    weight = Tensor(np.random.default_rng(4).integers(0, 256, (N, 96), np.uint8)).realize()

    def multiply(x: Tensor) -> Tensor:
        value = weight
        for _ in range(nodes):
            value = (value & 254) | value.rshift(1)
        return x @ value.cast(dtypes.float32).transpose()

    multiply.inputs = {"x": ("float32", (3, 96))}  # type: ignore[attr-defined]
    traced = trace_function(multiply, "multiply").read_weights()
    schedule = compile_graph(check_graph(traced.graph), "CPU")
    assert ("native" in [one.kind for one in schedule.launches]) == is_native
