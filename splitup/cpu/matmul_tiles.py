"""Machine code for the sums of one tile of a matmul (``splitup.cpu.matmul_codegen``).

Registers on entry: r10 is the address of b, r13 of the rows of a, r14 of the rows of out; rbx is
the address of the row numbers where b is looked up, rbp how many of them count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from splitup.cpu.assembler import (
    R8,
    R9,
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
from splitup.cpu.decoder_codegen import Constants, emit_decoder
from splitup.cpu.matmul_shape import (
    FLOAT_BYTES,
    ITEM_BYTES,
    LANES,
    OFFSETS,
    VECTOR_REGISTERS,
    BlockDecoder,
    LookupShape,
    MatmulShape,
    ProductKind,
)

LINE_BYTES: Final = 64  # of a cache
AHEAD: Final = 8  # rows of b to prefetch: hardware does not follow so many short streams in time
_X, _W = 12, 15  # vector registers; sums are in those with lower numbers
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


def emit_decoded_tile(
    asm: Assembler,
    shape: MatmulShape,
    decoder: BlockDecoder,
    constants: Constants,
    tile: int,
    names: Iterator[str],
) -> None:
    """Emit the sums of a tile of n with the one row of a at r9; r8 is the address of out."""
    group = min(tile, 4)  # registers that hold no sums hold constants
    fetched = group * decoder.nbytes  # of later rows, which follow each other, with every block
    asm.load(R14, R8)
    for first in range(0, tile, group):
        rows, name = range(first, first + group), next(names)
        for register in range(group):
            asm.zero(register)
        kept = constants.emit_kept(asm, decoder, range(group, VECTOR_REGISTERS - decoder.registers))
        asm.load(RCX, R10)
        asm.load(RDX, R9)
        asm.load(RBX, R10)
        asm.add_const(RBX, (first + AHEAD) * shape.b_n)
        asm.set_const(RAX, shape.length // decoder.elements)
        asm.label(name)
        for line in range(0, fetched, LINE_BYTES):
            asm.prefetch(Mem(RBX, line))
        asm.add_const(RBX, fetched)
        for place, row in enumerate(rows):

            def add(register: int, vector: int, place: int = place) -> None:
                source = Mem(RDX, vector * LANES * FLOAT_BYTES)
                asm.multiply_add(place, register, source)

            emit_decoder(asm, decoder, constants, kept, Mem(RCX, row * shape.b_n), add)
        asm.add_const(RCX, decoder.nbytes)
        asm.add_const(RDX, decoder.elements * FLOAT_BYTES)
        asm.count_down(RAX, name)
        _emit_sums(asm, shape, rows, 1)


def _get_group(shape: MatmulShape, ts: int) -> int:
    """Return how many rows of b are summed at once: as many sums as the 16 registers hold."""
    if shape.lookup is not None and shape.style == "dot":
        return len(_POINTERS)
    return 8 if ts == 1 else 4


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
            source = Mem(_POINTERS[place], k * ITEM_BYTES[shape.kind])
            if shape.kind == "float32" and ts == 1:
                asm.multiply_add(place, _X, source)
                continue
            _emit_widening(asm, shape.kind, _W, source)
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
    vectors = next(v for v in (4, 2, 1) if shape.length % (v * LANES) == 0)
    elements = vectors * LANES
    b_bytes = elements * ITEM_BYTES[shape.kind]
    asm.set_const(RAX, shape.length // elements)
    asm.label(name)
    if fetches:
        for row in rows:
            for line in range(0, b_bytes, LINE_BYTES):
                asm.prefetch(Mem(RCX, (row + AHEAD) * shape.b_n + line))
    for vector in range(vectors):
        _emit_vector(asm, shape, rows, ts, vector)
    asm.add_const(RCX, b_bytes)
    asm.add_const(RDX, elements * FLOAT_BYTES)
    asm.count_down(RAX, name)
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


def _emit_widening(asm: Assembler, kind: ProductKind, register: int, source: Mem) -> None:
    if kind == "float32":
        asm.load_vector(register, source)
    elif kind == "float16":
        asm.widen_half(register, source)
    elif kind == "int8":
        asm.widen_int8(register, source)
        asm.convert_int32(register, register)
    else:
        asm.widen_uint16(register, source)
        asm.shift_left(register, register, 16)


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
    asm.count_down(RAX, name)
    for t in range(ts):
        for place, vector in enumerate(vectors):
            target = Mem(R14, t * shape.out_t + vector * LANES * FLOAT_BYTES)
            asm.store_vector(place * ts + t, target)
