"""Machine code for matmuls on x86-64-v3, in which the order of every sum is fixed.

A matmul is ``out[t, n] = sum over k of a[t, k] * b[n, k]`` for every entry of a table of offsets
(one per head, for example); ``a`` and ``out`` are float32, ``b`` is float32, float16, bfloat16,
int8 or blocks that ``splitup.cpu.decoder_codegen`` decodes. The rows of a ``b`` of numbers may be
**looked up**: an int32 array holds the number of the row of ``b`` for every n (style "dot") or k
("outer"), and there may be one such array per row.

There are two styles:

- **dot**: k is contiguous in both. A sum has eight lanes; lane i adds the products of k = i, i + 8,
  … one after the other, each with one rounding (fused multiply-add). At the end the lanes are
  added as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
- **outer**: n is contiguous in ``b`` and ``out``. Each sum is one lane, k ascends.

So the bits of an output depend on its row of ``a`` and its row of ``b`` alone: not on addresses, on
the number of rows, on the place in a tile, or on the number of threads.

The speed comes from tiles: 4 rows of ``b`` by 3 of ``a`` keep 12 sums in registers, enough to hide
the latency of the additions, and read a row of ``b`` once for three of ``a``; a single row of ``a``
is multiplied by 8 rows of ``b``. The first tile of ``a`` also prefetches the next rows of ``b``.

This module emits the loops; ``splitup.cpu.matmul_tiles`` emits the sums within them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

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
    RSP,
    Assembler,
    Mem,
)
from splitup.cpu.decoder_codegen import Constants, emit_decoder
from splitup.cpu.matmul_shape import (
    FLOAT_BYTES,
    INT_BYTES,
    ITEM_BYTES,
    LANES,
    VECTOR_REGISTERS,
    BlockDecoder,
    LookupShape,
    MatmulShape,
)
from splitup.cpu.matmul_tiles import emit_decoded_tile, emit_tile, get_argument

N_TILES: Final = (8, 4, 1)  # rows of b; in the style "outer", vectors of n
T_TILES: Final = (3, 2, 1)
DECODED_BYTES: Final = 2**18  # of rows of b on the stack: they stay in the second cache
TABLE_ENTRY: Final = 3  # bytes to add to out, a and b


def assemble(shape: MatmulShape) -> bytes:
    """Return a function of one argument, the address of the block of ``ARGUMENTS``."""
    asm, constants = Assembler(), Constants()
    names = (f"loop{number}" for number in itertools.count())
    with asm.save(CALLEE_SAVED):
        asm.load(RSI, get_argument("table"))
        asm.load(RBP, get_argument("entries"))
        asm.label("entry")
        for place, register in enumerate((R8, R9, R10)):
            asm.load(register, Mem(RDI, 8 * place))
            asm.add(register, Mem(RSI, 8 * place))
        if shape.decoder is not None:
            _emit_decoded_loops(asm, shape, shape.decoder, constants, names)
        elif shape.lookup is None:
            _emit_n_loops(asm, shape, names)
        else:
            _emit_rows(asm, shape, shape.lookup, names)
        asm.add_const(RSI, 8 * TABLE_ENTRY)
        asm.count_down(RBP, "entry")
    constants.emit(asm)
    return asm.finish()


def _emit_decoded_loops(
    asm: Assembler,
    shape: MatmulShape,
    decoder: BlockDecoder,
    constants: Constants,
    names: Iterator[str],
) -> None:
    """Emit the loops over tiles of n. A single row of a is multiplied with b in registers.

    For more rows of a, those of b are decoded to the stack, once for all.
    """
    row_bytes = shape.length * FLOAT_BYTES
    plain = replace(shape, kind="float32", b_n=row_bytes, decoder=None)
    constants.emit_address(asm)
    asm.load(R11, get_argument("n"))
    for tile in N_TILES:
        if tile > 1 and tile * row_bytes > DECODED_BYTES:
            continue
        start, end, many, done = (next(names) for _ in range(4))
        asm.label(start)
        asm.jump_if(R11, "jl", tile, end)
        asm.load(RAX, get_argument("address of t"))
        asm.load(RAX, Mem(RAX))
        asm.jump_if(RAX, "jnz", 1, many)
        emit_decoded_tile(asm, shape, decoder, constants, tile, names)
        asm.add_const(R10, tile * shape.b_n)
        asm.jump("jmp", done)
        asm.label(many)
        asm.add_const(RSP, -tile * row_bytes)
        _emit_decoded_rows(asm, shape, decoder, constants, tile, names)
        asm.load(RAX, RSP)
        asm.push(R10)
        asm.load(R10, RAX)
        _emit_t_loops(asm, plain, tile, names)
        asm.pop(R10)
        asm.add_const(RSP, tile * row_bytes)
        asm.label(done)
        asm.add_const(R8, tile * shape.out_n)
        asm.add_const(R11, -tile)
        asm.jump("jmp", start)
        asm.label(end)


def _emit_decoded_rows(
    asm: Assembler,
    shape: MatmulShape,
    decoder: BlockDecoder,
    constants: Constants,
    rows: int,
    names: Iterator[str],
) -> None:
    """Emit decoding rows of b to the stack; r10 advances to the next."""
    row, block = next(names), next(names)
    kept = constants.emit_kept(asm, decoder, range(VECTOR_REGISTERS - decoder.registers))
    asm.load(RDX, RSP)
    asm.set_const(R14, rows)
    asm.label(row)
    asm.load(RCX, R10)
    asm.set_const(RAX, shape.length // decoder.elements)
    asm.label(block)

    def store(register: int, vector: int) -> None:
        asm.store_vector(register, Mem(RDX, vector * LANES * FLOAT_BYTES))

    emit_decoder(asm, decoder, constants, kept, Mem(RCX), store)
    asm.add_const(RCX, decoder.nbytes)
    asm.add_const(RDX, decoder.elements * FLOAT_BYTES)
    asm.count_down(RAX, block)
    asm.add_const(R10, shape.b_n)
    asm.count_down(R14, row)


def _emit_n_loops(asm: Assembler, shape: MatmulShape, names: Iterator[str]) -> None:
    skips = shape.lookup is not None and shape.style == "dot" and _skips_tail(shape)
    asm.load(R11, RBP if skips else get_argument("n"))
    for tile in N_TILES:
        _emit_n_loop(asm, shape, tile, names)


def _emit_rows(
    asm: Assembler, shape: MatmulShape, lookup: LookupShape, names: Iterator[str]
) -> None:
    """Emit the loop over rows that have arrays of row numbers; rbx is the address of a row's.

    Within, rbp is how many of the numbers count.
    """
    start, end = next(names), next(names)
    for register in (RSI, RBP):
        asm.push(register)
    asm.load(RBX, get_argument("numbers"))
    asm.load(R15, get_argument("address of rows"))
    asm.load(R15, Mem(R15))
    asm.label(start)
    asm.jump_if(R15, "jl", 1, end)
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
    """Return whether the code skips most of a run of equal row numbers at the end of an array.

    Attention names one row of the cache wherever it is masked, so for all places behind the
    sequence. In the style "dot" the results there are equal: one is computed and stored for all. In
    the style "outer" the factors there are +0.0, and adding 0 times one row changes a sum once at
    most, so a few additions give what all would. Either way no bit changes.
    """
    assert shape.lookup is not None
    unit = shape.out_n if shape.style == "dot" else shape.a_k
    return shape.lookup.step == INT_BYTES and unit == FLOAT_BYTES


def _emit_length(asm: Assembler, shape: MatmulShape, names: Iterator[str]) -> None:
    """Emit rbp = how many row numbers to go through: at least eight of the run of equal ones."""
    scan, done = next(names), next(names)
    if shape.style == "dot":
        asm.load(RDX, get_argument("n"))
    else:
        asm.set_const(RDX, shape.length)
    asm.load(RBP, RDX)
    asm.load(RCX, RDX)
    asm.add(RCX, RCX)
    asm.add(RCX, RCX)
    asm.add(RCX, RBX)
    asm.broadcast(0, Mem(RCX, -INT_BYTES))
    asm.label(scan)
    asm.jump_if(RBP, "jl", 2 * LANES, done)
    asm.compare_int32(1, 0, Mem(RCX, -LANES * INT_BYTES))
    asm.get_signs(RAX, 1)
    asm.jump_if(RAX, "jnz", 2**LANES - 1, done)
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
    """Emit ``emit`` for each vector at rax from rbp to rdx, for all t from r13 on."""
    t_start, start, next_t, end = (next(names) for _ in range(4))
    asm.load(R12, get_argument("address of t"))
    asm.load(RCX, R12)
    asm.load(R12, Mem(RCX))
    asm.label(t_start)
    asm.jump_if(R12, "jl", 1, end)
    asm.load(RAX, RBP)
    asm.add(RAX, RAX)
    asm.add(RAX, RAX)
    asm.add(RAX, R13)
    asm.broadcast(0, Mem(RAX, -FLOAT_BYTES))
    asm.load(RCX, RDX)
    asm.subtract(RCX, RBP)
    asm.label(start)
    asm.jump_if(RCX, "jl", LANES, next_t)
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
    """Emit rbp = the whole length unless all factors from rbp on are +0.0."""
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
    """Emit storing the last sum in all places from rbp on."""
    asm.load(RDX, get_argument("n"))
    asm.load(R13, R8)
    _emit_tail_loop(asm, names, shape.out_t, lambda: asm.store_vector(0, Mem(RAX)))


def _emit_n_loop(asm: Assembler, shape: MatmulShape, tile: int, names: Iterator[str]) -> None:
    """Emit the loop over tiles of n; r8 and r10 are out and b, r11 is the rest of n."""
    width = tile * shape.n_unit
    n_bytes = FLOAT_BYTES if shape.style == "outer" else shape.out_n
    b_bytes = ITEM_BYTES[shape.kind] if shape.style == "outer" else shape.b_n
    start, end = next(names), next(names)
    asm.label(start)
    asm.jump_if(R11, "jl", width, end)
    _emit_t_loops(asm, shape, tile, names, fetches=shape.style == "dot" and shape.lookup is None)
    asm.add_const(R8, width * n_bytes)
    asm.add_const(R10, width * b_bytes)
    if shape.lookup is not None and shape.style == "dot":
        asm.add_const(RBX, width * shape.lookup.step)
    asm.add_const(R11, -width)
    asm.jump("jmp", start)
    asm.label(end)


def _emit_t_loops(
    asm: Assembler, shape: MatmulShape, tile: int, names: Iterator[str], *, fetches: bool = False
) -> None:
    """Emit the loops over the rows of a for a tile of n; r13 and r14 are rows of a and out."""
    asm.load(R13, get_argument("address of t"))
    asm.load(R12, Mem(R13))
    asm.load(R13, R9)
    asm.load(R14, R8)
    if fetches:
        # the first tile of rows of a prefetches the next rows of b
        fetched = next(names)
        for t_tile in T_TILES:
            t_end = next(names)
            asm.jump_if(R12, "jl", t_tile, t_end)
            emit_tile(asm, shape, tile, t_tile, names, fetches=True)
            asm.jump("jmp", fetched)
            asm.label(t_end)
        asm.label(fetched)
    for t_tile in T_TILES:
        t_start, t_end = next(names), next(names)
        asm.label(t_start)
        asm.jump_if(R12, "jl", t_tile, t_end)
        emit_tile(asm, shape, tile, t_tile, names, fetches=False)
        asm.jump("jmp", t_start)
        asm.label(t_end)
