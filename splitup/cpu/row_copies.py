"""Kernels that copy rows whose numbers are computed: from a table of words, a ring of a window.

A row of the result is the row of a table that an int32 names, zeros where there is none; or of two
tables, where the sign of another int32 chooses. tinygrad's scalar kernel looks up every element:
for a window of 512 positions it takes ten times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import Ops, UOp

from splitup.cpu.assembler import (
    R8,
    R9,
    R10,
    R11,
    R13,
    RAX,
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    Assembler,
    Mem,
)
from splitup.cpu.kernel_parts import get_store
from splitup.cpu.loop_indices import (
    AffineIndex,
    Axis,
    IndexReader,
    NoMatch,
    join_axes,
    refuse_if,
)
from splitup.cpu.machine_code import BoundCode, load_code

_VECTOR_BYTES: Final = 32
_MAX_STRIDE_BYTES: Final = 2**30
_SAVED: Final = (RBX, RBP, R13)
_NUMBERS: Final = (R9, R10, R11)


@dataclass(frozen=True, slots=True)
class CopyShape:
    """What the machine code depends on, in bytes. A step is from one row to the next."""

    row_bytes: int
    out_step: int
    number_steps: tuple[int, ...]  # of each table's numbers; before two, of those with the sign
    table_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A kernel that copies rows. Slots are the result, the numbers, and the tables."""

    shape: CopyShape
    slots: tuple[int, ...]
    offsets: tuple[int, ...]  # in bytes, of each slot
    sizes: tuple[int | str, ...]  # of the result and the tables, in rows, or what symbol it is


def bind_row_copy(
    kernel: RowCopy, addresses: Sequence[int], rows: Mapping[str, ctypes.c_uint64]
) -> BoundCode:
    """Return a kernel on certain memory.

    ``addresses`` are those of ``slots``; ``rows`` holds the value of each symbol.
    """
    sizes = [
        rows[size] if isinstance(size, str) else ctypes.c_uint64(size) for size in kernel.sizes
    ]
    code = load_code(assemble_copy, kernel.shape, kernel.offsets)
    words = [*addresses, *map(ctypes.addressof, sizes)]
    return BoundCode([(code, words)], len(addresses), sizes)


# ---- machine code --------------------------------------------------------------------------------


def assemble_copy(shape: CopyShape, offsets: Sequence[int]) -> bytes:
    """Return a function of the address of a block: addresses, and those of the sizes."""
    asm, numbers = Assembler(), list(zip(_NUMBERS, shape.number_steps, strict=False))
    tables, first_size = len(shape.table_steps), len(offsets)
    first_table = first_size - tables
    with asm.save(_SAVED):
        asm.load(RBP, Mem(RDI, 8 * first_size))
        asm.load(RBP, Mem(RBP))
        for place, register in enumerate((R8, *(register for register, _ in numbers))):
            asm.load(register, Mem(RDI, 8 * place))
            asm.add_const(register, offsets[place])
        asm.jump_if(RBP, "jl", 1, "end")
        asm.label("row")
        if tables > 1:
            asm.load_int32(RAX, Mem(_NUMBERS[0]))
            asm.jump_if(RAX, "jge", 0, "table 1")
        for table, (register, _) in enumerate(numbers[-tables:]):
            asm.label(f"table {table}")
            asm.load_int32(RAX, Mem(register))
            asm.jump_if(RAX, "jl", 0, "zeros")
            asm.load(RDX, Mem(RDI, 8 * (first_size + 1 + table)))
            asm.load(RDX, Mem(RDX))
            asm.compare(RAX, RDX)
            asm.jump("jge", "zeros")
            asm.multiply_const(RAX, shape.table_steps[table])
            asm.load(RCX, Mem(RDI, 8 * (first_table + table)))
            asm.add(RCX, RAX)
            asm.add_const(RCX, offsets[first_table + table])
            asm.jump("jmp", "copy")
        _emit_row(asm, "copy", shape.row_bytes)
        asm.jump("jmp", "next")
        _emit_row(asm, "zeros", shape.row_bytes)
        asm.label("next")
        for register, step in ((R8, shape.out_step), *numbers):
            asm.add_const(register, step)
        asm.count_down(RBP, "row")
        asm.label("end")
    return asm.finish()


