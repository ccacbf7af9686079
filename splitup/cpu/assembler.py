"""A small assembler for x86-64 with AVX2, FMA and F16C (the level x86-64-v3).

Registers are numbers as in the encoding (rax 0 … r15 15, ymm0 … ymm15). A memory operand is
``Mem(base, displacement)``. Source of the encodings: Intel SDM volume 2, sections 2.3.5 (VEX) and
3–5; https://www.felixcloutier.com/x86/.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
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
_NONE, _66, _F3 = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Mem:
    """The memory at a register plus an offset; the register is neither rsp nor r12."""

    base: int
    offset: int = 0


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

    def load(self, reg: int, source: Mem | int) -> None:
        """Move 64 bits from memory or a register."""
        self._plain(0x8B, reg, source)

    def store(self, target: Mem, reg: int) -> None:
        """Move 64 bits to memory."""
        self._plain(0x89, reg, target)

    def add(self, reg: int, source: Mem | int) -> None:
        """Add 64 bits from memory or a register."""
        self._plain(0x03, reg, source)

    def subtract(self, reg: int, source: int) -> None:
        """Subtract the 64 bits of a register."""
        self._plain(0x2B, reg, source)

    def compare(self, reg: int, source: int) -> None:
        """Set the flags as subtracting a register would."""
        self._plain(0x3B, reg, source)

    def add_const(self, reg: int, value: int) -> None:
        """Add a number of 32 bits; sets the flags."""
        if value:
            self._plain(0x81, 0, reg)
            self.code += struct.pack("<i", value)

    def compare_const(self, reg: int, value: int) -> None:
        """Set the flags as subtracting a number of 32 bits would."""
        self._plain(0x81, 7, reg)
        self.code += struct.pack("<i", value)

    def set_const(self, reg: int, value: int) -> None:
        """Set a register to a number of 31 bits."""
        self._plain(0xC7, 0, reg)
        self.code += struct.pack("<i", value)

    def load_int32(self, reg: int, source: Mem) -> None:
        """Load an int32 as 64 bits, with its sign."""
        self._plain(0x63, reg, source)

    def and_const(self, reg: int, value: int) -> None:
        """Keep the bits of a number of 31 bits."""
        self._plain(0x81, 4, reg)
        self.code += struct.pack("<i", value)

    def multiply_const(self, reg: int, value: int) -> None:
        """Multiply by a number of 32 bits."""
        self._plain(0x69, reg, reg)
        self.code += struct.pack("<i", value)

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

    def load_vector(self, reg: int, source: Mem) -> None:
        """Load 8 float32."""
        self._vex(0x10, _MAP_0F, _NONE, reg, 0, source, True)

    def store_vector(self, reg: int, target: Mem) -> None:
        """Store 8 float32."""
        self._vex(0x11, _MAP_0F, _NONE, reg, 0, target, True)

    def store_half_vector(self, reg: int, target: Mem) -> None:
        """Store the lower 4 float32."""
        self._vex(0x11, _MAP_0F, _NONE, reg, 0, target, False)

    def store_scalar(self, reg: int, target: Mem) -> None:
        """Store the lowest float32."""
        self._vex(0x11, _MAP_0F, _F3, reg, 0, target, False)

    def broadcast(self, reg: int, source: Mem) -> None:
        """Load a float32 into all lanes."""
        self._vex(0x18, _MAP_0F38, _66, reg, 0, source, True)

    def broadcast_8(self, reg: int, source: Mem) -> None:
        """Load 8 bits into the lower sixteen places of 8 bits."""
        self._vex(0x78, _MAP_0F38, _66, reg, 0, source, False)

    def broadcast_16(self, reg: int, source: Mem) -> None:
        """Load 16 bits into the lower eight places of 16 bits."""
        self._vex(0x79, _MAP_0F38, _66, reg, 0, source, False)

    def widen_half(self, reg: int, source: Mem | int) -> None:
        """Convert 8 float16 from memory or a register to float32."""
        self._vex(0x13, _MAP_0F38, _66, reg, 0, source, True)

    def widen_int8(self, reg: int, source: Mem | int) -> None:
        """Convert 8 int8 from memory or a register to int32."""
        self._vex(0x21, _MAP_0F38, _66, reg, 0, source, True)

    def widen_uint8(self, reg: int, source: Mem | int) -> None:
        """Convert 8 uint8 from memory or a register to int32."""
        self._vex(0x31, _MAP_0F38, _66, reg, 0, source, True)

    def widen_uint16(self, reg: int, source: Mem) -> None:
        """Load 8 uint16 as int32."""
        self._vex(0x33, _MAP_0F38, _66, reg, 0, source, True)

    def shift_left(self, reg: int, source: int, bits: int) -> None:
        """Shift 8 int32 left."""
        self._vex(0x72, _MAP_0F, _66, 6, reg, source, True)
        self.code.append(bits)

    def shift_lanes_left(self, reg: int, source: int, bits: Mem) -> None:
        """Shift each of 8 int32 left by a number of its own."""
        self._vex(0x47, _MAP_0F38, _66, reg, source, bits, True)

    def shift_lanes_right(self, reg: int, source: int, bits: Mem) -> None:
        """Shift each of 8 uint32 right by a number of its own."""
        self._vex(0x45, _MAP_0F38, _66, reg, source, bits, True)

    def shift_lanes_right_signed(self, reg: int, source: int, bits: Mem) -> None:
        """Shift each of 8 int32 right by a number of its own, with its sign."""
        self._vex(0x46, _MAP_0F38, _66, reg, source, bits, True)

    def mask(self, reg: int, first: int, second: Mem | int) -> None:
        """Combine all bits by AND."""
        self._vex(0xDB, _MAP_0F, _66, reg, first, second, True)

    def combine(self, reg: int, first: int, second: Mem | int) -> None:
        """Combine all bits by OR."""
        self._vex(0xEB, _MAP_0F, _66, reg, first, second, True)

    def permute(self, reg: int, index: int, source: Mem) -> None:
        """Load those of 8 float32 that the lowest three bits of 8 int32 name."""
        self._vex(0x16, _MAP_0F38, _66, reg, index, source, True)

    def blend(self, reg: int, first: int, second: int, signs: int) -> None:
        """Take the lanes of ``second`` whose sign is set, and the others of ``first``."""
        self._vex(0x4A, _MAP_0F3A, _66, reg, first, second, True)
        self.code.append(signs << 4)

    def differ(self, reg: int, first: int, second: Mem | int) -> None:
        """Combine all bits by XOR."""
        self._vex(0xEF, _MAP_0F, _66, reg, first, second, True)

    def arrange(self, reg: int, source: int, lanes: int) -> None:
        """Load in each half the lanes that two bits each of ``lanes`` name, the lowest first."""
        self._vex(0x04, _MAP_0F3A, _66, reg, 0, source, True)
        self.code.append(lanes)

    def compare_int32(self, reg: int, first: int, second: Mem | int) -> None:
        """Set all bits of those of 8 int32 that are equal, and clear the others."""
        self._vex(0x76, _MAP_0F, _66, reg, first, second, True)

    def is_greater_int32(self, reg: int, first: int, second: Mem | int) -> None:
        """Set all bits of those of 8 int32 where ``first`` is greater, and clear the others."""
        self._vex(0x66, _MAP_0F, _66, reg, first, second, True)

    def is_less(self, reg: int, first: int, second: Mem | int) -> None:
        """Set all bits of those of 8 float32 where ``first`` is less; NaN never is."""
        self._vex(0xC2, _MAP_0F, _NONE, reg, first, second, True)
        self.code.append(0x11)

    def is_not(self, reg: int, first: int, second: Mem | int) -> None:
        """Set all bits of those of 8 float32 that are not equal; NaN is equal to nothing."""
        self._vex(0xC2, _MAP_0F, _NONE, reg, first, second, True)
        self.code.append(0x04)

    def get_signs(self, reg: int, source: int) -> None:
        """Move the highest bits of 8 lanes to a general register."""
        self._vex(0x50, _MAP_0F, _NONE, reg, 0, source, True)

    def test_bits(self, source: int) -> None:
        """Set the flags to zero if no bit is set."""
        self._vex(0x17, _MAP_0F38, _66, source, 0, source, True)

    def convert_int32(self, reg: int, source: int) -> None:
        """Convert 8 int32 to float32."""
        self._vex(0x5B, _MAP_0F, _NONE, reg, 0, source, True)

    def truncate(self, reg: int, source: int) -> None:
        """Convert 8 float32 to int32, towards zero."""
        self._vex(0x5B, _MAP_0F, _F3, reg, 0, source, True)

    def add_int32(self, reg: int, first: int, second: Mem | int) -> None:
        """Add 8 int32, which wrap."""
        self._vex(0xFE, _MAP_0F, _66, reg, first, second, True)

    def multiply_int32(self, reg: int, first: int, second: Mem | int) -> None:
        """Multiply 8 int32, which wrap."""
        self._vex(0x40, _MAP_0F38, _66, reg, first, second, True)

    def subtract_floats(self, reg: int, first: int, second: Mem | int) -> None:
        """Subtract 8 float32."""
        self._vex(0x5C, _MAP_0F, _NONE, reg, first, second, True)

    def divide(self, reg: int, first: int, second: Mem | int) -> None:
        """Divide 8 float32."""
        self._vex(0x5E, _MAP_0F, _NONE, reg, first, second, True)

    def square_root(self, reg: int, source: int) -> None:
        """Take the square roots of 8 float32."""
        self._vex(0x51, _MAP_0F, _NONE, reg, 0, source, True)

    def take_greater(self, reg: int, first: int, second: Mem | int) -> None:
        """Take ``first`` in those of 8 float32 where it is greater, elsewhere ``second``."""
        self._vex(0x5F, _MAP_0F, _NONE, reg, first, second, True)

    def add_floats(self, reg: int, first: int, second: Mem | int) -> None:
        """Add 8 float32."""
        self._vex(0x58, _MAP_0F, _NONE, reg, first, second, True)

    def add_scalar(self, reg: int, first: int, second: Mem) -> None:
        """Add the lowest float32; the others of the first four become those of ``first``."""
        self._vex(0x58, _MAP_0F, _F3, reg, first, second, False)

    def multiply(self, reg: int, first: int, second: Mem | int) -> None:
        """Multiply 8 float32."""
        self._vex(0x59, _MAP_0F, _NONE, reg, first, second, True)

    def multiply_add(self, reg: int, first: int, second: Mem | int) -> None:
        """Add to ``reg`` the product of 8 float32, rounded once (VFMADD231PS)."""
        self._vex(0xB8, _MAP_0F38, _66, reg, first, second, True)

    def add_half_vectors(self, reg: int, first: int, second: int) -> None:
        """Add the lower 4 float32."""
        self._vex(0x58, _MAP_0F, _NONE, reg, first, second, False)

    def add_pairs(self, reg: int, first: int, second: int) -> None:
        """Add neighbouring lanes: in each half two sums of ``first``, then two of ``second``."""
        self._vex(0x7C, _MAP_0F, 3, reg, first, second, True)

    def get_upper_half(self, reg: int, source: int) -> None:
        """Move the upper 4 float32 of ``source`` to the lower 4 of ``reg``."""
        self._vex(0x19, _MAP_0F3A, _66, source, 0, reg, True)
        self.code.append(1)

    def forget_upper_halves(self) -> None:
        """VZEROUPPER, which the ABI wants before a return from code with 256-bit vectors."""
        self.code += b"\xc5\xf8\x77"


class MachineCode:
    """Machine code in executable memory, callable while this object lives."""

    __slots__ = ("_memory", "address", "function")

    def __init__(self, code: bytes) -> None:
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._memory = mmap.mmap(-1, len(code), prot=rights)
        self._memory.write(code)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.function: Callable[..., None] = ctypes.CFUNCTYPE(None)(self.address)
