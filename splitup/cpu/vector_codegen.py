"""Machine code for kernels that compute along rows, eight numbers at a time, on x86-64-v3.

Every operation is the graph's own, rounded once, so a kernel without a reduction gives the bits of
tinygrad's scalar one. A sum has eight lanes: lane i adds the numbers i, i + 8, … one after the
other, and at the end they are added as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), like those of
``splitup.cpu.matmul_codegen``. A maximum has eight lanes too, of which the upper ones are compared
with the lower ones three times; a later number replaces an earlier one only if it is greater.

Attention masks with one number whatever is behind the sequence, and softmax would compute its
exponential again and again. So a long kernel of one row stores its last result once more where the
next eight numbers are the same as the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
    Assembler,
    Mem,
)
from splitup.cpu.decoder_codegen import Constants
from splitup.cpu.matmul_shape import LANES, VECTOR_REGISTERS

POINTER_REGISTERS: Final = (R8, R9, R10, R11, R13, R14, RBX, RBP)
COUNTER_REGISTERS: Final = (RSI, RDX, RCX, R12)
ROW_LOADS: Final = ("float32", "float16", "one float32")
REGISTERS: Final = VECTOR_REGISTERS - 3  # for instructions
LONG: Final = 16  # instructions from which on equal numbers are looked for
_SUM, _LAST, _OTHER = range(REGISTERS, VECTOR_REGISTERS)

Reduction = Literal["", "sum", "maximum"]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address that walks through an argument. Steps are in bytes."""

    argument: int
    step: int  # from one number of a row to the next, 0 if all read the same one
    strides: tuple[int, ...]  # along the loops around rows


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


def assemble_vectors(shape: VectorShape) -> bytes:
    """Return a function of the address of a block: arguments, and the address of the symbol."""
    asm, constants = Assembler(), Constants()
    for register in CALLEE_SAVED:
        asm.push(register)
    constants.emit_address(asm)
    for register, pointer in zip(POINTER_REGISTERS, shape.pointers, strict=False):
        asm.load(register, Mem(RDI, 8 * pointer.argument))
    for level, size in enumerate(shape.sizes):
        counter = COUNTER_REGISTERS[level]
        if size:
            asm.set_const(counter, size)
        else:
            asm.load(counter, Mem(RDI, 8 * shape.arguments))
            asm.load(counter, Mem(counter))
            asm.compare_const(counter, 1)
            asm.jump("jl", "end")
        asm.label(f"loop {level}")
    _emit_row(asm, shape, constants)
    for level in reversed(range(len(shape.sizes))):
        for register, pointer in zip(POINTER_REGISTERS, shape.pointers, strict=False):
            asm.add_const(register, pointer.strides[level] - _get_advance(shape, pointer, level))
        asm.add_const(COUNTER_REGISTERS[level], -1)
        asm.jump("jnz", f"loop {level}")
    asm.label("end")
    asm.forget_upper_halves()
    for register in reversed(CALLEE_SAVED):
        asm.pop(register)
    asm.ret()
    constants.emit(asm)
    return asm.finish()


def _get_advance(shape: VectorShape, pointer: Pointer, level: int) -> int:
    """Return by how much a pointer has advanced at the end of what a loop contains."""
    if level + 1 < len(shape.sizes):
        return shape.sizes[level + 1] * pointer.strides[level + 1]
    return shape.vectors * LANES * pointer.step


def _emit_row(asm: Assembler, shape: VectorShape, constants: Constants) -> None:
    if shape.reduction == "sum":
        asm.zero(_SUM)
    elif shape.reduction:
        asm.load_vector(_SUM, constants.get((-math.inf,) * LANES))
    asm.set_const(RAX, shape.vectors)
    target = Mem(POINTER_REGISTERS[0], shape.offset)
    source = _find_only_row(shape)
    if source is None:
        asm.label("row")
    else:
        asm.jump("jmp", "compute")
        asm.label("row")
        asm.compare_int32(_OTHER, _LAST, source)
        asm.get_signs(RDI, _OTHER)
        asm.compare_const(RDI, 2**LANES - 1)
        asm.jump("jnz", "compute")
        asm.store_vector(_SUM, target)
        asm.jump("jmp", "next")
        asm.label("compute")
        asm.load_vector(_LAST, source)
    result = _emit_instructions(asm, shape, constants)
    if shape.reduction == "sum":
        asm.add_floats(_SUM, _SUM, result)
    elif shape.reduction:
        asm.take_greater(_SUM, result, _SUM)
    else:
        asm.store_vector(result, target)
    if source is not None:
        asm.combine(_SUM, result, result)
        asm.label("next")
    for register, pointer in zip(POINTER_REGISTERS, shape.pointers, strict=False):
        asm.add_const(register, LANES * pointer.step)
    asm.add_const(RAX, -1)
    asm.jump("jnz", "row")
    if shape.reduction == "sum":
        asm.add_pairs(_SUM, _SUM, _SUM)
        asm.add_pairs(_SUM, _SUM, _SUM)
        asm.get_upper_half(_OTHER, _SUM)
        asm.add_half_vectors(_SUM, _SUM, _OTHER)
    elif shape.reduction:
        asm.get_upper_half(_OTHER, _SUM)
        asm.take_greater(_SUM, _OTHER, _SUM)
        for lanes in (0b1110, 0b0001):  # 2 and 3 to the place of 0 and 1, then 1 to that of 0
            asm.arrange(_OTHER, _SUM, lanes)
            asm.take_greater(_SUM, _OTHER, _SUM)
    if shape.reduction:
        asm.store_scalar(_SUM, target)


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
