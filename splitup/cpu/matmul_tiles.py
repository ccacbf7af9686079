"""Machine code for the sums of one tile of a matmul (``splitup.cpu.matmul_codegen``).

Registers on entry: r10 is the address of b, r13 of the rows of a, r14 of the rows of out; rbx is
the address of the row numbers where b is looked up, rbp how many of them count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from splitup.cpu.assembler import (
    R10,
    R12,
    R13,
    R14,
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
from splitup.cpu.matmul_shape import (
    BLOCK,
    BLOCK_BYTES,
    FLOAT_BYTES,
    ITEM_BYTES,
    LANES,
    OFFSETS,
    Kind,
    LookupShape,
    MatmulShape,
)

LINE_BYTES: Final = 64  # of a cache
AHEAD: Final = 8  # rows of b to prefetch: hardware does not follow so many short streams in time
_X, _SCALE, _W = 12, 14, 15  # vector registers; sums are in those with lower numbers
_BLOCK_X = 8  # rows of a, for blocks
_FIFTEENS = 12
_POINTERS = (RAX, RCX, RDX, RSI)  # rows of b that are looked up


def get_argument(name: str) -> Mem:
    """Return where an argument stands; rdi is the address of the block."""
    return Mem(RDI, OFFSETS[name])


def emit_tile(
    asm: Assembler, shape: MatmulShape, tile: int, ts: int, names: Iterator[str], *, fetches: bool
) -> None:
    """Emit the sums of a tile of n with ts rows of a; r13 and r14 advance to the next rows."""
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
    """Return how many rows of b are summed at once: as many sums as the 16 registers hold."""
    if shape.lookup is not None and shape.style == "dot":
        return len(_POINTERS)
    if ts == 1:
        return 8
    return 2 if shape.kind in BLOCK_BYTES else 4


def _emit_row_address(asm: Assembler, lookup: LookupShape, register: int, number: Mem) -> None:
    """Emit the address of the row of b with a number, which is masked or clamped."""
    asm.load_int32(register, number)
    if lookup.bound == "mask":
        asm.and_const(register, lookup.largest)
    else:
        asm.compare_const(register, 0)
        asm.load_if("l", register, get_argument("zero"))
        asm.compare_const(register, lookup.largest)
        asm.load_if("g", register, get_argument("largest"))
    asm.multiply_const(register, lookup.b_row)
    asm.add(register, R10)


def _emit_lookup_dot(
    asm: Assembler, shape: MatmulShape, lookup: LookupShape, rows: range, ts: int
) -> None:
    """Emit len(rows) * ts sums over all k, unrolled: such rows are those of heads, and short."""
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
    """Emit len(rows) * ts sums over k and their storing; ``fetches`` prefetches the next rows."""
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
    """Emit a block of 32 k, which has one scale per row of b."""
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
    """Return the register of the -8 that Q4_0 adds; neither scales nor rows of a use it."""
    return 13 if ts == 1 else 11


def _emit_sums(asm: Assembler, shape: MatmulShape, rows: range, ts: int) -> None:
    """Emit adding the lanes of every sum, and storing it."""
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
