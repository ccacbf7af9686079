"""Find the matmuls among tinygrad's kernels.

tinygrad's assembler for x86-64 has scalar arithmetic only, and a language model on a CPU spends
nearly all its time in matmuls, which ``splitup.cpu.matmul_codegen`` computes with vectors. A kernel
matches when it sums matmuls of two operands whose addresses are affine in its loops, one float32
and the other float32, float16, bfloat16 or quantised (``splitup.cpu.decoder_match``); or rows that
a LOOKUP chooses, as attention does from the KV cache, which may be int8, too. A kernel that does
more with the sum (adds a residual, masks scores) is split first (``splitup.cpu.kernel_parts``).

Whether and how a kernel matches must not depend on the number of rows of a step: a row has to give
the same bits in a step of one row and of many. So the decision depends on b's sizes only.
"""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, UOp

from splitup.cpu.decoder_match import read_decoder
from splitup.cpu.kernel_parts import get_parts
from splitup.cpu.loop_indices import (
    AffineIndex,
    Axis,
    IndexReader,
    Lookup,
    NoMatch,
    Operand,
    SubLoop,
    join_axes,
    refuse_if,
)
from splitup.cpu.matmul_shape import (
    FLOAT_BYTES,
    ITEM_BYTES,
    LANES,
    LookupShape,
    MatmulShape,
    ProductKind,
)

MIN_WORK: Final = 1_024  # elements of b; a smaller matmul is not worth the second kernel
MAX_ENTRIES: Final = 65_536  # of the table of offsets: 1.5 MB
MAX_UNROLLED: Final = 512  # elements of a looked-up row, of which there is code for each eight
MAX_STRIDE_BYTES: Final = 2**31 // 16  # displacements of a tile's rows are 32 bits


@dataclass(frozen=True, slots=True)
class _MatmulAxis(Axis):
    """An axis with its factors in the indices of out, a, b and the numbers of rows of b."""

    @property
    def out(self) -> int:
        return self.factors[0]

    @property
    def a(self) -> int:
        return self.factors[1]

    @property
    def b(self) -> int:
        return self.factors[2]

    @property
    def number(self) -> int:
        return sum(self.factors[3:])


@dataclass(frozen=True, slots=True)
class Matmul:
    """A kernel that computes a matmul. Slots are the kernel's arguments."""

    shape: MatmulShape
    slots: tuple[int, ...]  # out, a, b, and the numbers of rows that are looked up
    n: int
    t: int  # or its bound
    symbol: str  # the variable of t, or of rows where b is looked up; "" if that is fixed
    table: tuple[tuple[int, int, int], ...]  # bytes to add to out, a, b
    rows: int = 1  # that have arrays of row numbers, or its bound

    @property
    def work(self) -> int:
        """Return the number of multiplications for one row of a step."""
        return self.n * self.shape.length * len(self.table)


def match_matmul(sink: UOp) -> Matmul | None:
    """Return the matmul that a kernel computes, None when it is something else."""
    try:
        store, loops, reduce = get_parts(sink)
        if reduce is None or store.src[1] is not reduce or reduce.arg != (Ops.ADD, 0):
            return None
        if reduce.src[0].op is not Ops.MUL:
            return None
        reader = IndexReader(sink)
        out_slot, out = reader.read_load(store.src[0], dtypes.float32)
        sources = reduce.src[0].src
        chosen = [
            src for src in sources if (src.src[0] if src.op is Ops.CAST else src).op is Ops.REDUCE
        ]
        found = [_read_operand(reader, src, reduce) for src in sources if src not in chosen]
        lookups = [reader.read_lookup(src) for src in chosen]
        subs = [sub for loop in loops for sub in reader.split_loop(loop)]
        summed = [sub for loop in reduce.src[1:] for sub in reader.split_loop(loop)]
        if lookups:
            return _arrange_lookup((out_slot, out), found[0], *lookups[0], subs, summed)
    except NoMatch:
        return None
    # the larger operand is b: of a matrix and a few rows, the matrix
    sizes = [_count(operand.index) for operand in found]
    order = (0, 1) if sizes[1] >= sizes[0] else (1, 0)
    for first, second in (order, order[::-1]):
        with suppress(NoMatch):
            return _arrange(out_slot, out, found[first], found[second], subs, summed)
    return None


def _read_operand(reader: IndexReader, uop: UOp, reduce: UOp) -> Operand:
    """Return how an operand is stored, or how it is decoded."""
    try:
        return reader.read_operand(uop)
    except NoMatch:
        if len(reduce.src) != 2:
            raise
        return read_decoder(reader, uop, reduce.src[1])


def _count(index: AffineIndex) -> int:
    return math.prod(sub.size for sub in index.factors)


def _arrange(
    out_slot: int,
    out: AffineIndex,
    a: Operand,
    b: Operand,
    subs: list[SubLoop],
    summed: list[SubLoop],
) -> Matmul:
    """Give each loop its role: n (b only), t (a only), or a column of the table."""
    refuse_if(a.kind != "float32")

    k, axes = _make_axes(subs, summed, [out, a.index, b.index])
    is_dot = k.a == k.b == 1 and k.size % LANES == 0
    only_b = [axis for axis in axes if axis.b and not axis.a and not axis.symbol]
    if not is_dot:
        only_b = [axis for axis in only_b if axis.b == axis.out == 1 and axis.size % LANES == 0]
        refuse_if(b.kind not in ITEM_BYTES or not only_b)
    n = max(only_b, key=lambda axis: axis.size, default=_MatmulAxis(1, (1, 0, 0)))
    only_a = [axis for axis in axes if axis.a and not axis.b]
    t = max(
        only_a, key=lambda axis: (bool(axis.symbol), axis.size), default=_MatmulAxis(1, (0, 0, 0))
    )
    rest = [axis for axis in axes if axis is not n and axis is not t]
    refuse_if(any(axis.symbol for axis in rest))
    refuse_if(math.prod(axis.size for axis in axes if axis.b) * k.size < MIN_WORK)
    shape = _make_shape(is_dot, b, k, n, t)
    slots = (out_slot, a.slot, b.slot)
    return Matmul(shape, slots, n.size, t.size, t.symbol, _make_table(out, a, b, rest))


