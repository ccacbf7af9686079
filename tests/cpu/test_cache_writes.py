"""A KV cache of which only rows that differ are written holds what tinygrad's kernels give it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.compiler.schedule_bytes import decode_schedule, encode_schedule
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import State, TaskProgram
from splitup.cpu.cache_writes import find_cache_writes
from splitup.cpu.native_kernels import is_supported
from splitup.graph.ir import Graph, encode_float
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder

WIDTH, MOST, STEPS = 8, 3, 60
_EXTREMES = (-(2**31), -1, 0, 0, 0, 1, 2, 3, 5, 2**31 - 1)
_BITS = {  # NaN, -0, … (no signalling one of two bytes: casts give none, kernels make it quiet)
    "float32": np.array([0x7FC00001, 0xFF800001, 0x80000000, 1, 0xFF800000], np.uint32),
    "float16": np.array([0x7E01, 0xFE01, 0x8000, 1, 0xFC00], np.uint16),
    "int8": np.array([0x80, 0x7F, 0xFF], np.uint8),
}
pytestmark = pytest.mark.skipif(not is_supported(), reason="needs x86-64 with AVX2, FMA and F16C")


def bound(b: Builder, x: int, largest: int, factor: int = 1) -> int:
    """Return min(max(x, 0), largest) as tinygrad traces it.

    With a factor, the constant in it is the product of two.
    """
    inverse = b.const("int32", "-1")
    x = b.add("MAX", "int32", x, b.const("int32", "0"))
    limit = b.const("int32", str(~largest))
    if factor != 1:
        limit = b.add("MUL", "int32", b.const("int32", str(factor)), b.const("int32", str(-factor)))
    x = b.add("MAX", "int32", b.add("XOR", "int32", x, inverse), limit)
    return b.add("XOR", "int32", x, inverse)


def make_cache(
    context: int,
    most: int = MOST,
    width: int = WIDTH,
    largest: int = -1,
    factor: int = 1,
    dtype: str = "float32",
) -> Graph:
    """y = 2 fresh, and the cache's update: fresh [T, 2, width], layout int32 [T, 2 + most].

    The layout's columns: anything, start, shifts, which are at most ``largest``, or ``most``.
    """
    b = Builder()
    if most > 1:
        fresh = b.rows("fresh", dtype, "T", most, 2, width)
        layout = b.rows("layout", "int32", "T", most, 2 + most)
    else:
        fresh = b.input("fresh", dtype, 1, 2, width)
        layout = b.input("layout", "int32", 1, 2 + most)
    old, place = b.state("kv", dtype, context, 2, width), b.add("IOTA", "int32", arg=context)
    minus = b.const("int32", "-1")

    def take(first: int, count: int) -> int:
        piece = b.add("SHRINK", "int32", layout, arg=((0, 1), (first, count)))
        return b.add("RESHAPE", "int32", piece, arg=(count,))

    def subtract(x: int, y: int) -> int:
        return b.add("ADD", "int32", x, b.add("MUL", "int32", y, minus))

    start = bound(b, take(1, 1), context)
    first = b.add("ADD", "int32", start, b.const("int32", str(-most)))
    shift = b.add("LOOKUP", "int32", take(2, most), subtract(place, first))
    shift = bound(b, shift, most if largest < 0 else largest, factor)
    kept = b.add("LOOKUP", dtype, old, b.add("ADD", "int32", place, shift))
    new = b.add("LOOKUP", dtype, fresh, subtract(place, start))
    is_kept = b.add("CMPLT", "bool", place, start)
    is_kept = b.add("RESHAPE", "bool", is_kept, arg=(context, 1, 1))
    cache = b.store(dtype, b.add("WHERE", dtype, is_kept, kept, new))
    double = b.add(
        "MUL", dtype, fresh, b.const(dtype, "2" if dtype == "int8" else encode_float(2.0))
    )
    return b.graph({"y": b.store(dtype, double)}, [cache])


def load(graph: Graph, *, takes: bool) -> TaskProgram:
    return TaskProgram.from_graph(
        check_graph(graph), lambda name: memoryview(b""), uses_native_code=takes
    )


def read_state(program: TaskProgram, state: State) -> bytes:
    (buffer,) = state._buffers[state._parity]
    return bytes(buffer.as_memoryview())


def draw_step(
    random: np.random.Generator, program: TaskProgram, end: int
) -> tuple[list[bytes], int]:
    """Return the inputs of a step and how many rows count afterwards: sensible, or anything."""
    fresh, layout = program.inputs
    context = program.states[0].shape[0]
    most = fresh.shape[0]
    rows = int(random.integers(1, most + 1))
    values = random.standard_normal((rows, *fresh.shape[1:])).astype(fresh.dtype)
    bits = random.choice(_BITS[fresh.dtype])
    values.view(bits.dtype)[random.random(values.shape) < 0.2] = bits
    table = random.choice(_EXTREMES, (rows, layout.shape[1])).astype(np.int32)
    if random.random() < 0.7:
        table[0, 1] = min(context, max(0, end - int(random.integers(0, most + 1))))
        if random.random() < 0.5:
            table[0, 2:] = 0
    start = min(context, max(0, int(table[0, 1])))
    return [values.tobytes(), table.tobytes()], min(context, start + rows)


@pytest.mark.parametrize(
    ("context", "most", "width", "largest", "dtype"),
    [
        (9, 3, 8, -1, "float16"),
        (16, 1, 8, -1, "float32"),
        (5, 4, 36, 2, "float32"),
        (9, 3, 16, -1, "int8"),
    ],
)
def test_any_steps_give_the_states_of_whole_writes(
    context: int, most: int, width: int, largest: int, dtype: str
) -> None:
    graph = make_cache(context, most, width, largest, dtype=dtype)
    assert is_found(graph)
    check_steps(graph)


@pytest.mark.parametrize("factor", [2**20, 2**16 + 1])
def test_s15_a_bound_that_wraps_is_that_of_kernels(factor: int) -> None:
    graph = make_cache(9, factor=factor)
    assert bool(find_cache_writes(check_graph(graph))) == (factor == 2**16 + 1)  # 0 - 1, 131072
    check_steps(graph)


def check_steps(graph: Graph) -> None:
    context = graph.states[0].shape[0]
    ours, theirs = load(graph, takes=True), load(graph, takes=False)
    assert ours.allocated_bytes == theirs.allocated_bytes
    for seed in range(2):
        random, end = np.random.default_rng(seed), 0
        states = ours.new_state(), theirs.new_state()
        for _ in range(STEPS):
            inputs, end = draw_step(random, ours, end)
            given, wanted = ours.run(states[0], inputs), theirs.run(states[1], inputs)
            assert given == wanted
            if random.random() < 0.2:  # what a step leaves that fails after its kernels ran
                for state in states:
                    state._parity = 1 - state._parity
                end = int(random.integers(0, context))
            assert read_state(ours, states[0]) == read_state(theirs, states[1])


@pytest.mark.skipif(select_device().renderer != "X86", reason="others run one step at a time")
def test_states_of_a_batch_are_those_of_single_steps() -> None:
    program = load(make_cache(12, 6), takes=True)
    assert program.width > 3
    alone, together = ([program.new_state() for _ in range(3)] for _ in range(2))
    random, ends = np.random.default_rng(0), [0, 0, 0]
    for _ in range(STEPS):
        steps = []
        for k in range(3):
            inputs, ends[k] = draw_step(random, program, ends[k])
            steps.append(inputs)
        if not program.fits([program.check(alone[0], inputs) for inputs in steps]):
            continue
        wanted = [program.run(state, inputs) for state, inputs in zip(alone, steps, strict=True)]
        assert program.run_together(list(zip(together, steps, strict=True))) == wanted
        for one, other in zip(alone, together, strict=True):
            assert read_state(program, one) == read_state(program, other)


def test_a_state_that_was_taken_back_is_like_a_new_one() -> None:
    program = load(make_cache(9), takes=True)
    for seed in range(8):
        state, fresh = program.new_state(), State(program, program._allocate_states())
        random, end = np.random.default_rng(seed), 0
        for _ in range(seed + 5):
            inputs, end = draw_step(random, program, end)
            assert program.run(state, inputs) == program.run(fresh, inputs)
            assert read_state(program, state) == read_state(program, fresh)
            if random.random() < 0.2:  # as a step leaves it that fails
                state._parity, fresh._parity = 1 - state._parity, 1 - fresh._parity
        program.take_back(state)
        program.take_back(state)
        assert program.spare_bytes == program.state_bytes
        assert not any(b"".join(bytes(b.as_memoryview()) for pair in state._buffers for b in pair))
    assert program.new_state() is state
    program.take_back(load(make_cache(9), takes=True).new_state())
    assert program.spare_bytes == 0
    program.take_back(state)
    program.free_spare()
    assert program.new_state() is not state


def test_states_that_are_written_as_a_whole_are_not_taken_back() -> None:
    program = load(make_cache(9), takes=False)
    program.take_back(program.new_state())
    assert program.spare_bytes == 0


def test_rows_that_are_equal_in_both_copies_are_not_written() -> None:
    program = load(make_cache(16), takes=True)
    state = program.new_state()

    def run(start: int, rows: int) -> None:
        layout = np.zeros((rows, 2 + MOST), np.int32)
        layout[:, 1] = start
        fresh = np.full((rows, 2, WIDTH), start + 1, np.float32)
        program.run(state, [fresh.tobytes(), layout.tobytes()])

    for start in (0, 3, 6, 9):
        run(start, 3)
    marks = [buffer.as_memoryview(force_zero_copy=True).cast("B") for (buffer,) in state._buffers]
    row_bytes = 2 * WIDTH * 4
    for mark in marks:
        mark[0], mark[15 * row_bytes] = 1, 1  # in the first row and behind the last one
    run(12, 1)
    run(13, 1)
    assert [(mark[0], mark[15 * row_bytes]) for mark in marks] == [(1, 1), (1, 1)]
    last = np.frombuffer(marks[state._parity], np.float32)[13 * 2 * WIDTH]
    assert last == 14.0


def test_a_schedule_with_writes_survives_its_encoding() -> None:
    schedule = compile_graph(check_graph(make_cache(16)), "CPU")
    assert [launch.kind for launch in schedule.launches].count("state update") == 1
    assert len(schedule.launches) == 2  # the table of shifts is not computed
    data = encode_schedule(schedule)
    assert data is not None and decode_schedule(data) == schedule


def is_found(graph: Graph) -> bool:
    return bool(find_cache_writes(check_graph(graph)))


def test_what_is_not_quite_a_cache_write_stays_with_tinygrad() -> None:
    graph = make_cache(16)
    assert is_found(graph)
    assert not is_found(make_cache(16, width=3))  # no whole vectors
    refused = 0
    for position, node in enumerate(graph.nodes):
        changed = {
            "CONST": {"-4": "-5", "-1": "1", "0": "1", "-17": "-16", "-3": "-4"}.get(str(node.arg)),
            "SHRINK": ((0, 1), (0, node.arg[1][1])) if node.op == "SHRINK" else None,  # type: ignore[index]
        }.get(node.op)
        if changed is None or node.dtype != "int32":
            continue
        nodes = list(graph.nodes)
        nodes[position] = replace(node, arg=changed)
        other = replace(graph, nodes=tuple(nodes))
        if is_found(other):  # other columns, another bound: taken over as what it is
            (sources,) = find_cache_writes(check_graph(other)).values()
            (original,) = find_cache_writes(check_graph(graph)).values()
            assert sources.kernel != original.kernel
            check_some_steps(other)
        else:
            refused += 1
    assert refused >= 5


def check_some_steps(graph: Graph) -> None:
    ours, theirs = load(graph, takes=True), load(graph, takes=False)
    states = ours.new_state(), theirs.new_state()
    random, end = np.random.default_rng(1), 0
    for _ in range(10):
        inputs, end = draw_step(random, ours, end)
        ours.run(states[0], inputs)
        theirs.run(states[1], inputs)
        assert read_state(ours, states[0]) == read_state(theirs, states[1])
