"""Machine code for kernels that compute along rows, eight numbers at a time, on x86-64-v3.

Every operation is the graph's own, rounded once, so a kernel without a reduction gives the bits of
tinygrad's scalar one. A sum adds one number after the other, so zeros between them change nothing:
softmax gives a row the same bits wherever in the cache lies what it sees. A later number replaces
the maximum only if it is greater, so NaN never does; of 0 and -0 the first one counts.

Attention masks with one number whatever is behind the sequence, and softmax would compute its
exponential again and again. So a long kernel of one row stores its last result once more where the
next eight numbers are the same as the last ones; and a sum passes over eight zeros at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from splitup.cpu.assembler import (
    CALLEE_SAVED,
    R8,
    R9,
    R10,
    R11,
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
    RSP,
    Assembler,
    Mem,
)
from splitup.cpu.decoder_codegen import Constants
from splitup.cpu.matmul_shape import FLOAT_BYTES, LANES, VECTOR_REGISTERS
from splitup.cpu.threads import cut

POINTER_REGISTERS: Final = (R8, R9, R10, R11, R13, R14, RBX, RBP)
COUNTER_REGISTERS: Final = (RSI, RDX, RCX, R12)
ROW_LOADS: Final = ("float32", "float16", "one float32")
REGISTERS: Final = VECTOR_REGISTERS - 3  # for instructions
THREAD_WORK: Final = 2**12  # instructions of one row of a step below which waiting costs more
LONG: Final = 16  # instructions from which on equal numbers are looked for
_KEPT, _LAST, _OTHER = range(REGISTERS, VECTOR_REGISTERS)

Reduction = Literal["", "sum", "maximum"]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address that walks through an argument. Steps are in bytes."""

    argument: int
    step: int  # from one number of a row to the next, 0 if all read the same one
    strides: tuple[int, ...]  # along the loops around rows
    start: int = 0  # its distance from the argument at first


@dataclass(frozen=True, slots=True)
class VectorShape:
    """What the machine code depends on.

    An instruction is a name, the register of the result, and operands: a pointer and an offset in
    bytes for ``ROW_LOADS``, otherwise registers and constants of eight lanes. The result of the
    last one is stored at the first pointer, or reduced and stored there.
    """

    arguments: int
    pointers: tuple[Pointer, ...]
    offset: int  # of the result
    sizes: tuple[int, ...]  # of the loops around rows; 0 is the symbol's value, outermost
    vectors: int  # of a row
    reduction: Reduction
    instructions: tuple[tuple[Any, ...], ...]


def divide_vectors(shape: VectorShape, threads: int) -> list[VectorShape]:
    """Return at most so many kernels that together do what this one does."""
    work = math.prod(filter(None, shape.sizes)) * shape.vectors * len(shape.instructions)
    if threads < 2 or work < THREAD_WORK:
        return [shape]
    for level, size in enumerate(shape.sizes):
        if size >= threads:
            strides = [pointer.strides[level] for pointer in shape.pointers]
            return [
                _take_part(shape, strides, first, sizes=_replace(shape.sizes, level, end - first))
                for first, end in cut(size, threads)
            ]
    if shape.reduction or shape.vectors < threads:
        return [shape]
    steps = [LANES * pointer.step for pointer in shape.pointers]
    return [
        _take_part(shape, steps, first, vectors=end - first)
        for first, end in cut(shape.vectors, threads)
    ]


def _take_part(shape: VectorShape, strides: Sequence[int], first: int, **sizes: Any) -> VectorShape:
    pointers = [
        replace(pointer, start=first * stride)
        for pointer, stride in zip(shape.pointers, strides, strict=True)
    ]
    return replace(shape, pointers=tuple(pointers), **sizes)


def _replace(sizes: Sequence[int], level: int, size: int) -> tuple[int, ...]:
    return (*sizes[:level], size, *sizes[level + 1 :])


