"""No legal graph reads or writes outside its buffers, whatever its inputs are."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable

import numpy as np
import pytest

from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.core.tensors import array_to_bytes
from splitup.graph.ir import Graph, encode_float
from splitup.graph.rules import check_graph
from tests.fuzz.guard_pages import try_case
from tests.fuzz.guarded_memory import keep_freed_buffers
from tests.fuzz.legal_graphs import Case
from tests.graph.graphs import Builder, compute_graph
from tests.parameters import some_of

Compute = Callable[[Builder, int], int]
ROWS, WIDTH = 8, 16


def mask(b: Builder, x: int, bits: str) -> int:
    return b.add("AND", "int32", x, b.const("int32", bits))


def convert(b: Builder, x: int) -> int:
    return b.add("CAST", "int32", x)


def double(b: Builder, x: int) -> int:
    masked = mask(b, x, str(2**31 - 1))
    return b.add("ADD", "int32", masked, masked)


def multiply(b: Builder, x: int) -> int:
    return b.add("MUL", "int32", mask(b, x, "65535"), b.const("int32", "65537"))


def shift(b: Builder, x: int) -> int:
    masked = mask(b, x, str(2**31 - 1))
    return b.add("SHL", "int32", masked, b.const("int32", "1"))


def add_up(b: Builder, x: int) -> int:
    """Add two equal numbers by a reduction."""
    wide = b.add("EXPAND", "int32", mask(b, x, str(2**31 - 1)), arg=(2,))
    return b.add("REDUCE", "int32", wide, arg=("ADD", 1))


# what makes an int32 of an input, and inputs for which it is a little below zero
WRAPPING: list[tuple[Compute, str, list[int]]] = [
    (convert, "uint32", [2**32 - 1, 2**32 - 4, 3]),
    (convert, "int64", [2**32 - 1, 2**40 - 4, -1]),
    (convert, "uint64", [2**64 - 1, 2**63 - 4, 2**32 - 2]),
    (double, "int32", [2**31 - 1, 2**31 - 2, 1]),
    (multiply, "int32", [65_535, -1, 2]),
    (shift, "int32", [2**31 - 1, 2**31 - 2, 2]),
    (add_up, "int32", [2**31 - 1, 2**31 - 2, 3]),
]


@pytest.mark.parametrize(("compute", "dtype", "numbers"), WRAPPING)
def test_s15_an_index_that_wraps_finds_no_row(
    compute: Compute, dtype: str, numbers: list[int]
) -> None:
    """The table is the upper half of a larger one: before its first row are other rows."""
    b = Builder()
    index = compute(b, b.input("x", dtype, 3))
    whole = b.input("t", "float32", 2 * ROWS, WIDTH)
    table = b.add("SHRINK", "float32", whole, arg=((ROWS, ROWS), (0, WIDTH)))
    y = b.store("float32", b.add("LOOKUP", "float32", table, index))
    rows = np.arange(2 * ROWS * WIDTH, dtype=np.float32).reshape(2 * ROWS, WIDTH)
    check_against_reference(b.graph({"y": y}), [np.array(numbers, dtype), rows])


# the others wrap in the same places of the compiler, and are looked up above
@pytest.mark.parametrize(("compute", "dtype", "numbers"), [WRAPPING[2], WRAPPING[4]])
def test_s15_comparisons_see_the_number_that_wrapped(
    compute: Compute, dtype: str, numbers: list[int]
) -> None:
    b = Builder()
    number = compute(b, b.input("x", dtype, 3))
    more = b.add("ADD", "int32", number, b.const("int32", str(2**31 - 1)))
    found = [
        b.add("CMPLT", "bool", item, b.const("int32", bound))
        for item in (number, more)
        for bound in ("0", "100", "-5", str(-(2**31) + 1))
    ]
    outputs = {
        "below": b.store("bool", b.add("STACK", "bool", *found)),
        "largest": b.store("int32", b.add("MAX", "int32", number, b.const("int32", "0"))),
    }
    check_against_reference(b.graph(outputs), [np.array(numbers, dtype)])


def check_against_reference(graph: Graph, inputs: list[np.ndarray]) -> None:
    program = TaskProgram(graph.to_bytes(), None)
    data = [array_to_bytes(spec, x) for spec, x in zip(program.inputs, inputs, strict=True)]
    given = program.run(program.new_state(), data)
    wanted = compute_graph(graph, {("INPUT", place): x for place, x in enumerate(inputs)})
    assert given == [wanted[output.node].tobytes() for output in graph.outputs]


@pytest.mark.parametrize("divisor", [2**16, 2**30])
def test_s15_divisors_that_multiply_to_more_than_an_integer_are_not_merged(divisor: int) -> None:
    b = Builder()
    x = b.input("x", "int32", 4)
    once = b.add("FLOORDIV", "int32", x, b.const("int32", str(divisor)))
    twice = b.add("FLOORDIV", "int32", once, b.const("int32", str(divisor)))
    check_against_reference(
        b.graph({"y": b.store("int32", twice)}),
        [np.array([0, -1, 2**31 - 1, -(2**31)], np.int32)],
    )


def test_s15_a_task_cannot_read_another_tasks_input() -> None:
    """The address is one that the worker has mapped, 2^32 bytes away as the index wraps."""
    victim = Builder()
    x = victim.input("prompt", "float32", 64)
    victim.store("float32", victim.add("ADD", "float32", x, x))
    other = TaskProgram(victim.graph({"y": len(victim.nodes) - 1}).to_bytes(), None)
    secret = b"the words of another user, which are nobody's business ".ljust(256, b"!")
    other.run(other.new_state(), [secret])
    b = Builder()
    index = convert(b, b.input("x", "uint64", 1))
    table = b.weight("t", np.ones((64, WIDTH), np.float32))
    y = b.store("float32", b.add("LOOKUP", "float32", table, index))
    attack = TaskProgram(b.graph({"y": y}).to_bytes(), b.safetensors())
    start, end = (
        program._buffers[role][0].get_buf("CPU").va_addr
        for program, role in ((attack, "weight"), (other, "input"))
    )
    row = (end - start) // (4 * WIDTH)
    row = row if row < 0 else row - 2**28  # negative, and 16 times it wraps to 16 row
    stolen = b""
    for number in range(row, row + 4):
        data = np.array([2**32 + number], np.uint64).tobytes()
        stolen += attack.run(attack.new_state(), [data])[0]
    assert stolen == bytes(256)


def run_apart(graph: Graph) -> int:
    """Try a graph on hostile inputs in guarded memory, in a process; return its exit code."""
    case = Case(check_graph(graph), {}, "")

    def run() -> None:
        select_device(0)
        keep_freed_buffers()
        try_case(case, random.Random(1))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("dtype", some_of(["int32", "float32", "int64"], "float32"))
@pytest.mark.parametrize("is_chosen", [False, True])
def test_s16_a_padded_lookup_does_not_read_numbers_in_the_padding(
    dtype: str, is_chosen: bool
) -> None:
    """Whether a PAD of what was looked up says so, or a comparison of places does."""
    b = Builder()
    index = b.input("i", dtype, 4)
    if dtype != "int32":
        index = b.add("CAST", "int32", index)
    table = b.input("t", "float32", 2, 9)
    if is_chosen:
        index = b.add("PAD", "int32", index, arg=((2, 8),))
    y = b.add("LOOKUP", "float32", table, index)
    if is_chosen:
        place = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=8), arg=(8, 1))
        zero = b.const("float32", encode_float(0.0))
        for end, order in ((2, (zero, y)), (6, (y, zero))):
            is_before = b.add("CMPLT", "bool", place, b.const("int32", str(end)))
            y = b.add("WHERE", "float32", is_before, *(y if item == y else item for item in order))
    else:
        y = b.add("PAD", "float32", y, arg=((2, 8), (0, 9)))
    assert run_apart(b.graph({"y": b.store("float32", y)})) == 0


@pytest.mark.parametrize("form", ["product", "expand", "cut", "behind"])
@pytest.mark.parametrize("symbol", ["T", "R"])
def test_s17_a_value_in_memory_has_one_symbol_in_front(form: str, symbol: str) -> None:
    b = Builder()
    x, z = b.rows("x", "float32", "T", 4), b.rows("z", "float32", "R", 4)
    right = x if symbol == "T" else z
    row = b.add("RESHAPE", "float32", right, arg=(1, symbol))
    dims: tuple[int | str, ...] = ("T", symbol)
    if form == "product":
        value = b.add("MUL", "float32", b.add("RESHAPE", "float32", x, arg=("T", 1)), row)
    elif form == "expand":
        value = b.add("EXPAND", "float32", right, arg=("T",))
    elif form == "cut":
        table = b.input("t", "float32", 4, 4)
        value = b.add("SHRINK", "float32", table, arg=((0, "T"), (0, symbol)))
    else:
        value, dims = row, (1, symbol)
    stored = b.store("float32", value)
    axes = tuple(reversed(range(len(dims))))
    total = b.add(
        "REDUCE", "float32", b.add("PERMUTE", "float32", stored, arg=axes), arg=("ADD", 1)
    )
    graph = b.graph({"y": b.store("float32", total), "z": b.store("float32", z)})
    shape = ", ".join(map(str, dims))
    with pytest.raises(
        InvalidModel, match=rf"node {stored} \(CONTIGUOUS\).* \[{shape}\] to memory"
    ):
        check_graph(graph)


def test_a_buffer_that_turns_out_not_to_be_needed_moves_no_argument() -> None:
    """Found by the fuzzer: the number of rows was taken for a buffer's address."""
    b = Builder()
    pieces = [b.rows(f"x{i}", "float32", "T", 3, width) for i, width in enumerate((3, 1, 3))]
    place = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=7), arg=(1, 7))
    padded = [
        b.add("PAD", "float32", piece, arg=((0, "T"), (start, 7)))
        for piece, start in zip(pieces, (0, 3, 4), strict=True)
    ]
    is_left = b.add("CMPLT", "bool", place, b.const("int32", "4"))
    right = b.add("WHERE", "float32", is_left, padded[1], padded[2])
    y = b.add("WHERE", "float32", is_left, padded[0], right)  # never reads the second piece
    assert run_apart(b.graph({"y": b.store("float32", y)})) == 0


@pytest.mark.parametrize(("source", "target"), [("int32", "int16"), ("int64", "int32")])
def test_a_converted_number_that_was_put_on_the_stack_is_compared_as_what_it_became(
    source: str, target: str
) -> None:
    """Found by the fuzzer: the constant of 16 bits stood in an instruction of 32 bits."""
    b = Builder()
    x, z = b.input("x", source, 7), b.input("z", target, 7)
    y = b.add("CAST", target, x)
    is_less = b.add("CMPLT", "bool", y, b.const(target, "4"))
    pair = [b.add(op, target, y, z) for op in ("MAX", "XOR")]
    value = b.add("WHERE", target, is_less, *pair)
    is_less = b.add("CMPLT", "bool", y, b.const(target, "100"))
    value = b.add("WHERE", target, is_less, value, y)
    assert run_apart(b.graph({"y": b.store(target, value)})) == 0
