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
import json, sys
from splitup.backend.devices import cuda
cuda.install()
from splitup.backend.compiler.schedule import compile_graph
from splitup.graph.rules import check_graph
from tests.backend.compiler.test_row_sums import make_product
found = []
for rows, length in json.loads(sys.argv[1]):
    [kernel] = compile_graph(check_graph(make_product(rows, length)), "NULL").executables
    found.append([kernel.name, kernel.global_size, kernel.local_size])
print(json.dumps(found))
"""


def make_product(rows: int, length: int) -> Graph:
    """Return a graph of one vector times a float16 matrix of so many rows."""
    b = Builder()
    x = b.input("x", "float32", length)
    w = b.weight("w", np.zeros((rows, length), np.float16))
    product = b.add("MUL", "float32", b.add("CAST", "float32", w), x)
    turned = b.add("PERMUTE", "float32", product, arg=(1, 0))
    return b.graph({"y": b.store("float32", b.add("REDUCE", "float32", turned, arg=("ADD", 1)))})


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
    shapes = [(256, 512), (256, 32), (32, 512)]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(shapes)],
        env={**os.environ, "DEV": "NULL:CUDA:sm_90", "NULL_ALLOW_COPYOUT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shared, short, few = json.loads(done.stdout)
    assert shared[1:] == [[32, 1, 1], [32, 4, 1]]  # four groups of 32 threads, two rows each
    assert few[1:] == [[32, 1, 1], [32, 1, 1]]  # too few rows to give groups several
    assert short[2] == [16, 1, 1]