def assemble_vectors(shape: VectorShape) -> bytes:
    """Return a function of the address of a block: arguments, and the address of the symbol."""
    asm, constants = Assembler(), Constants()
    with asm.save(CALLEE_SAVED):
        constants.emit_address(asm)
        for register, pointer in zip(POINTER_REGISTERS, shape.pointers, strict=False):
            asm.load(register, Mem(RDI, 8 * pointer.argument))
            asm.add_const(register, pointer.start)
        for level, size in enumerate(shape.sizes):
            counter = COUNTER_REGISTERS[level]
            if size:
                asm.set_const(counter, size)
            else:
                asm.load(counter, Mem(RDI, 8 * shape.arguments))
                asm.load(counter, Mem(counter))
                asm.jump_if(counter, "jl", 1, "end")
            asm.label(f"loop {level}")
        _emit_row(asm, shape, constants)
        for level in reversed(range(len(shape.sizes))):
            for register, pointer in zip(POINTER_REGISTERS, shape.pointers, strict=False):
                asm.add_const(
                    register, pointer.strides[level] - _get_advance(shape, pointer, level)
                )
            asm.add_const(COUNTER_REGISTERS[level], -1)
            asm.jump("jnz", f"loop {level}")
        asm.label("end")
    constants.emit(asm)
    return asm.finish()


def _get_advance(shape: VectorShape, pointer: Pointer, level: int) -> int:
    """Return by how much a pointer has advanced at the end of what a loop contains."""
    if level + 1 < len(shape.sizes):
        return shape.sizes[level + 1] * pointer.strides[level + 1]
    return shape.vectors * LANES * pointer.step


def _emit_row(asm: Assembler, shape: VectorShape, constants: Constants) -> None:
    if shape.reduction == "maximum":
        _emit_maximum(asm, shape, constants)
    elif shape.reduction:
        _emit_in_order(asm, shape, constants)
    else:
        _emit_map(asm, shape, constants)


def _emit_map(asm: Assembler, shape: VectorShape, constants: Constants) -> None:
    """Emit storing the results of a row."""
    target = Mem(POINTER_REGISTERS[0], shape.offset)
    source = _find_only_row(shape)
    asm.set_const(RAX, shape.vectors)
    if source is None:
        asm.label("row")
    else:
        asm.jump("jmp", "compute")
        asm.label("row")
        asm.compare_int32(_OTHER, _LAST, source)
        asm.get_signs(RDI, _OTHER)
        asm.jump_if(RDI, "jnz", 2**LANES - 1, "compute")
        asm.store_vector(_KEPT, target)
        asm.jump("jmp", "next")
        asm.label("compute")
        asm.load_vector(_LAST, source)
    result = _emit_instructions(asm, shape, constants)
    asm.store_vector(result, target)
    if source is not None:
        asm.combine(_KEPT, result, result)
        asm.label("next")
    _emit_next(asm, shape, "row")


def _emit_next(asm: Assembler, shape: VectorShape, label: str) -> None:
    """Emit going to the next eight numbers of a row, if there are more."""
    for register, pointer in zip(POINTER_REGISTERS, shape.pointers, strict=False):
        asm.add_const(register, LANES * pointer.step)
    asm.count_down(RAX, label)


def _emit_in_order(asm: Assembler, shape: VectorShape, constants: Constants) -> None:
    """Emit reducing a row one number after the other."""
    is_sum = shape.reduction == "sum"
    names = ("sum", "zeros") if is_sum else ("maximum in order", "")
    if is_sum:
        asm.zero(_KEPT)
    else:
        asm.load_vector(_KEPT, constants.get((-math.inf,) * LANES))
    asm.load(RDI, RSP)  # below which the ABI lets a function keep 128 bytes
    asm.set_const(RAX, shape.vectors)
    asm.label(names[0])
    result = _emit_instructions(asm, shape, constants)
    if is_sum:
        asm.test_bits(result)
        asm.jump("jz", names[1])
    asm.store_vector(result, Mem(RDI, -LANES * FLOAT_BYTES))
    for lane in range(-LANES, 0):
        if is_sum:
            asm.add_scalar(_KEPT, _KEPT, Mem(RDI, lane * FLOAT_BYTES))
        else:
            asm.broadcast(_OTHER, Mem(RDI, lane * FLOAT_BYTES))
            asm.take_greater(_KEPT, _OTHER, _KEPT)
    if is_sum:
        asm.label(names[1])
    _emit_next(asm, shape, names[0])
    asm.store_scalar(_KEPT, Mem(POINTER_REGISTERS[0], shape.offset))