def _arrange_lookup(
    target: tuple[int, AffineIndex],
    a: Operand,
    b: Operand,
    lookup: Lookup,
    subs: list[SubLoop],
    summed: list[SubLoop],
) -> Matmul:
    """Give each loop its role: n or k looks up, rows have row numbers of their own, t is a's only.

    Small matmuls match too: tinygrad's kernel looks up the row for every single multiplication.
    """
    out_slot, out = target
    refuse_if(a.kind != "float32")
    k, axes = _make_axes(subs, summed, [out, a.index, b.index, lookup.index])
    is_dot = not k.number
    if is_dot:
        fits = k.a == k.b == 1 and k.size % LANES == 0 and k.size <= MAX_UNROLLED
        may_be_n = [axis for axis in axes if axis.number and not axis.a and not axis.b]
    else:
        fits = not k.b
        may_be_n = [axis for axis in axes if axis.b == axis.out == 1 and axis.size % LANES == 0]
        may_be_n = [axis for axis in may_be_n if not axis.a and not axis.number]
    may_be_n = [axis for axis in may_be_n if not axis.symbol]
    refuse_if(not fits or not may_be_n)
    n = max(may_be_n, key=lambda axis: axis.size)
    rest = [axis for axis in axes if axis is not n]
    own = [axis for axis in rest if axis.number]
    row = own[0] if own else _MatmulAxis(1, (0, 0, 0))
    rest = [axis for axis in rest if axis is not row]
    only_a = [axis for axis in rest if axis.a and not axis.b]
    t = max(only_a, key=lambda axis: axis.size, default=_MatmulAxis(1, (0, 0, 0)))
    rest = [axis for axis in rest if axis is not t]
    refuse_if(len(own) > 1 or row.b or any(axis.symbol for axis in (t, *rest)))
    found = LookupShape(
        bound=lookup.bound,
        largest=lookup.largest,
        b_row=_get_bytes(b.kind, lookup.step),
        step=(n if is_dot else k).number * FLOAT_BYTES,
        out_row=row.out * FLOAT_BYTES,
        a_row=row.a * FLOAT_BYTES,
        number_row=row.number * FLOAT_BYTES,
    )
    shape = _make_shape(is_dot, b, k, n, t, found)
    _check_strides(found.b_row, found.step, found.out_row, found.a_row, found.number_row)
    refuse_if(lookup.index.const)
    slots = (out_slot, a.slot, b.slot, lookup.slot)
    table = _make_table(out, a, b, rest)
    return Matmul(shape, slots, n.size, t.size, row.symbol, table, row.size)


def _make_shape(
    is_dot: bool,
    b: Operand,
    k: _MatmulAxis,
    n: _MatmulAxis,
    t: _MatmulAxis,
    lookup: LookupShape | None = None,
) -> MatmulShape:
    shape = MatmulShape(
        style="dot" if is_dot else "outer",
        kind=b.kind,
        length=k.size,
        out_n=n.out * FLOAT_BYTES,
        out_t=t.out * FLOAT_BYTES,
        a_t=t.a * FLOAT_BYTES,
        a_k=k.a * FLOAT_BYTES,
        b_n=0 if lookup else _get_bytes(b.kind, n.b),
        b_k=0 if lookup or is_dot else _get_bytes(b.kind, k.b),
        lookup=lookup,
        decoder=b.decoder,
    )
    _check_strides(shape.out_n, shape.out_t, shape.a_t, shape.a_k, shape.b_n, shape.b_k)
    return shape


def _make_axes(
    subs: list[SubLoop], summed: list[SubLoop], indices: list[AffineIndex]
) -> tuple[_MatmulAxis, list[_MatmulAxis]]:
    """Return the axis of the sum, which has a fixed size, and the others."""

    sums = join_axes(summed, indices, _MatmulAxis)
    refuse_if(len(sums) != 1 or sums[0].symbol)
    return sums[0], join_axes(subs, indices, _MatmulAxis)


def _check_strides(*strides: int) -> None:
    refuse_if(any(not 0 <= stride <= MAX_STRIDE_BYTES for stride in strides))


def _make_table(
    out: AffineIndex, a: Operand, b: Operand, rest: list[_MatmulAxis]
) -> tuple[tuple[int, int, int], ...]:
    """Return the offsets in bytes for every combination of the axes without another role."""
    refuse_if(math.prod(axis.size for axis in rest) > MAX_ENTRIES)
    table = []
    for counts in itertools.product(*(range(axis.size) for axis in rest)):
        pairs = list(zip(counts, rest, strict=True))
        table.append(
            (
                FLOAT_BYTES * (out.const + sum(count * axis.out for count, axis in pairs)),
                FLOAT_BYTES * a.index.const
                + a.offset_bytes
                + FLOAT_BYTES * sum(count * axis.a for count, axis in pairs),
                _get_bytes(b.kind, b.index.const)
                + b.offset_bytes
                + sum(count * _get_bytes(b.kind, axis.b) for count, axis in pairs),
            )
        )
    return tuple(table)


def _get_bytes(kind: ProductKind, index: int) -> int:
    return index if kind == "blocks" else index * ITEM_BYTES[kind]
