"""Steps that run together give the bytes that they give alone, and what may be shared is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.core import tuning
from splitup.core.errors import InvalidInput
from splitup.cpu import native_kernels
from splitup.graph.ir import Graph, encode_float
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder, make_running_sum

MOST = 8
pytestmark = pytest.mark.skipif(
    select_device().renderer not in ("X86", "OPENCL"),
    reason="other devices run one step at a time",
)


def find_shared(build: Callable[[Builder, int], int]) -> list[bool]:
    """Return which kernels of y = f(x), x float32 [T, 4], are shared."""
    b = Builder()
    graph = b.graph({"y": b.store("float32", build(b, b.rows("x", "float32", "T", MOST, 4)))})
    launches = compile_graph(check_graph(graph), select_device().device).launches
    return [launch.is_shared for launch in launches]


def scale(b: Builder, x: int) -> int:
    return b.add("MUL", "float32", x, b.weight("w", np.arange(4, dtype=np.float32)))


def add_row_numbers(b: Builder, x: int) -> int:
    numbers = b.add("CAST", "float32", b.add("IOTA", "int32", arg=MOST))
    numbers = b.add("SHRINK", "float32", numbers, arg=((0, "T"),))
    return b.add("ADD", "float32", x, b.add("RESHAPE", "float32", numbers, arg=("T", 1)))


def add_first_row(b: Builder, x: int) -> int:
    first = b.add("SHRINK", "float32", x, arg=((0, 1), (0, 4)))
    return b.add("ADD", "float32", x, first)


def add_column_sums(b: Builder, x: int) -> int:
    return b.add("ADD", "float32", x, b.add("REDUCE", "float32", x, arg=("ADD", 1)))


def add_a_weight_per_row(b: Builder, x: int) -> int:
    table = b.weight("w", np.ones((MOST, 4), np.float32))
    return b.add("ADD", "float32", x, b.add("SHRINK", "float32", table, arg=((0, "T"), (0, 4))))


def add_rows_backwards(b: Builder, x: int) -> int:
    numbers = b.add("IOTA", "int32", arg=MOST)
    numbers = b.add("SHRINK", "int32", numbers, arg=((0, "T"),))
    minus = b.add("MUL", "int32", numbers, b.const("int32", "-1"))
    index = b.add("ADD", "int32", minus, b.const("int32", "3"))
    return b.add("ADD", "float32", x, b.add("LOOKUP", "float32", x, index))


@pytest.mark.parametrize(
    "build",
    [add_row_numbers, add_first_row, add_column_sums, add_a_weight_per_row, add_rows_backwards],
)
def test_what_knows_of_other_rows_or_their_numbers_is_not_shared(
    build: Callable[[Builder, int], int],
) -> None:
    assert find_shared(scale) == [True]
    assert find_shared(build)[-1] is False


def load(graph: Graph) -> TaskProgram:
    return TaskProgram.from_graph(check_graph(graph), lambda name: memoryview(b""))


def draw(rows: int, seed: int) -> list[bytes]:
    return [np.random.default_rng(seed).random((rows, 4), np.float32).tobytes()]


def test_states_of_a_batch_are_their_own_in_any_order_and_between_single_steps() -> None:
    program = load(make_running_sum(MOST))
    assert program.width > 4
    count = 4
    alone, together = ([program.new_state() for _ in range(count)] for _ in range(2))
    order = np.random.default_rng(0)
    for step in range(8):
        rows = [1] * count if step % 3 == 0 else [3, 1, 2, 1]
        inputs = [draw(rows[k], 10 * step + k) for k in range(count)]
        expected = [program.run(alone[k], inputs[k]) for k in range(count)]
        chosen = [int(k) for k in order.permutation(count)]
        single = chosen.pop()
        given = program.run_together([(together[k], inputs[k]) for k in chosen])
        assert given == [expected[k] for k in chosen]
        assert program.run(together[single], inputs[single]) == expected[single]
        digests = [[program.compute_state_digest(s) for s in both] for both in (alone, together)]
        assert digests[0] == digests[1]


def make_product_with_state(n: int, k: int) -> Graph:
    """y = x x times the transpose of s, and s' = s + 1: x float32 [T, k], s float32 [n, k]."""
    b = Builder()
    x, s = b.rows("x", "float32", "T", MOST, k), b.state("s", "float32", n, k)
    x = b.store("float32", b.add("MUL", "float32", x, x))
    many = b.add("EXPAND", "float32", s, arg=("T",))
    many = b.add("PERMUTE", "float32", many, arg=(1, 0, 2))
    product = b.add("MUL", "float32", b.add("EXPAND", "float32", x, arg=(n,)), many)
    product = b.add("PERMUTE", "float32", product, arg=(2, 1, 0))
    y = b.store("float32", b.add("REDUCE", "float32", product, arg=("ADD", 1)))
    one = b.const("float32", encode_float(1.0))
    return b.graph({"y": y}, [b.store("float32", b.add("ADD", "float32", s, one))])


