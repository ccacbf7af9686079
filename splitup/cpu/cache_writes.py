"""Update a KV cache by writing only the rows that can differ.

In the graph, a step selects every row of the new cache: an old row, a new one, or zeros
(``docs/adr/0006-one-step-function.md``). tinygrad's kernel for that reads and writes the whole
context. But a node holds each state twice, and the copy that a step writes was the old copy of the
step before, so nearly all its rows are right already. The update is recognised by its graph, as the
front end for decoders writes it. Native code then writes the rows in which the two copies differ
and those that this step changes: new rows, rows that move down from a later position, and rows
behind the new end. It selects and does not compute, so the bytes are those that kernels give.

``Copies`` holds the ranges of rows that this needs. It stays right after a step that failed, since
the range in which two copies differ does not depend on which of them is the old one.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from splitup.core.tensors import ITEM_BYTES
from splitup.cpu.assembler import (
    CALLEE_SAVED,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    RAX,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    Assembler,
    Mem,
)
from splitup.cpu.loop_indices import NoMatch, refuse_if
from splitup.cpu.machine_code import BoundCode, load_code
from splitup.graph.ir import Node
from splitup.graph.memory import get_stride
from splitup.graph.rules import CheckedGraph

VECTOR_BYTES: Final = 32
UNROLLED: Final = 8  # vectors at most in one turn of a loop
INT_BYTES: Final = 4
ARGUMENTS: Final = (  # 64 bits each
    *("new", "old", "fresh", "layout", "differing", "end of old", "end of new"),
    *("address of rows", "zero", "context", "most"),
)
_OFFSETS: Final = {name: 8 * place for place, name in enumerate(ARGUMENTS)}
_NO_ROWS: Final = (2**31, 0)  # below any first row, above any last one


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """The update of a state: old rows below a start, new rows from there on, then zeros.

    The layout's first row holds the start, and for each of the ``chunk`` rows below the start its
    shift: how many rows later it is in the old state.
    """

    context: int  # rows of the state
    row_bytes: int
    fresh_bytes: int  # distance of the new rows
    symbol: str  # the number of new rows; "" if it is fixed
    rows: int  # the number of new rows, or its bound
    start: int  # offset of the start in the layout, in bytes
    shifts: int  # offset of the shifts in the layout, in bytes
    chunk: int
    most: int  # the largest shift


class StateWrite(NamedTuple):
    """Native code that computes a state's update, and what it reads besides the old state."""

    kernel: CacheWrite
    fresh: int  # the node of the new rows, an input or a value in memory
    layout: int  # the number of the input


# ---- finding -------------------------------------------------------------------------------------


def find_cache_writes(graph: CheckedGraph) -> dict[int, StateWrite]:
    """Return the updates that only select rows, by state."""
    found = {}
    for update in graph.updates:
        try:
            found[update.state] = _Reader(graph).read(update.state, update.node)
        except NoMatch:
            continue
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    graph: CheckedGraph

    def read(self, state: int, root: int) -> StateWrite:
        spec = self.graph.states[state]
        choice = self.node(self.node(root, "CONTIGUOUS").srcs[0], "WHERE")
        is_kept, kept, new = choice.srcs
        if self.node(is_kept).op == "RESHAPE":
            (is_kept,) = self.node(is_kept).srcs
        place, start = self.node(is_kept, "CMPLT").srcs
        context, row = spec.shape[0], math.prod(spec.shape[1:]) * ITEM_BYTES[spec.dtype]
        self.expect(self.node(place, "IOTA").arg == context and row % VECTOR_BYTES == 0)
        self.expect(
            self.graph.values[choice.srcs[0]].dims == (context, *(1,) * (len(spec.shape) - 1))
        )
        read, largest = self.read_bounded(start)
        layout, start_at, count = self.read_columns(read)
        self.expect(largest == context and count == 1)

        table, index = self.node(kept, "LOOKUP").srcs
        self.expect(self.node(table, "STATE").arg == state)
        shift, most = self.read_bounded(self.read_sum(index, place))
        columns, last = self.node(shift, "LOOKUP").srcs
        other, shifts_at, chunk = self.read_columns(columns)
        first = self.node(self.read_negative(self.read_sum(last, place)), "ADD").srcs
        self.expect(other == layout and first[0] == start)
        self.expect(self.read_const(first[1]) == -chunk)

        fresh, index = self.node(new, "LOOKUP").srcs
        self.expect(self.read_negative(self.read_sum(index, place)) == start)
        self.expect(self.node(fresh).op in ("INPUT", "CONTIGUOUS"))
        rows, *rest = self.graph.values[fresh].dims
        length = math.prod(spec.shape[1:])
        self.expect(tuple(rest) == spec.shape[1:])
        stride = get_stride(length) if isinstance(rows, str) else length
        write = CacheWrite(
            context=context,
            row_bytes=row,
            fresh_bytes=stride * ITEM_BYTES[spec.dtype],
            symbol=rows if isinstance(rows, str) else "",
            rows=self.graph.values[fresh].shape[0],
            start=start_at * INT_BYTES,
            shifts=shifts_at * INT_BYTES,
            chunk=chunk,
            most=most,
        )
        self.expect(max(write.fresh_bytes, row) * context < 2**31)
        return StateWrite(write, fresh, layout)

    def node(self, index: int, op: str = "") -> Node:
        node = self.graph.nodes[index]
        self.expect(op in ("", node.op))
        return node

    @staticmethod
    def expect(is_so: bool) -> None:
        refuse_if(not is_so)

    def read_const(self, index: int, depth: int = 3) -> int:
        """Return the value of an int32 that the graph computes from constants; a product wraps."""
        node = self.node(index)
        self.expect(node.dtype == "int32" and node.op in ("CONST", "XOR", "MUL") and depth > 0)
        if node.op == "CONST":
            return int(str(node.arg))
        one, two = (self.read_const(src, depth - 1) for src in node.srcs)
        return one ^ two if node.op == "XOR" else ctypes.c_int32(one * two).value

    def read_bounded(self, index: int) -> tuple[int, int]:
        """Return x and bound of ``min(max(x, 0), bound)``, which tinygrad writes with XORs."""

        def invert(index: int) -> int:
            one, two = self.node(index, "XOR").srcs
            self.expect(self.read_const(two) == -1)
            return one

        highest, bound = self.node(invert(index), "MAX").srcs
        x, zero = self.node(invert(highest), "MAX").srcs
        largest = -1 - self.read_const(bound)
        self.expect(self.read_const(zero) == 0 and largest >= 0)
        return x, largest

    def read_sum(self, index: int, place: int) -> int:
        """Return what is added to the number of a row."""
        one, two = self.node(index, "ADD").srcs
        self.expect(one == place)
        return two

    def read_negative(self, index: int) -> int:
        one, minus = self.node(index, "MUL").srcs
        self.expect(self.read_const(minus) == -1)
        return one

    def read_columns(self, index: int) -> tuple[int, int, int]:
        """Return an int32 input, the first column and the number of columns of its first row."""
        shape = self.node(index, "RESHAPE").arg
        piece = self.node(self.node(index).srcs[0], "SHRINK")
        source = self.node(piece.srcs[0], "INPUT")
        assert isinstance(source.arg, int) and isinstance(piece.arg, tuple)  # as check_graph saw
        self.expect(source.dtype == "int32" and len(piece.arg) == 2 and piece.arg[0] == (0, 1))
        assert isinstance(piece.arg[1], tuple)
        first, count = piece.arg[1]
        self.expect(isinstance(count, int) and shape == (count,))
        return source.arg, int(first), int(count)


