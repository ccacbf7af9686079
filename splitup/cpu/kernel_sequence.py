"""Run a sequence of kernels with one call from Python, by a loop of machine code.

A launch from Python costs 0.4 µs, and several microseconds when the step before has evicted
Python's objects from the caches: as much as a small kernel takes.

The loop reads a record of 64-bit words for each kernel,

    address of the code | n | six pointers | n pointers

each of them to the word whose value at launch is the argument: first those of the registers in
order, then those of the stack, the last argument first (System V ABI, AMD64 supplement, 3.2.3).

Several threads run such a loop each. A kernel that is divided has a record for each of them, with
records before and after it at which they wait for each other.
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
    Mem,
)
from splitup.cpu.machine_code import load_code
from splitup.cpu.threads import get_kernel_threads

LaunchFunction = Callable[[], Any]
_ARGUMENT_REGISTERS: Final = (RDI, RSI, RDX, RCX, R8, R9)
_HEAD_WORDS: Final = 2 + len(_ARGUMENT_REGISTERS)
_NOTHING: Final = ctypes.c_uint64(0)  # the target of unused pointers


class Native(NamedTuple):
    """A function in machine code, and the 64-bit words that are its arguments at launch."""

    address: int
    arguments: Sequence[ctypes.c_uint64]


# a kernel, or what each thread computes of it; nothing for what is not machine code
Parts = Sequence[Native]


@functools.cache
def is_supported() -> bool:
    """Return whether this machine runs the loop."""
    return platform.machine() == "x86_64" and platform.system() == "Linux"


def join_launches(
    launches: Sequence[LaunchFunction], kernels: Sequence[Parts], threads: int = 1
) -> list[LaunchFunction]:
    """Return functions that do the same in order; neighbours in machine code are one call."""
    joined: list[LaunchFunction] = []
    pairs = zip(launches, kernels, strict=True)
    for is_native, group in itertools.groupby(pairs, lambda pair: bool(pair[1])):
        if is_native and is_supported():
            records = [encode_records(parts, threads) for _, parts in group]
            joined.append(make_launch(records))
        else:
            joined += [launch for launch, _ in group]
    return joined


def encode_records(parts: Parts, threads: int) -> tuple[bytes, ...]:
    """Return the records of a kernel for ``make_launch``, by thread; ``parts`` have to stay alive.

    The first thread computes what is not divided.
    """
    if len(parts) == 1:
        return (_encode(*parts[0]), *[b""] * (threads - 1))
    team = get_kernel_threads(threads)
    barriers = [_encode(*team.get_barrier(thread)) for thread in range(threads)]
    own = [_encode(*part) for part in parts] + [b""] * (threads - len(parts))
    return tuple(barrier + part + barrier for barrier, part in zip(barriers, own, strict=True))


def make_launch(records: Sequence[tuple[bytes, ...]]) -> LaunchFunction:
    """Return what runs kernels one after the other, each in its threads."""
    by_thread = [b"".join(parts) for parts in zip(*records, strict=True)]
    calls = [(part, ctypes.c_uint64(len(part))) for part in by_thread]
    function = load_code(assemble_loop).function
    if not any(by_thread[1:]):
        return functools.partial(function, *calls[0])
    return functools.partial(get_kernel_threads(len(calls)).run, function, calls)


def _encode(address: int, arguments: Sequence[ctypes.c_uint64]) -> bytes:
    nothing = ctypes.addressof(_NOTHING)
    pointers = [ctypes.addressof(word) for word in arguments]
    registers = pointers[: len(_ARGUMENT_REGISTERS)]
    registers += [nothing] * (len(_ARGUMENT_REGISTERS) - len(registers))
    stack = pointers[len(_ARGUMENT_REGISTERS) :]
    stack += [nothing] * (len(stack) % 2)  # the ABI aligns rsp to 16 bytes at a call
    words = [address, len(stack), *registers, *reversed(stack)]
    return struct.pack(f"<{len(words)}Q", *words)


def assemble_loop() -> bytes:
    """Return the code of a function of the first record and how many bytes all of them have."""
    asm = Assembler()
    with asm.save((RBX, RBP, R12), has_vectors=False):
        asm.load(RBX, RDI)  # the record
        asm.load(R12, RDI)
        asm.add(R12, RSI)  # the end of the last one
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
        asm.compare(RBX, R12)
        asm.jump("jl", "record")
    return asm.finish()
