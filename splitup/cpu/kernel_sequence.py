"""Run a sequence of kernels with one call from Python, by a loop of machine code.

A launch from Python costs 0.4 µs, and several microseconds when the step before has evicted
Python's objects from the caches: as much as a small kernel takes.

The loop reads a record of 64-bit words for each kernel,

    address of the code | n | six pointers | n pointers

each of them to the word whose value at launch is the argument: first those of the registers in
order, then those of the stack, the last argument first (System V ABI, AMD64 supplement, 3.2.3).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from splitup.cpu.assembler import (
    R8,
    R9,
    R10,
    R11,
    R12,
    RAX,
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    RSP,
    Assembler,
    MachineCode,
    Mem,
)

LaunchFunction = Callable[[], Any]
_ARGUMENT_REGISTERS: Final = (RDI, RSI, RDX, RCX, R8, R9)
_HEAD_WORDS: Final = 2 + len(_ARGUMENT_REGISTERS)
_NOTHING: Final = ctypes.c_uint64(0)  # the target of unused pointers


class Native(NamedTuple):
    """A function in machine code, and the 64-bit words that are its arguments at launch."""

    address: int
    arguments: Sequence[ctypes.c_uint64]


@functools.cache
def is_supported() -> bool:
    """Return whether this machine runs the loop."""
    return platform.machine() == "x86_64" and platform.system() == "Linux"


def join_launches(
    launches: Sequence[LaunchFunction], natives: Sequence[Native | None]
) -> list[LaunchFunction]:
    """Return functions that do the same in order; neighbours in machine code are one call."""
    joined: list[LaunchFunction] = []
    pairs = zip(launches, natives, strict=True)
    for is_native, group in itertools.groupby(pairs, lambda pair: pair[1] is not None):
        if is_native and is_supported():
            joined.append(_join([native for _, native in group if native is not None]))
        else:
            joined += [launch for launch, _ in group]
    return joined


def _join(natives: Sequence[Native]) -> LaunchFunction:
    words = [word for native in natives for word in _make_record(native)]
    records = (ctypes.c_uint64 * len(words))(*words)
    return functools.partial(_load_loop().function, records, ctypes.c_uint64(len(natives)))


def encode_record(native: Native) -> bytes:
    """Return the record of a kernel for ``launch_records``; ``native`` has to stay alive."""
    words = _make_record(native)
    return struct.pack(f"<{len(words)}Q", *words)


def launch_records(records: Sequence[bytes]) -> None:
    """Run kernels one after the other, at least one."""
    _load_loop().function(b"".join(records), ctypes.c_uint64(len(records)))


def _make_record(native: Native) -> list[int]:
    nothing = ctypes.addressof(_NOTHING)
    pointers = [ctypes.addressof(word) for word in native.arguments]
    registers = pointers[: len(_ARGUMENT_REGISTERS)]
    registers += [nothing] * (len(_ARGUMENT_REGISTERS) - len(registers))
    stack = pointers[len(_ARGUMENT_REGISTERS) :]
    stack += [nothing] * (len(stack) % 2)  # the ABI aligns rsp to 16 bytes at a call
    return [native.address, len(stack), *registers, *reversed(stack)]


@functools.cache
def _load_loop() -> MachineCode:
    return MachineCode(assemble_loop())


def assemble_loop() -> bytes:
    """Return the code of a function of the first record and the number of them, at least 1."""
    asm = Assembler()
    for reg in (RBX, RBP, R12):
        asm.push(reg)
    asm.load(RBX, RDI)  # the record
    asm.load(R12, RSI)  # how many are left
    asm.load(RBP, RSP)
    asm.label("record")
    asm.load(R10, Mem(RBX, 8))
    asm.load(R11, RBX)
    asm.add_const(R11, 8 * _HEAD_WORDS)
    asm.label("word")
    asm.add_const(R10, -1)
    asm.jump("jl", "launch")
    asm.load(RAX, Mem(R11))
    asm.load(RAX, Mem(RAX))
    asm.push(RAX)
    asm.add_const(R11, 8)
    asm.jump("jmp", "word")
    asm.label("launch")
    for place, reg in enumerate(_ARGUMENT_REGISTERS, 2):
        asm.load(reg, Mem(RBX, 8 * place))
        asm.load(reg, Mem(reg))
    asm.load(RAX, Mem(RBX))
    asm.load(RBX, R11)
    asm.call(RAX)
    asm.load(RSP, RBP)
    asm.add_const(R12, -1)
    asm.jump("jnz", "record")
    for reg in (R12, RBP, RBX):
        asm.pop(reg)
    asm.ret()
    return asm.finish()