# ---- running -------------------------------------------------------------------------------------


class Copies:
    """Which rows of an execution's states may differ between the two copies, and which are zeros.

    Per state four int64: the first row in which the copies may differ, and the one behind the last;
    and for each copy the row from which on all rows are zeros.
    """

    __slots__ = ("_words",)

    def __init__(self, states: int) -> None:
        """All copies are zeros."""
        self._words = [(ctypes.c_int64 * 4)(*_NO_ROWS, 0, 0) for _ in range(states)]

    def locate(self, state: int, parity: int) -> tuple[int, int, int]:
        """Return the addresses of a state's range of rows, the old copy's end, the new copy's."""
        address = ctypes.addressof(self._words[state])
        return address, address + 8 * (2 + parity), address + 8 * (3 - parity)

    def pop_ends(self, state: int) -> tuple[int, int]:
        """Return the row from which on each copy is zeros; from now on both count as all zeros."""
        words = self._words[state]
        ends = words[2], words[3]
        words[:] = [*_NO_ROWS, 0, 0]
        return ends


def bind_write(
    write: CacheWrite,
    operands: Sequence[int],
    known: tuple[Copies, int, int],
    rows: Mapping[str, ctypes.c_uint64],
) -> BoundCode:
    """Return a cache write on certain memory.

    ``operands`` are addresses: the new copy, the old one, new rows and layout. ``known`` is the
    copies, the state and which copy is the old one; ``rows`` holds the value of each symbol.
    """
    copies, state, parity = known
    count = rows[write.symbol] if write.symbol else ctypes.c_uint64(write.rows)
    words = (
        *(*operands, *copies.locate(state, parity), ctypes.addressof(count)),
        *(0, write.context, write.most),
    )
    return BoundCode([(load_code(assemble, write), words)], len(operands), count, copies)


def assemble(write: CacheWrite) -> bytes:
    """Return a function of one argument, the address of the block of ``ARGUMENTS``.

    Throughout r8 is the start, r9 the layout, r10 the end of the new rows, r15 the first row that
    has a shift, and r11 a row.
    """
    asm = Assembler()
    with asm.save(CALLEE_SAVED):
        asm.load(R9, _get_argument("layout"))
        asm.load_int32(R8, Mem(R9, write.start))
        _emit_bounds(asm, R8, write.context, "context")
        asm.load(RAX, _get_argument("address of rows"))
        asm.load(R10, Mem(RAX))
        asm.add(R10, R8)
        asm.compare_const(R10, write.context)
        asm.load_if("g", R10, _get_argument("context"))
        asm.load(R15, R8)
        asm.add_const(R15, -write.chunk)
        _emit_first_changed(asm, write)
        _emit_range(asm)
        _emit_rows(asm, write)
    return asm.finish()