def make_vector_with_state(n: int, k: int) -> tuple[Graph, Builder]:
    """y = 2 x + w s, and s' = s + 1: x float32 [T, n], w float32 [n, k], s float32 [k]."""
    b = Builder()
    x, s = b.rows("x", "float32", "T", MOST, n), b.state("s", "float32", k)
    weights = np.random.default_rng(3).random((n, k), np.float32)
    many = b.add("EXPAND", "float32", s, arg=(n,))
    product = b.add("MUL", "float32", b.weight("w", weights), many)
    product = b.add("PERMUTE", "float32", product, arg=(1, 0))
    total = b.store("float32", b.add("REDUCE", "float32", product, arg=("ADD", 1)))
    total = b.add("EXPAND", "float32", total, arg=("T",))
    doubled = b.store("float32", b.add("ADD", "float32", x, x))  # which a batch shares
    y = b.store("float32", b.add("ADD", "float32", doubled, total))
    one = b.const("float32", encode_float(1.0))
    return b.graph({"y": y}, [b.store("float32", b.add("ADD", "float32", s, one))]), b


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_of_threads_lie_in_the_buffers_of_their_own_steps(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_kernels, "SEQUENCE_WORK", 0)
    graph, b = make_vector_with_state(512, 64)
    weights = {name: memoryview(value) for name, value in b.weight_bytes.items()}
    program = TaskProgram.from_graph(check_graph(graph), weights.__getitem__, threads=threads)
    one_thread = TaskProgram.from_graph(check_graph(graph), weights.__getitem__)
    together = [program.new_state() for _ in range(3)]
    alone = [one_thread.new_state() for _ in range(3)]
    for state, steps in ((0, 1), (1, 3)):  # each state has other numbers
        for _ in range(steps):
            inputs = [np.zeros((1, 512), np.float32).tobytes()]
            program.run(together[state], inputs)
            one_thread.run(alone[state], inputs)
    for rows in ((1, 1, 1), (3, 1, 4)):
        inputs = [[np.zeros((count, 512), np.float32).tobytes()] for count in rows]
        expected = [one_thread.run(s, data) for s, data in zip(alone, inputs, strict=True)]
        assert program.run_together(list(zip(together, inputs, strict=True))) == expected
    assert len({tuple(one) for one in expected}) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_products_with_states_work_on_views_of_rows(threads: int) -> None:
    n, k = 512, 512
    graph = make_product_with_state(n, k)
    device = select_device().device
    launches = compile_graph(check_graph(graph), device).launches
    kind = "native" if native_kernels.computes_for(device) else "executable"
    assert (kind, False) in [(launch.kind, launch.is_shared) for launch in launches]
    program = TaskProgram.from_graph(
        check_graph(graph), lambda name: memoryview(b""), threads=threads
    )
    alone, together = ([program.new_state() for _ in range(3)] for _ in range(2))
    random = np.random.default_rng(1)
    for rows in ((1, 1, 1), (3, 1, 4), (1, 1, 1)):
        inputs = [[random.random((count, k), np.float32).tobytes()] for count in rows]
        expected = [program.run(state, data) for state, data in zip(alone, inputs, strict=True)]
        assert program.run_together(list(zip(together, inputs, strict=True))) == expected


def test_a_batch_that_does_not_fit_or_has_a_bad_step_changes_no_state() -> None:
    program = load(make_running_sum(MOST))
    states = [program.new_state() for _ in range(3)]
    before = [program.compute_state_digest(state) for state in states]
    good = draw(3, 1)
    for steps, problem in (
        ([(state, good) for state in states], "cannot run together"),  # nine rows
        ([(states[0], good), (states[0], good)], "cannot run together"),
        ([(states[0], good), (states[1], [b"short"])], "5 bytes"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            program.run_together(steps)
        assert [program.compute_state_digest(state) for state in states] == before
    assert not program.fits([{"T": 1}] * (tuning.BATCH_RUNS + 1))


def test_a_task_whose_ports_have_no_rows_runs_alone() -> None:
    b = Builder()
    x = b.input("x", "float32", 4)
    program = load(b.graph({"y": b.store("float32", b.add("MUL", "float32", x, x))}))
    assert program.width == 1