def _emit_row(asm: Assembler, label: str, nbytes: int) -> None:
    """Emit storing the row at rcx, or zeros, at r8."""
    vectors = nbytes // _VECTOR_BYTES
    at_once = next(number for number in (4, 2, 1) if vectors % number == 0)
    asm.label(label)
    asm.load(R13, R8)
    asm.set_const(RBX, vectors // at_once)
    asm.zero(0)
    asm.label(f"{label} more")
    for place in range(at_once):
        if label == "copy":
            asm.load_vector(0, Mem(RCX, place * _VECTOR_BYTES))
        asm.store_vector(0, Mem(R13, place * _VECTOR_BYTES))
    asm.add_const(R13, at_once * _VECTOR_BYTES)
    if label == "copy":
        asm.add_const(RCX, at_once * _VECTOR_BYTES)
    asm.count_down(RBX, f"{label} more")


# ---- finding -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Load:
    """What is loaded from an argument: its index in elements, and their size."""

    slot: int
    index: AffineIndex
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A row of a table: its number, row 0, the elements to the next row, and how many there are."""

    number: _Load
    table: _Load
    step: int
    size: int | str  # or the symbol that it is


def match_row_copy(sink: UOp) -> RowCopy | None:
    """Return the kernel that copies rows, None when it is something else."""
    try:
        return _match(sink)
    except NoMatch:
        return None


def _match(sink: UOp) -> RowCopy:
    store, loops = get_store(sink)
    reader = IndexReader(sink)
    out = _read_load(reader, store.src[0], store.src[0].dtype)
    signs, choices = [], [store.src[1]]
    if choices[0].op is Ops.WHERE:
        condition, *choices = choices[0].src
        refuse_if(condition.op is not Ops.CMPLT or condition.src[1].op is not Ops.CONST)
        refuse_if(condition.src[1].val != 0)
        signs = [_read_load(reader, condition.src[0], dtypes.int32)]
    lookups = [_read_lookup(reader, choice, store.src[0].dtype) for choice in choices]
    numbers = [*signs, *(one.number for one in lookups)]
    tables = [one.table for one in lookups]
    loads = [out, *numbers, *tables]
    refuse_if(any(load.slot == out.slot for load in loads[1:]))
    subs = [sub for loop in loops for sub in reader.split_loop(loop)]
    axes = join_axes(subs, [load.index for load in loads], Axis)
    along = (1, *(0,) * len(numbers), *(1,) * len(tables))
    inner = next((axis for axis in axes if axis.factors == along and not axis.symbol), None)
    if inner is None or len(axes) > 2 or inner.size * out.nbytes % _VECTOR_BYTES:
        raise NoMatch
    row = next((axis for axis in axes if axis is not inner), Axis(1, (0,) * len(loads)))
    steps = [factor * load.nbytes for factor, load in zip(row.factors, loads, strict=True)]
    shape = CopyShape(
        row_bytes=inner.size * out.nbytes,
        out_step=steps[0],
        number_steps=tuple(steps[1 : 1 + len(numbers)]),
        table_steps=tuple(one.step * one.table.nbytes for one in lookups),
    )
    largest = max(shape.out_step, *shape.number_steps, *shape.table_steps)
    refuse_if(any(steps[1 + len(numbers) :]) or not 0 <= largest <= _MAX_STRIDE_BYTES)
    return RowCopy(
        shape,
        slots=tuple(load.slot for load in loads),
        offsets=tuple(load.index.const * load.nbytes for load in loads),
        sizes=(row.symbol or row.size, *(one.size for one in lookups)),
    )


def _read_load(reader: IndexReader, load: UOp, dtype: DType) -> _Load:
    slot, index = reader.read_load(load, dtype)
    return _Load(slot, index, dtype.itemsize)


def _read_lookup(reader: IndexReader, uop: UOp, dtype: DType) -> _Lookup:
    """Read a LOOKUP as the backend lowers it: a sum over all rows of those that have the number."""
    refuse_if(uop.op is not Ops.REDUCE or uop.arg != (Ops.ADD, 0) or len(uop.src) != 2)
    choice, place = uop.src
    refuse_if(choice.op is not Ops.WHERE or choice.src[0].op is not Ops.CMPNE)
    counter, number = choice.src[0].src
    zero, value = choice.src[1:]
    refuse_if(zero.op is not Ops.CONST or zero.val != 0 or counter.op is not Ops.CAST)
    refuse_if(counter.src[0] is not place or counter.dtype != dtypes.int32)
    subs = reader.split_loop(place)
    refuse_if(len(subs) != 1)
    (sub,) = subs
    table = _read_load(reader, value, dtype)
    factors = {one: factor for one, factor in table.index.factors.items() if one != sub}
    axes = join_axes(subs, [table.index], Axis)
    return _Lookup(
        _read_load(reader, _show_number(number), dtypes.int32),
        _Load(table.slot, AffineIndex(table.index.const, factors), table.nbytes),
        table.index.get(sub),
        axes[0].symbol or sub.size if axes else 1,
    )


def _show_number(uop: UOp) -> UOp:
    """Return the number whose range ``splitup.backend.compiler.integers`` hides."""
    if uop.op is Ops.BITCAST and uop.src[0].op is Ops.AND:
        wide, mask = uop.src[0].src
        if mask.op is Ops.CONST and mask.val == dtypes.uint32.max and wide.op is Ops.BITCAST:
            return wide.src[0]
    return uop