def _get_argument(name: str) -> Mem:
    return Mem(RDI, _OFFSETS[name])


def _emit_bounds(asm: Assembler, register: int, largest: int, argument: str) -> None:
    asm.compare_const(register, 0)
    asm.load_if("l", register, _get_argument("zero"))
    asm.compare_const(register, largest)
    asm.load_if("g", register, _get_argument(argument))


def _emit_shift_address(asm: Assembler) -> None:
    """Emit rdx = r9 + 4 (r11 - r15); the shift of row r11 is there, at the offset of shifts."""
    asm.load(RDX, R11)
    asm.subtract(RDX, R15)
    asm.add(RDX, RDX)
    asm.add(RDX, RDX)
    asm.add(RDX, R9)


def _emit_first_changed(asm: Assembler, write: CacheWrite) -> None:
    """Emit r13 = the first row with a shift, or else the start."""
    asm.load(R11, R15)
    asm.compare_const(R11, 0)
    asm.load_if("l", R11, _get_argument("zero"))
    _emit_shift_address(asm)
    asm.label("seek")
    asm.load(R13, R11)
    asm.compare(R11, R8)
    asm.jump("jge", "sought")
    asm.load_int32(RAX, Mem(RDX, write.shifts))
    asm.jump_if(RAX, "jge", 1, "sought")
    asm.add_const(RDX, INT_BYTES)
    asm.add_const(R11, 1)
    asm.jump("jmp", "seek")
    asm.label("sought")


def _emit_range(asm: Assembler) -> None:
    """Emit r11 and r12 = the first row to write and the one behind the last.

    Afterwards the copies may differ from r13 to r14, the later of their ends, which is stored.
    """
    asm.load(RAX, _get_argument("end of old"))
    asm.load(R14, Mem(RAX))
    asm.compare(R14, R10)
    asm.load_if("l", R14, R10)
    asm.load(RAX, _get_argument("differing"))
    asm.load(R11, Mem(RAX))
    asm.compare(R13, R11)
    asm.load_if("l", R11, R13)
    asm.load(R12, Mem(RAX, 8))
    asm.compare(R14, R12)
    asm.load_if("g", R12, R14)
    asm.store(Mem(RAX), R13)
    asm.store(Mem(RAX, 8), R14)
    asm.load(RAX, _get_argument("end of new"))
    asm.store(Mem(RAX), R10)


def _emit_rows(asm: Assembler, write: CacheWrite) -> None:
    """Emit the writing of rows r11 to r12; rbx is the target of a row, rsi its source."""
    names = (f"copy{number}" for number in itertools.count())
    asm.load(RBX, R11)
    asm.multiply_const(RBX, write.row_bytes)
    asm.add(RBX, _get_argument("new"))
    asm.label("row")
    asm.compare(R11, R12)
    asm.jump("jge", "end")
    asm.compare(R11, R8)
    asm.jump("jge", "not kept")
    asm.load(RSI, R11)
    asm.compare(R11, R15)
    asm.jump("jl", "in place")
    _emit_shift_address(asm)
    asm.load_int32(RAX, Mem(RDX, write.shifts))
    _emit_bounds(asm, RAX, write.most, "most")
    asm.add(RSI, RAX)
    asm.label("in place")
    asm.jump_if(RSI, "jge", write.context, "nothing")
    asm.multiply_const(RSI, write.row_bytes)
    asm.add(RSI, _get_argument("old"))
    asm.jump("jmp", "copy")
    asm.label("not kept")
    asm.compare(R11, R10)
    asm.jump("jge", "nothing")
    asm.load(RSI, R11)
    asm.subtract(RSI, R8)
    asm.multiply_const(RSI, write.fresh_bytes)
    asm.add(RSI, _get_argument("fresh"))
    asm.label("copy")
    _emit_copy(asm, write.row_bytes, next(names), is_zero=False)
    asm.label("next")
    asm.add_const(R11, 1)
    asm.jump("jmp", "row")
    asm.label("nothing")
    _emit_copy(asm, write.row_bytes, next(names), is_zero=True)
    asm.jump("jmp", "next")
    asm.label("end")


def _emit_copy(asm: Assembler, row_bytes: int, name: str, *, is_zero: bool) -> None:
    """Emit one row's copying, or its zeros; rbx is the next row after it."""
    count = row_bytes // VECTOR_BYTES
    unrolled = next(turn for turn in range(UNROLLED, 0, -1) if count % turn == 0)
    if is_zero:
        for register in range(unrolled):
            asm.zero(register)
    asm.set_const(RCX, count // unrolled)
    asm.label(name)
    for register in range(unrolled):
        if not is_zero:
            asm.load_vector(register, Mem(RSI, register * VECTOR_BYTES))
        asm.store_vector(register, Mem(RBX, register * VECTOR_BYTES))
    asm.add_const(RBX, unrolled * VECTOR_BYTES)
    if not is_zero:
        asm.add_const(RSI, unrolled * VECTOR_BYTES)
    asm.count_down(RCX, name)
