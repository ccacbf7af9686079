"""How the threads of a GPU share sums along rows; the kernels are compiled for a card, not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from splitup.backend.compiler.row_sums import divide_row
from splitup.graph.ir import Graph
from tests.backend.devices.test_cards import ROOT, has_nvrtc
from tests.graph.graphs import Builder

COMPILE = """
import json
from splitup.backend.devices import cuda
cuda.install()
from tinygrad.helpers import PARALLEL
PARALLEL.value = 0
from splitup.backend.compiler.schedule import compile_graph
from splitup.graph.rules import check_graph
from tests.backend.compiler.test_row_sums import make_product, make_products
found = []
for rows, length in (256, 512), (256, 32), (32, 512):
    [kernel] = compile_graph(check_graph(make_product(rows, length)), "NULL").executables
    found.append([kernel.name, kernel.global_size, kernel.local_size])
for length in (512, 256):
    made = compile_graph(check_graph(make_products(16, 128, length)[0]), "NULL")
    tiled = [one.tiled and made.executables[one.tiled] for one in made.launches]
    found.append([one and [one.global_size, one.local_size] for one in tiled])
print(json.dumps(found))
"""

RUN = """
import json
import numpy as np
from splitup.backend.compiler import row_sums
row_sums._RENDERERS |= {"Python"}
from splitup.backend.runtime import TaskProgram
from splitup.graph.rules import check_graph
from tests.backend.compiler.test_row_sums import make_products
graph, matrix = make_products(16, 32, 96)
program = TaskProgram.from_graph(check_graph(graph), lambda name: memoryview(matrix.tobytes()))
found = []
for tokens in (1, 11):
    x = np.random.default_rng(tokens).standard_normal((tokens, 96)).astype(np.float32)
    exact = x.astype(np.float64) @ matrix.T.astype(np.float64)
    for fewest in (2, 100):
        row_sums._FEWEST_TOKENS = fewest
        [out] = program.run(program.new_state(), [x.tobytes()])
        off = np.abs(np.frombuffer(out, np.float32).reshape(exact.shape) - exact).max()
        found.append([out.hex(), bool(off < 1e-4)])
print(json.dumps([found, [call._tiled is not None for call in program._calls]]))
"""


def make_product(rows: int, length: int) -> Graph:
    """Return a graph of one vector times a float16 matrix of so many rows."""
    b = Builder()
    x = b.input("x", "float32", length)
    w = b.weight("w", np.zeros((rows, length), np.float16))
    product = b.add("MUL", "float32", b.add("CAST", "float32", w), x)
    turned = b.add("PERMUTE", "float32", product, arg=(1, 0))
    return b.graph({"y": b.store("float32", b.add("REDUCE", "float32", turned, arg=("ADD", 1)))})


def make_products(tokens: int, rows: int, length: int) -> tuple[Graph, np.ndarray]:
    """Return a graph of up to so many vectors times a float16 matrix, and the matrix."""
    matrix = np.random.default_rng(0).standard_normal((rows, length)).astype(np.float16)
    b = Builder()
    x = b.rows("x", "float32", "T", tokens, length)
    x = b.add("RESHAPE", "float32", x, arg=("T", 1, length))
    w = b.add("CAST", "float32", b.weight("w", matrix))
    turned = b.add("PERMUTE", "float32", b.add("MUL", "float32", x, w), arg=(2, 0, 1))
    total = b.add("REDUCE", "float32", turned, arg=("ADD", 1))
    return b.graph({"y": b.store("float32", total)}), matrix


@pytest.mark.parametrize(
    ("sizes", "width", "groups"),
    [
        ([4096], 8, [(0, 32)]),
        ([576], 4, [(0, 16)]),  # 8 numbers at a time would leave 8 threads
        ([288], 2, [(0, 16)]),
        ([128, 2, 16], 8, [(2, 2), (1, 2), (0, 8)]),  # Q4_0: blocks, halves, bytes
        ([16, 2, 2, 2, 32], 8, [(4, 4), (3, 2), (2, 2), (1, 2)]),  # Q4_K
        ([97], 1, []),
    ],
)
def test_as_many_threads_as_fit_share_a_row_before_each_loads_many_numbers(
    sizes: list[int], width: int, groups: list[tuple[int, int]]
) -> None:
    assert divide_row(sizes) == (width, groups)


@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: the extra [cuda]")
def test_kernels_for_a_card_read_rows_side_by_side_and_short_ones_as_tinygrad_does() -> None:
    """A step of several tokens has a kernel of its own for weights that they share."""
    done = run(COMPILE, "NULL:CUDA:sm_90", NULL_ALLOW_COPYOUT="1")
    shared, short, few, *several = json.loads(done)
    assert shared[1:] == [[32, 1, 1], [32, 4, 1]]  # four groups of 32 threads, two rows each
    assert few[1:] == [[32, 1, 1], [32, 1, 1]]  # too few rows to give groups several
    assert short[2] == [16, 1, 1]
    tiles = ["SHR", ["ADD", "T", 7], 3]
    # eight tokens and four times four rows; a row of 256 numbers has no accumulator
    assert several == [[[[tiles, 8, 1], [32, 4, 1]]], [None]]


@pytest.mark.long  # in small: the shapes of both kernels below
def test_tokens_at_once_give_the_bytes_that_they_give_one_by_one() -> None:
    [one, alone, many, each], tiled = json.loads(run(RUN, "PYTHON"))
    assert one == alone and many == each and one[1] and many[1]
    assert tiled == [True]


def run(code: str, device: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEV": device, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