def _emit_maximum(asm: Assembler, shape: VectorShape, constants: Constants) -> None:
    """Emit the maximum of a row in eight lanes; once more in order if it is a zero."""
    asm.load_vector(_KEPT, constants.get((-math.inf,) * LANES))
    asm.set_const(RAX, shape.vectors)
    asm.label("maximum")
    result = _emit_instructions(asm, shape, constants)
    asm.take_greater(_KEPT, result, _KEPT)
    _emit_next(asm, shape, "maximum")
    asm.get_upper_half(_OTHER, _KEPT)
    asm.take_greater(_KEPT, _OTHER, _KEPT)
    for lanes in (0b1110, 0b0001):  # 2 and 3 to the place of 0 and 1, then 1 to that of 0
        asm.arrange(_OTHER, _KEPT, lanes)
        asm.take_greater(_KEPT, _OTHER, _KEPT)
    asm.store_scalar(_KEPT, Mem(POINTER_REGISTERS[0], shape.offset))
    asm.zero(_OTHER)
    asm.is_not(_KEPT, _KEPT, _OTHER)
    asm.get_signs(RDI, _KEPT)
    asm.and_const(RDI, 1)
    asm.jump("jnz", "done")
    for register, pointer in zip(POINTER_REGISTERS, shape.pointers, strict=False):
        asm.add_const(register, -shape.vectors * LANES * pointer.step)
    _emit_in_order(asm, shape, constants)
    asm.label("done")


def _find_only_row(shape: VectorShape) -> Mem | None:
    """Return where a long kernel without a reduction reads its numbers, if that is one row."""
    if shape.reduction or len(shape.instructions) < LONG:
        return None
    rows = {
        (name, *operands)
        for name, _, *operands in shape.instructions
        if name in ROW_LOADS and name != "one float32"
    }
    if len(rows) != 1:
        return None
    name, pointer, offset = rows.pop()
    return Mem(POINTER_REGISTERS[pointer], offset) if name == "float32" else None


def _emit_instructions(asm: Assembler, shape: VectorShape, constants: Constants) -> int:
    target = 0
    for name, target, *operands in shape.instructions:
        if name in ROW_LOADS:
            pointer, offset = operands
            _LOADS[name](asm, target, Mem(POINTER_REGISTERS[pointer], offset))
        else:
            sources = [constants.get(one) if isinstance(one, tuple) else one for one in operands]
            _EMITTERS[name](asm, target, *sources)
    return target


_LOADS: Final[dict[str, Callable[[Assembler, int, Mem], None]]] = {
    "float32": Assembler.load_vector,
    "float16": Assembler.widen_half,
    "one float32": Assembler.broadcast,
}
_EMITTERS: Final[dict[str, Callable[..., None]]] = {
    "constant": Assembler.load_vector,
    "and": Assembler.mask,
    "or": Assembler.combine,
    "xor": Assembler.differ,
    "float": Assembler.convert_int32,
    "truncate": Assembler.truncate,
    "square root": Assembler.square_root,
    "add": Assembler.add_floats,
    "subtract": Assembler.subtract_floats,
    "multiply": Assembler.multiply,
    "divide": Assembler.divide,
    "greater": Assembler.take_greater,
    "is less": Assembler.is_less,
    "is not": Assembler.is_not,
    "add int32": Assembler.add_int32,
    "multiply int32": Assembler.multiply_int32,
    "is greater int32": Assembler.is_greater_int32,
    "is equal int32": Assembler.compare_int32,
    "shift left": Assembler.shift_lanes_left,
    "shift right": Assembler.shift_lanes_right,
    "shift right signed": Assembler.shift_lanes_right_signed,
    "choose": Assembler.blend,
}
