"""Machine code for matrix products on x86-64-v3, of which the order of every sum is fixed.

A product is ``out[t, n] = sum over k of a[t, k] * b[n, k]`` for every entry of a table of offsets
(heads, for example); ``a`` and ``out`` are float32, ``b`` is float32, float16, bfloat16, Q8_0
or Q4_0.
The rows of a float32 ``b`` may be **looked up**: n ("dot") or k ("outer") counts int32 numbers of
rows, and every row of a second count has numbers of its own.
There are two styles:

- **dot**: k is contiguous in both. A sum has eight lanes; lane i adds the products of k = i, i + 8,
  … one after the other, each with one rounding (fused multiply-add). At the end the lanes are
  added as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
- **outer**: n is contiguous in ``b`` and ``out``. Each sum is one lane, k ascends.

So the bits of an output depend on its row of ``a``, its row of ``b`` and nothing else: not on where
that lies or how it is found, not on the number of rows, not on its place in a tile, not on threads.
What is fast about it: a tile of 4 rows of ``b`` by 3 of ``a`` keeps 12 sums in registers, enough to
hide the latency of the additions, and reads a row of ``b`` once for three; a single row of ``a``
meets 8 rows of ``b``. While the first rows of ``a`` meet a tile of ``b``, they fetch the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

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
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    Assembler,
    Mem,
)

LANES: Final = 8
FLOAT_BYTES: Final = 4
INT_BYTES: Final = 4
BLOCK: Final = 32  # elements that have one scale
N_TILES: Final = (8, 4, 1)  # rows of b; in the style "outer", vectors of n
T_TILES: Final = (3, 2, 1)
ARGUMENTS: Final = (  # 64 bits each; the last five for rows that are looked up
    *("out", "a", "b", "numbers", "table", "entries", "n", "address of t"),
    *("address of rows", "zero", "largest"),
)
_OFFSETS: Final = {name: 8 * place for place, name in enumerate(ARGUMENTS)}
TABLE_ENTRY: Final = 3  # bytes to add to out, a and b
LINE_BYTES: Final = 64  # of a cache
AHEAD: Final = 8  # rows of b; the processor itself does not follow so many short streams in time

Bound = Literal["mask", "clamp"]
Kind = Literal["float32", "float16", "bfloat16", "q8_0", "q4_0"]
ITEM_BYTES: Final[dict[Kind, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
# a float16 scale, then 32 int8; or 32 times 4 bits plus 8, element i and i + 16 in one byte
BLOCK_BYTES: Final[dict[Kind, int]] = {"q8_0": 34, "q4_0": 18}

_X, _SCALE, _W = 12, 14, 15  # vector registers; sums are in those below
_BLOCK_X = 8  # where blocks keep rows of a
_FIFTEENS = 12
_POINTERS = (RAX, RCX, RDX, RSI)  # rows of b that are looked up


@dataclass(frozen=True, slots=True)
class LookupShape:
    """How rows of b are looked up. Strides are in bytes."""

    bound: Bound
    largest: int  # row of b
    b_row: int
    step: int  # from one number to the next
    out_row: int
    a_row: int
    number_row: int


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """What the code depends on. Strides are in bytes; how many n, t and entries is an argument."""

    style: Literal["dot", "outer"]
    kind: Kind  # of b
    length: int  # of a sum
    out_n: int
    out_t: int
    a_t: int
    a_k: int  # "outer" only
    b_n: int  # "dot" only
    b_k: int  # "outer" only
    lookup: LookupShape | None = None  # b_n and b_k are then 0

    @property
    def n_unit(self) -> int:
        """Return what the number n must be divisible by."""
        return LANES if self.style == "outer" else 1


def assemble(shape: MatmulShape) -> bytes:
    """Return a function of one argument, the address of the block of ``ARGUMENTS``."""
    asm = Assembler()
    for register in CALLEE_SAVED:
        asm.push(register)
    asm.load(RSI, _get_argument("table"))
    asm.load(RBP, _get_argument("entries"))
    asm.label("entry")
    for place, register in enumerate((R8, R9, R10)):
        asm.load(register, Mem(RDI, 8 * place))
        asm.add(register, Mem(RSI, 8 * place))
    names = (f"loop{number}" for number in itertools.count())
    if shape.lookup is None:
        _emit_n_loops(asm, shape, names)
    else:
        _emit_rows(asm, shape, shape.lookup, names)
    asm.add_const(RSI, 8 * TABLE_ENTRY)
    asm.add_const(RBP, -1)
    asm.jump("jnz", "entry")
    asm.forget_upper_halves()
    for register in reversed(CALLEE_SAVED):
        asm.pop(register)
    asm.ret()
    return asm.finish()


def _get_argument(name: str) -> Mem:
    return Mem(RDI, _OFFSETS[name])


def _emit_n_loops(asm: Assembler, shape: MatmulShape, names: Iterator[str]) -> None:
    skips = shape.lookup is not None and shape.style == "dot" and _skips_tail(shape)
    asm.load(R11, RBP if skips else _get_argument("n"))
    for tile in N_TILES:
        _emit_n_loop(asm, shape, tile, names)


def _emit_rows(
    asm: Assembler, shape: MatmulShape, lookup: LookupShape, names: Iterator[str]
) -> None:
    """Emit the loop over rows with numbers of their own; rbx is where a row's are.

    Within, rbp is how many of the numbers are gone through.
    """
    start, end = next(names), next(names)
    for register in (RSI, RBP):
        asm.push(register)
    asm.load(RBX, _get_argument("numbers"))
    asm.load(R15, _get_argument("address of rows"))
    asm.load(R15, Mem(R15))
    asm.label(start)
    asm.compare_const(R15, 1)
    asm.jump("jl", end)
    kept = (R8, R10, RBX, R15)
    for register in kept:
        asm.push(register)
    if _skips_tail(shape):
        _emit_length(asm, shape, names)
    elif shape.style == "outer":
        asm.set_const(RBP, shape.length)
    _emit_n_loops(asm, shape, names)
    for register in reversed(kept):
        asm.pop(register)
    if _skips_tail(shape) and shape.style == "dot":
        _emit_fill(asm, shape, names)
    asm.add_const(R8, lookup.out_row)
    asm.add_const(R9, lookup.a_row)
    asm.add_const(RBX, lookup.number_row)
    asm.add_const(R15, -1)
    asm.jump("jmp", start)
    asm.label(end)
    for register in (RBP, RSI):
        asm.pop(register)


def _skips_tail(shape: MatmulShape) -> bool:
    """Say whether the code looks for equal numbers at the end of a row's and goes through few.

    Attention names one row wherever it sees nothing, so behind the sequence. There every product
    is the same: one is stored for all; and 0 times one row changes a sum once at most, so
    where the factors are +0.0 a few times do for all. Either way no bit changes.
    """
    assert shape.lookup is not None
    unit = shape.out_n if shape.style == "dot" else shape.a_k
    return shape.lookup.step == INT_BYTES and unit == FLOAT_BYTES


def _emit_length(asm: Assembler, shape: MatmulShape, names: Iterator[str]) -> None:
    """Emit rbp = how many numbers to go through: eight or more of those that are equal."""
    scan, done = next(names), next(names)
    if shape.style == "dot":
        asm.load(RDX, _get_argument("n"))
    else:
        asm.set_const(RDX, shape.length)
    asm.load(RBP, RDX)
    asm.load(RCX, RDX)
    asm.add(RCX, RCX)
    asm.add(RCX, RCX)
    asm.add(RCX, RBX)
    asm.broadcast(0, Mem(RCX, -INT_BYTES))
    asm.label(scan)
    asm.compare_const(RBP, 2 * LANES)
    asm.jump("jl", done)
    asm.compare_int32(1, 0, Mem(RCX, -LANES * INT_BYTES))
    asm.get_signs(RAX, 1)
    asm.compare_const(RAX, 2**LANES - 1)
    asm.jump("jnz", done)
    asm.add_const(RCX, -LANES * INT_BYTES)
    asm.add_const(RBP, -LANES)
    asm.jump("jmp", scan)
    asm.label(done)
    asm.add_const(RBP, LANES)
    asm.compare(RBP, RDX)
    asm.load_if("g", RBP, RDX)
    if shape.style == "outer":
        _emit_zero_check(asm, shape, names)


def _emit_tail_loop(
    asm: Assembler, names: Iterator[str], stride: int, emit: Callable[[], None]
) -> None:
    """Emit ``emit`` for each vector at rax of those behind rbp, for all t from r13 on; rdx ends."""
    t_start, start, next_t, end = (next(names) for _ in range(4))
    asm.load(R12, _get_argument("address of t"))
    asm.load(RCX, R12)
    asm.load(R12, Mem(RCX))
    asm.label(t_start)
    asm.compare_const(R12, 1)
    asm.jump("jl", end)
    asm.load(RAX, RBP)
    asm.add(RAX, RAX)
    asm.add(RAX, RAX)
    asm.add(RAX, R13)
    asm.broadcast(0, Mem(RAX, -FLOAT_BYTES))
    asm.load(RCX, RDX)
    asm.subtract(RCX, RBP)
    asm.label(start)
    asm.compare_const(RCX, LANES)
    asm.jump("jl", next_t)
    emit()
    asm.add_const(RAX, LANES * FLOAT_BYTES)
    asm.add_const(RCX, -LANES)
    asm.jump("jmp", start)
    asm.label(next_t)
    asm.add_const(R13, stride)
    asm.add_const(R12, -1)
    asm.jump("jmp", t_start)
    asm.label(end)


def _emit_zero_check(asm: Assembler, shape: MatmulShape, names: Iterator[str]) -> None:
    """Emit rbp = the whole length unless all factors behind it are +0.0."""
    other, done = next(names), next(names)

    def check() -> None:
        asm.load_vector(0, Mem(RAX))
        asm.test_bits(0)
        asm.jump("jnz", other)

    asm.load(R13, R9)
    _emit_tail_loop(asm, names, shape.a_t, check)
    asm.jump("jmp", done)
    asm.label(other)
    asm.load(RBP, RDX)
    asm.label(done)


def _emit_fill(asm: Assembler, shape: MatmulShape, names: Iterator[str]) -> None:
    """Emit the storing of the last sum in all places behind rbp."""
    asm.load(RDX, _get_argument("n"))
    asm.load(R13, R8)
    _emit_tail_loop(asm, names, shape.out_t, lambda: asm.store_vector(0, Mem(RAX)))


def _emit_n_loop(asm: Assembler, shape: MatmulShape, tile: int, names: Iterator[str]) -> None:
    """Emit the loop over tiles of n; r8 and r10 are out and b, r11 counts what is left of n."""
    width = tile * shape.n_unit
    n_bytes = FLOAT_BYTES if shape.style == "outer" else shape.out_n
    b_bytes = ITEM_BYTES[shape.kind] if shape.style == "outer" else shape.b_n
    start, end = next(names), next(names)
    asm.label(start)
    asm.compare_const(R11, width)
    asm.jump("jl", end)
    asm.load(R13, _get_argument("address of t"))
    asm.load(R12, Mem(R13))
    asm.load(R13, R9)
    asm.load(R14, R8)
    if shape.style == "dot" and shape.lookup is None:
        fetched = next(
            names
        )  # by the first tile of rows of a, while it waits for its own rows of b
        for t_tile in T_TILES:
            t_end = next(names)
            asm.compare_const(R12, t_tile)
            asm.jump("jl", t_end)
            _emit_tile(asm, shape, tile, t_tile, names, fetches=True)
            asm.jump("jmp", fetched)
            asm.label(t_end)
        asm.label(fetched)
    for t_tile in T_TILES:
        t_start, t_end = next(names), next(names)
        asm.label(t_start)
        asm.compare_const(R12, t_tile)
        asm.jump("jl", t_end)
        _emit_tile(asm, shape, tile, t_tile, names, fetches=False)
        asm.jump("jmp", t_start)
        asm.label(t_end)
    asm.add_const(R8, width * n_bytes)
    asm.add_const(R10, width * b_bytes)
    if shape.lookup is not None and shape.style == "dot":
        asm.add_const(RBX, width * shape.lookup.step)
    asm.add_const(R11, -width)
    asm.jump("jmp", start)
    asm.label(end)


def _emit_tile(
    asm: Assembler, shape: MatmulShape, tile: int, ts: int, names: Iterator[str], *, fetches: bool
) -> None:
    """Emit the sums of a tile of n with ts rows of a; r13 and r14 go on to the next rows."""
    group = min(tile, _get_group(shape, ts))
    for first in range(0, tile, group):
        rows = range(first, first + group)
        if shape.style == "outer":
            _emit_outer(asm, shape, rows, ts, next(names))
        elif shape.lookup is None:
            _emit_dot(asm, shape, rows, ts, next(names), fetches=fetches)
        else:
            _emit_lookup_dot(asm, shape, shape.lookup, rows, ts)
    asm.add_const(R13, ts * shape.a_t)
    asm.add_const(R14, ts * shape.out_t)
    asm.add_const(R12, -ts)


def _get_group(shape: MatmulShape, ts: int) -> int:
    """Return how many rows of b are summed at once: what the 16 registers hold beside the rest."""
    if shape.lookup is not None and shape.style == "dot":
        return len(_POINTERS)
    if ts == 1:
        return 8
    return 2 if shape.kind in BLOCK_BYTES else 4


def _emit_row_address(asm: Assembler, lookup: LookupShape, register: int, number: Mem) -> None:
    """Emit the address of the row of b with a number, brought into bounds."""
    asm.load_int32(register, number)
    if lookup.bound == "mask":
        asm.and_const(register, lookup.largest)
    else:
        asm.compare_const(register, 0)
        asm.load_if("l", register, _get_argument("zero"))
        asm.compare_const(register, lookup.largest)
        asm.load_if("g", register, _get_argument("largest"))
    asm.multiply_const(register, lookup.b_row)
    asm.add(register, R10)


def _emit_lookup_dot(
    asm: Assembler, shape: MatmulShape, lookup: LookupShape, rows: range, ts: int
) -> None:
    """Emit len(rows) * ts sums over all k, without a loop: rows are those of heads, and short."""
    for register in range(len(rows) * ts):
        asm.zero(register)
    for pointer, row in zip(_POINTERS, rows, strict=False):
        _emit_row_address(asm, lookup, pointer, Mem(RBX, row * lookup.step))
    for k in range(0, shape.length, LANES):
        for t in range(ts):
            asm.load_vector(_X + t, Mem(R13, t * shape.a_t + k * FLOAT_BYTES))
        for place in range(len(rows)):
            source = Mem(_POINTERS[place], k * FLOAT_BYTES)
            if ts == 1:
                asm.multiply_add(place, _X, source)
                continue
            asm.load_vector(_W, source)
            for t in range(ts):
                asm.multiply_add(place * ts + t, _X + t, _W)
    _emit_sums(asm, shape, rows, ts)


def _emit_dot(
    asm: Assembler, shape: MatmulShape, rows: range, ts: int, name: str, *, fetches: bool
) -> None:
    """Emit len(rows) * ts sums over k, and their storing; ``fetches`` the rows of b to come."""
    sums = len(rows) * ts
    for register in range(sums):
        asm.zero(register)
    asm.load(RCX, R10)
    asm.load(RDX, R13)
    if shape.kind in BLOCK_BYTES:
        count, b_bytes, elements = shape.length // BLOCK, BLOCK_BYTES[shape.kind], BLOCK
    else:
        vectors = next(v for v in (4, 2, 1) if shape.length % (v * LANES) == 0)
        elements = vectors * LANES
        count, b_bytes = shape.length // elements, elements * ITEM_BYTES[shape.kind]
    if shape.kind == "q4_0":
        asm.set_ones(_W)
        asm.shift_right(_FIFTEENS, _W, 28)
        asm.shift_left(_get_minus_eights(ts), _W, 3)
    asm.set_const(RAX, count)
    asm.label(name)
    if fetches:
        for row in rows:
            for line in range(0, b_bytes, LINE_BYTES):
                asm.prefetch(Mem(RCX, (row + AHEAD) * shape.b_n + line))
    if shape.kind in BLOCK_BYTES:
        _emit_block(asm, shape, rows, ts)
    else:
        for vector in range(elements // LANES):
            _emit_vector(asm, shape, rows, ts, vector)
    asm.add_const(RCX, b_bytes)
    asm.add_const(RDX, elements * FLOAT_BYTES)
    asm.add_const(RAX, -1)
    asm.jump("jnz", name)
    _emit_sums(asm, shape, rows, ts)


def _emit_vector(asm: Assembler, shape: MatmulShape, rows: range, ts: int, vector: int) -> None:
    """Emit eight k: rows * ts multiply-adds. The operands' order decides which NaN survives."""
    for t in range(ts):
        asm.load_vector(_X + t, Mem(RDX, t * shape.a_t + vector * LANES * FLOAT_BYTES))
    for place, row in enumerate(rows):
        source = Mem(RCX, row * shape.b_n + vector * LANES * ITEM_BYTES[shape.kind])
        if shape.kind == "float32" and ts == 1:
            asm.multiply_add(place, _X, source)
            continue
        _emit_widening(asm, shape.kind, _W, source)
        for t in range(ts):
            asm.multiply_add(place * ts + t, _X + t, _W)


