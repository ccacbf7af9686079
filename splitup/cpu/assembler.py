"""A small assembler for x86-64 with AVX2, FMA and F16C (the level x86-64-v3).

Registers are numbers as in the encoding (rax 0 … r15 15, ymm0 … ymm15). A memory operand is
``Mem(base, displacement)``. Source of the encodings: Intel SDM volume 2, sections 2.3.5 (VEX) and
3–5; https://www.felixcloutier.com/x86/.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI = range(8)
R8, R9, R10, R11, R12, R13, R14, R15 = range(8, 16)
CALLEE_SAVED: Final = (RBX, RBP, R12, R13, R14, R15)  # System V ABI

_JUMPS: Final = {
    "jmp": b"\xe9",
    "jl": b"\x0f\x8c",
    "jge": b"\x0f\x8d",
    "jnz": b"\x0f\x85",
    "jz": b"\x0f\x84",
}
_MOVES: Final = {"l": 0x4C, "g": 0x4F}
_MAP_0F, _MAP_0F38, _MAP_0F3A = 1, 2, 3
_NONE, _66, _F3, _F2 = range(4)


@dataclass(frozen=True, slots=True)
class Mem:
    """The memory at a register plus an offset; the register is neither rsp nor r12."""

    base: int
    offset: int = 0


# ---- families of instructions ------------------------------------------------------------------

_OfRegister = Callable[["Assembler", int, Mem | int], None]
_OfTwo = Callable[["Assembler", int, int, Mem | int], None]


def _of_register(opcode: int) -> _OfRegister:
    return lambda asm, reg, source: asm._plain(opcode, reg, source)


def _with_const(opcode: int, digit: int) -> Callable[[Assembler, int, int], None]:
    def emit(asm: Assembler, reg: int, value: int) -> None:
        asm._plain(opcode, digit, reg)
        asm.code += struct.pack("<i", value)

    return emit


def _of_one(opcode: int, table: int, prefix: int, *, wide: bool = True) -> _OfRegister:
    """Return what emits a vector instruction of a register, and of memory or another register."""
    return lambda asm, reg, source: asm._vex(opcode, table, prefix, reg, 0, source, wide)


def _of_two(
    opcode: int, table: int, prefix: int, rest: Sequence[int] = (), *, wide: bool = True
) -> _OfTwo:
    """Return what emits a vector instruction with ``reg``, ``first`` and ``second``."""

    def emit(asm: Assembler, reg: int, first: int, second: Mem | int) -> None:
        asm._vex(opcode, table, prefix, reg, first, second, wide)
        asm.code += bytes(rest)

    return emit


@dataclass(slots=True)
class Assembler:
    """Collects machine code; jumps go to labels, which ``finish`` resolves."""

    code: bytearray = field(default_factory=bytearray)
    labels: dict[str, int] = field(default_factory=dict)
    jumps: list[tuple[int, str]] = field(default_factory=list)

    def finish(self) -> bytes:
        """Return the code with all jumps resolved."""
        for place, label in self.jumps:
            struct.pack_into("<i", self.code, place, self.labels[label] - place - 4)
        return bytes(self.code)

    def label(self, name: str) -> None:
        """Give the next instruction the label ``name``."""
        assert name not in self.labels
        self.labels[name] = len(self.code)

    def jump(self, kind: str, label: str) -> None:
        """Jump always, if less or not less (signed: "jl", "jge"), if zero or not ("jz", "jnz")."""
        self.code += _JUMPS[kind] + bytes(4)
        self.jumps.append((len(self.code) - 4, label))

    def jump_if(self, reg: int, kind: str, value: int, label: str) -> None:
        """Jump by comparing a register with a number of 32 bits."""
        self.compare_const(reg, value)
        self.jump(kind, label)

    def count_down(self, reg: int, label: str) -> None:
        """Subtract 1, and jump unless the result is 0."""
        self.add_const(reg, -1)
        self.jump("jnz", label)

    @contextmanager
    def save(self, registers: Sequence[int], *, has_vectors: bool = True) -> Iterator[None]:
        """Emit a function whose body, which the block emits, may change these registers."""
        for register in registers:
            self.push(register)
        yield
        if has_vectors:
            self.forget_upper_halves()
        for register in reversed(registers):
            self.pop(register)
        self.ret()

    # ---- general registers ---------------------------------------------------------------------

    def push(self, reg: int) -> None:
        """Save a 64-bit register on the stack."""
        self.code += (b"\x41" if reg > 7 else b"") + bytes([0x50 | reg & 7])

    def pop(self, reg: int) -> None:
        """Restore a 64-bit register from the stack."""
        self.code += (b"\x41" if reg > 7 else b"") + bytes([0x58 | reg & 7])

    def ret(self) -> None:
        """Return to the caller."""
        self.code += b"\xc3"

    def call(self, reg: int) -> None:
        """Call the function at the address in a register."""
        self.code += (b"\x41" if reg > 7 else b"") + bytes([0xFF, 0xD0 | reg & 7])

    def pause(self) -> None:
        """Tell the processor that this is a loop that waits."""
        self.code += b"\xf3\x90"

    def call_system(self) -> None:
        """Call the kernel; RAX is the number of the call, and RCX and R11 are lost."""
        self.code += b"\x0f\x05"

    def increment_shared(self, target: Mem) -> None:
        """Add 1 to 64 bits of memory that other threads change as well."""
        self.code += b"\xf0"
        self._plain(0xFF, 0, target)

    def add_const(self, reg: int, value: int) -> None:
        """Add a number of 32 bits; sets the flags."""
        if value:
            self._add_const(reg, value)

    _add_const = _with_const(0x81, 0)
    compare_const = _with_const(0x81, 7)  # set the flags as subtracting would
    and_const = _with_const(0x81, 4)  # keep the bits of a number of 31 bits
    set_const = _with_const(0xC7, 0)  # to a number of 31 bits

    def multiply_const(self, reg: int, value: int) -> None:
        """Multiply by a number of 32 bits."""
        self._plain(0x69, reg, reg)
        self.code += struct.pack("<i", value)

    # 64 bits of a register, and of memory or another register
    load = _of_register(0x8B)
    add = _of_register(0x03)
    subtract = _of_register(0x2B)
    compare = _of_register(0x3B)  # set the flags as subtracting would
    load_int32 = _of_register(0x63)  # an int32 with its sign

    def store(self, target: Mem, reg: int) -> None:
        """Move 64 bits to memory."""
        self._plain(0x89, reg, target)

    def load_address(self, reg: int, label: str) -> None:
        """Load the address of a label."""
        self.code += bytes([0x48 | (reg > 7) << 2, 0x8D, 0x05 | (reg & 7) << 3]) + bytes(4)
        self.jumps.append((len(self.code) - 4, label))

    def load_if(self, condition: str, reg: int, source: Mem | int) -> None:
        """Load 64 bits if the last comparison gave less ("l") or greater ("g"), signed."""
        base = source.base if isinstance(source, Mem) else source
        self.code += bytes([0x48 | (reg > 7) << 2 | (base > 7), 0x0F, _MOVES[condition]])
        self._operand(reg, source)

    def prefetch(self, source: Mem) -> None:
        """Prefetch a line of memory into all caches."""
        self.code += (b"\x41" if source.base > 7 else b"") + b"\x0f\x18"
        self._operand(1, source)

    def _plain(self, opcode: int, reg: int, source: Mem | int) -> None:
        base = source.base if isinstance(source, Mem) else source
        self.code += bytes([0x48 | (reg > 7) << 2 | (base > 7), opcode])
        self._operand(reg, source)

    def _operand(self, reg: int, source: Mem | int) -> None:
        """Append ModRM and displacement."""
        if not isinstance(source, Mem):
            self.code.append(0xC0 | (reg & 7) << 3 | source & 7)
            return
        assert source.base & 7 != RSP
        self.code.append(0x80 | (reg & 7) << 3 | source.base & 7)
        self.code += struct.pack("<i", source.offset)

    # ---- vectors -------------------------------------------------------------------------------

    def _vex(
        self,
        opcode: int,
        table: int,
        prefix: int,
        reg: int,
        second: int,
        source: Mem | int,
        wide: bool,
    ) -> None:
        base = source.base if isinstance(source, Mem) else source
        self.code += bytes(
            [
                0xC4,
                (reg <= 7) << 7 | 1 << 6 | (base <= 7) << 5 | table,
                (~second & 15) << 3 | wide << 2 | prefix,
                opcode,
            ]
        )
        self._operand(reg, source)

    def zero(self, reg: int) -> None:
        """Set all lanes to +0.0."""
        self._vex(0x57, _MAP_0F, _NONE, reg, reg, reg, True)

    def shift_left(self, reg: int, source: int, bits: int) -> None:
        """Shift 8 int32 left."""
        self._vex(0x72, _MAP_0F, _66, 6, reg, source, True)
        self.code.append(bits)

    def blend(self, reg: int, first: int, second: int, signs: int) -> None:
        """Take the lanes of ``second`` whose sign is set, and the others of ``first``."""
        self._vex(0x4A, _MAP_0F3A, _66, reg, first, second, True)
        self.code.append(signs << 4)

    def arrange(self, reg: int, source: int, lanes: int) -> None:
        """Load in each half the lanes that two bits each of ``lanes`` name, the lowest first."""
        self._vex(0x04, _MAP_0F3A, _66, reg, 0, source, True)
        self.code.append(lanes)

    def test_bits(self, source: int) -> None:
        """Set the flags to zero if no bit is set."""
        self._vex(0x17, _MAP_0F38, _66, source, 0, source, True)

    def get_upper_half(self, reg: int, source: int) -> None:
        """Move the upper 4 float32 of ``source`` to the lower 4 of ``reg``."""
        self._vex(0x19, _MAP_0F3A, _66, source, 0, reg, True)
        self.code.append(1)

    def forget_upper_halves(self) -> None:
        """VZEROUPPER, which the ABI wants before a return from code with 256-bit vectors."""
        self.code += b"\xc5\xf8\x77"

    # from or to memory; some also from a register
    load_vector = _of_one(0x10, _MAP_0F, _NONE)  # 8 float32
    store_vector = _of_one(0x11, _MAP_0F, _NONE)  # 8 float32
    store_half_vector = _of_one(0x11, _MAP_0F, _NONE, wide=False)  # the lower 4 float32
    store_scalar = _of_one(0x11, _MAP_0F, _F3, wide=False)  # the lowest float32
    broadcast = _of_one(0x18, _MAP_0F38, _66)  # a float32 into all lanes
    broadcast_8 = _of_one(0x78, _MAP_0F38, _66, wide=False)  # 8 bits into the lower 16 places
    broadcast_16 = _of_one(0x79, _MAP_0F38, _66, wide=False)  # 16 bits into the lower 8 places
    widen_half = _of_one(0x13, _MAP_0F38, _66)  # 8 float16 to float32
    widen_int8 = _of_one(0x21, _MAP_0F38, _66)  # 8 int8 to int32
    widen_uint8 = _of_one(0x31, _MAP_0F38, _66)  # 8 uint8 to int32
    widen_uint16 = _of_one(0x33, _MAP_0F38, _66)  # 8 uint16 to int32
    get_signs = _of_one(0x50, _MAP_0F, _NONE)  # of 8 lanes, to a general register
    convert_int32 = _of_one(0x5B, _MAP_0F, _NONE)  # 8 int32 to float32
    truncate = _of_one(0x5B, _MAP_0F, _F3)  # 8 float32 to int32, towards zero
    square_root = _of_one(0x51, _MAP_0F, _NONE)  # of 8 float32

    # all bits; a comparison sets those of a lane, or clears them
    mask = _of_two(0xDB, _MAP_0F, _66)  # AND
    combine = _of_two(0xEB, _MAP_0F, _66)  # OR
    differ = _of_two(0xEF, _MAP_0F, _66)  # XOR
    compare_int32 = _of_two(0x76, _MAP_0F, _66)  # equal
    is_greater_int32 = _of_two(0x66, _MAP_0F, _66)  # ``first`` is greater
    is_less = _of_two(0xC2, _MAP_0F, _NONE, (0x11,))  # ``first`` is less, of float32; NaN never is
    is_not = _of_two(0xC2, _MAP_0F, _NONE, (0x04,))  # not equal, of float32; NaN is equal to none

    # 8 int32, which wrap; each is shifted by a number of its own
    add_int32 = _of_two(0xFE, _MAP_0F, _66)
    multiply_int32 = _of_two(0x40, _MAP_0F38, _66)
    shift_lanes_left = _of_two(0x47, _MAP_0F38, _66)
    shift_lanes_right = _of_two(0x45, _MAP_0F38, _66)  # without a sign
    shift_lanes_right_signed = _of_two(0x46, _MAP_0F38, _66)

    # 8 float32
    permute = _of_two(0x16, _MAP_0F38, _66)  # those that the lowest 3 bits of ``first`` name
    add_floats = _of_two(0x58, _MAP_0F, _NONE)
    subtract_floats = _of_two(0x5C, _MAP_0F, _NONE)
    multiply = _of_two(0x59, _MAP_0F, _NONE)
    divide = _of_two(0x5E, _MAP_0F, _NONE)
    take_greater = _of_two(0x5F, _MAP_0F, _NONE)  # ``first`` if it is greater, else ``second``
    multiply_add = _of_two(0xB8, _MAP_0F38, _66)  # to ``reg``, rounded once (VFMADD231PS)
    add_scalar = _of_two(0x58, _MAP_0F, _F3, wide=False)  # the lowest; the next 3 are ``first``'s
    add_half_vectors = _of_two(0x58, _MAP_0F, _NONE, wide=False)  # the lower 4
    # neighbouring lanes: in each half two sums of ``first``, then two of ``second``
    add_pairs = _of_two(0x7C, _MAP_0F, _F2)
