from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.cpu.native_kernels import decode_kernel, encode_kernel, is_supported
from splitup.cpu.row_copies import RowCopy
from splitup.graph.ir import Graph
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs x86-64 with AVX2, FMA and F16C")
ROWS: Final = 7
HOSTILE: Final = np.array([-1, 2**31 - 1, -(2**31), 0, 4, 11, 12], np.int32)


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    select_device()


def find_copies(graph: Graph) -> list[RowCopy]:
    schedule = compile_graph(check_graph(graph), "CPU")
    natives = [schedule.natives[one.index] for one in schedule.launches if one.kind == "native"]
    return [kernel for kernel in natives if isinstance(kernel, RowCopy)]


def run(graph: Graph, *inputs: np.ndarray, native: bool = True) -> bytes:
    program = TaskProgram.from_graph(
        check_graph(graph), lambda name: memoryview(b""), uses_native_code=native
    )
    return bytes(program.run(program.new_state(), [array.tobytes() for array in inputs])[0])


def look_up(table: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return rows of a table, zeros for numbers that it has not."""
    known = (numbers >= 0) & (numbers < len(table))
    return np.where(known[:, None], table[np.where(known, numbers, 0)], 0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [16, 48, 64])
def test_rows_that_numbers_name_are_copied(dtype: str, width: int) -> None:
    b = Builder()
    numbers = b.rows("numbers", "int32", "T", ROWS)
    table = b.input("table", dtype, 12, width)
    graph = b.graph({"y": b.store(dtype, b.add("LOOKUP", dtype, table, numbers))})
    (kernel,) = find_copies(graph)
    assert decode_kernel(encode_kernel(kernel)) == kernel
    values = np.random.default_rng(0).standard_normal((12, width)).astype(dtype)
    for count in (ROWS, 1, 3):
        given = run(graph, HOSTILE[:count], values)
        assert given == look_up(values, HOSTILE[:count]).astype(dtype).tobytes()
        assert given == run(graph, HOSTILE[:count], values, native=False)


def test_a_sign_chooses_one_of_two_tables() -> None:
    """As in a ring: a row is the old one, or one of the step, whose number is no sign."""
    places, width, b = 12, 32, Builder()
    fresh = b.rows("fresh", "float16", "T", ROWS, width)
    old = b.input("old", "float16", places, width)
    signs, moved = b.input("signs", "int32", places), b.input("moved", "int32", places)
    kept = b.add("LOOKUP", "float16", old, moved)
    new = b.add("LOOKUP", "float16", fresh, signs)
    is_kept = b.add("CMPLT", "bool", signs, b.const("int32", "0"))
    is_kept = b.add("RESHAPE", "bool", is_kept, arg=(places, 1))
    graph = b.graph({"y": b.store("float16", b.add("WHERE", "float16", is_kept, kept, new))})
    assert [kernel.sizes for kernel in find_copies(graph)] == [(places, places, "T")]
    random = np.random.default_rng(1)
    table = random.standard_normal((places, width)).astype(np.float16)
    for count in (1, 4, ROWS):
        rows = random.standard_normal((count, width)).astype(np.float16)
        chosen = random.integers(-3, count + 3, places).astype(np.int32)
        others = random.integers(-2, places + 2, places).astype(np.int32)
        wanted = np.where(chosen[:, None] < 0, look_up(table, others), look_up(rows, chosen))
        given = run(graph, rows, table, chosen, others)
        assert given == wanted.astype(np.float16).tobytes()
        assert given == run(graph, rows, table, chosen, others, native=False)


def test_rows_that_are_no_whole_vectors_stay_with_tinygrad() -> None:
    b = Builder()
    numbers, table = b.rows("numbers", "int32", "T", ROWS), b.input("table", "float32", 12, 6)
    graph = b.graph({"y": b.store("float32", b.add("LOOKUP", "float32", table, numbers))})
    assert not find_copies(graph)