def _emit_widening(asm: Assembler, kind: Kind, register: int, source: Mem) -> None:
    if kind == "float32":
        asm.load_vector(register, source)
    elif kind == "float16":
        asm.widen_half(register, source)
    else:
        asm.widen_uint16(register, source)
        asm.shift_left(register, register, 16)


def _emit_block(asm: Assembler, shape: MatmulShape, rows: range, ts: int) -> None:
    """Emit 32 k, of which each row of b has one scale."""
    vectors = range(BLOCK // LANES)
    if ts == 1:
        for vector in vectors:
            asm.load_vector(_BLOCK_X + vector, Mem(RDX, vector * LANES * FLOAT_BYTES))
        for place, row in enumerate(rows):
            _emit_scale(asm, shape, _SCALE, row)
            for vector in vectors:
                _emit_block_widening(asm, shape, _SCALE, row, vector, ts)
                asm.multiply_add(place, _BLOCK_X + vector, _W)
        return
    for place, row in enumerate(rows):
        _emit_scale(asm, shape, _SCALE - place, row)
    for vector in vectors:
        for t in range(ts):
            asm.load_vector(_BLOCK_X + t, Mem(RDX, t * shape.a_t + vector * LANES * FLOAT_BYTES))
        for place, row in enumerate(rows):
            _emit_block_widening(asm, shape, _SCALE - place, row, vector, ts)
            for t in range(ts):
                asm.multiply_add(place * ts + t, _BLOCK_X + t, _W)


def _emit_scale(asm: Assembler, shape: MatmulShape, register: int, row: int) -> None:
    asm.broadcast_16(register, Mem(RCX, row * shape.b_n))
    asm.widen_half(register, register)


def _emit_block_widening(
    asm: Assembler, shape: MatmulShape, scale: int, row: int, vector: int, ts: int
) -> None:
    start = row * shape.b_n + 2
    if shape.kind == "q8_0":
        asm.widen_int8(_W, Mem(RCX, start + vector * LANES))
    else:
        asm.widen_uint8(_W, Mem(RCX, start + vector % 2 * LANES))
        if vector < 2:
            asm.mask(_W, _W, _FIFTEENS)
        else:
            asm.shift_right(_W, _W, 4)
        asm.add_int32(_W, _W, _get_minus_eights(ts))
    asm.convert_int32(_W, _W)
    asm.multiply(_W, _W, scale)


def _get_minus_eights(ts: int) -> int:
    """Return the register with what Q4_0 adds: one that neither scales nor rows of a use."""
    return 13 if ts == 1 else 11


def _emit_sums(asm: Assembler, shape: MatmulShape, rows: range, ts: int) -> None:
    """Emit the adding of lanes and the storing."""
    for t in range(ts):
        if len(rows) % 4 == 0 and shape.out_n == FLOAT_BYTES:
            for place in range(0, len(rows), 4):
                one, two, three, four = (ts * (place + row) + t for row in range(4))
                asm.add_pairs(_X, one, two)
                asm.add_pairs(_X + 1, three, four)
                asm.add_pairs(_X, _X, _X + 1)
                asm.get_upper_half(_X + 1, _X)
                asm.add_half_vectors(_X, _X, _X + 1)
                target = t * shape.out_t + (rows[0] + place) * FLOAT_BYTES
                asm.store_half_vector(_X, Mem(R14, target))
            continue
        for place, row in enumerate(rows):
            register = place * ts + t
            asm.add_pairs(_X, register, register)
            asm.add_pairs(_X, _X, _X)
            asm.get_upper_half(_X + 1, _X)
            asm.add_half_vectors(_X, _X, _X + 1)
            asm.store_scalar(_X, Mem(R14, t * shape.out_t + row * shape.out_n))


def _emit_outer(asm: Assembler, shape: MatmulShape, vectors: range, ts: int, name: str) -> None:
    """Emit len(vectors) * 8 * ts sums over k, one per lane, and their storing."""
    for register in range(len(vectors) * ts):
        asm.zero(register)
    asm.load(RCX, R10 if shape.lookup is None else RBX)
    asm.load(RDX, R13)
    if shape.lookup is None:
        asm.set_const(RAX, shape.length)
    else:
        asm.load(RAX, RBP)
    asm.label(name)
    base = RCX
    if shape.lookup is not None:
        base = RSI
        _emit_row_address(asm, shape.lookup, base, Mem(RCX))
    for t in range(ts):
        asm.broadcast(_X + t, Mem(RDX, t * shape.a_t))
    for place, vector in enumerate(vectors):
        _emit_widening(asm, shape.kind, _W, Mem(base, vector * LANES * ITEM_BYTES[shape.kind]))
        for t in range(ts):
            asm.multiply_add(place * ts + t, _X + t, _W)
    asm.add_const(RCX, shape.b_k if shape.lookup is None else shape.lookup.step)
    asm.add_const(RDX, shape.a_k)
    asm.add_const(RAX, -1)
    asm.jump("jnz", name)
    for t in range(ts):
        for place, vector in enumerate(vectors):
            target = Mem(R14, t * shape.out_t + vector * LANES * FLOAT_BYTES)
            asm.store_vector(place * ts + t, target)
