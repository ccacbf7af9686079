"""What the backend asks of this package: match kernels, keep them, bind them to memory.

It is the ``NativeCode`` of ``splitup.backend.native_code`` for CPUs. Running bound kernels in
sequence is ``splitup.cpu.kernel_sequence``, which works without vectors too.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Final

from tinygrad.uop.ops import UOp

from splitup.cpu.bound_matmul import BoundMatmul
from splitup.cpu.cache_writes import BoundWrite, CacheWrite, Copies, StateWrite, find_cache_writes
from splitup.cpu.kernel_parts import split_reduction
from splitup.cpu.matmul_match import Matmul, match_matmul
from splitup.cpu.matmul_shape import BlockDecoder, LookupShape, MatmulShape
from splitup.cpu.row_copies import BoundRowCopy, CopyShape, RowCopy, match_row_copy
from splitup.cpu.vector_codegen import Pointer, VectorShape
from splitup.cpu.vector_match import BoundVectors, VectorKernel, match_vectors
from splitup.graph.rules import CheckedGraph

MATMULS_VERSION: Final = 4  # goes up with any change of the order of a sum
# part of the determinism class, whose names are compared between machines
CLASS_PART: Final = f"products {MATMULS_VERSION}"
SEQUENCE_WORK: Final = 2**21  # multiplications below which waking threads costs more
_FEATURES: Final = frozenset({"avx2", "fma", "f16c"})


@functools.cache
def is_supported() -> bool:
    """Return whether this machine runs the code: Linux on x86-64 with AVX2, FMA and F16C."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split()) >= _FEATURES
    return False


def split_call(call: UOp) -> tuple[UOp, ...]:
    """Return a kernel's call, or two of which the first matches and the other does the rest."""
    return split_reduction(call, lambda kernel: match_kernel(kernel) is not None)


def match_kernel(kernel: UOp) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return native code for a kernel, and the slots of the arguments it takes; None if none."""
    found = match_matmul(kernel) or match_vectors(kernel) or match_row_copy(kernel)
    return None if found is None else (found, found.slots)


def match_updates(graph: CheckedGraph) -> Mapping[int, StateWrite]:
    """Return native code that computes the updates of states, by state."""
    return find_cache_writes(graph)


def encode_kernel(kernel: Hashable) -> list[Any]:
    """Return a kernel as nested lists of numbers and texts."""
    if isinstance(kernel, CacheWrite):
        return ["cache write", *astuple(kernel)]
    if isinstance(kernel, VectorKernel):
        return ["vectors", *astuple(kernel)]
    if isinstance(kernel, RowCopy):
        return ["row copy", *astuple(kernel)]
    assert isinstance(kernel, Matmul)
    sizes = [kernel.n, kernel.t, kernel.rows]
    return ["matmul", astuple(kernel.shape), kernel.slots, sizes, kernel.symbol, kernel.table]


def decode_kernel(fields: Sequence[Any]) -> Hashable:
    """Return the kernel of ``encode_kernel``."""
    kind, *values = fields
    if kind == "cache write":
        return CacheWrite(*values)
    if kind == "row copy":
        shape, *rest = map(_freeze, values)
        return RowCopy(CopyShape(*shape), *rest)
    if kind == "vectors":
        (arguments, pointers, *rest), slots, symbol = map(_freeze, values)
        pointers = tuple(Pointer(*pointer) for pointer in pointers)
        return VectorKernel(VectorShape(arguments, pointers, *rest), slots, symbol)
    sizes, slots, (n, t, rows), symbol, table = values
    shape = MatmulShape(*sizes)
    if isinstance(shape.lookup, list):
        shape = replace(shape, lookup=LookupShape(*shape.lookup))
    if isinstance(shape.decoder, list):
        shape = replace(shape, decoder=BlockDecoder(*map(_freeze, shape.decoder)))
    return Matmul(shape, tuple(slots), n, t, symbol, tuple(map(tuple, table)), rows)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def count_threads(kernels: Iterable[Hashable], threads: int) -> int:
    """Return how many threads are worth waking for kernels that run in sequence."""
    work = sum(kernel.work for kernel in kernels if isinstance(kernel, Matmul))
    return threads if work >= SEQUENCE_WORK else 1


def bind_kernel(
    kernel: Hashable,
    addresses: Sequence[int],
    rows: Mapping[str, ctypes.c_uint64],
    threads: int,
    state: tuple[Copies, int, int],
) -> BoundMatmul | BoundRowCopy | BoundVectors | BoundWrite:
    """Return a kernel on certain memory; the result may depend on neither threads nor addresses.

    ``rows`` holds the value of each symbol. ``state`` is, for the update of a state, what is known
    of the states' rows, the state, and which of its two copies is the old one.
    """
    if isinstance(kernel, CacheWrite):
        return BoundWrite(kernel, addresses, state, rows)
    if isinstance(kernel, VectorKernel):
        return BoundVectors(kernel, addresses, threads, rows)
    if isinstance(kernel, RowCopy):
        return BoundRowCopy(kernel, addresses, rows)
    assert isinstance(kernel, Matmul)
    return BoundMatmul(kernel, addresses, threads, rows)


def make_copies(states: int) -> Copies:
    """Return what is known of the rows of fresh states: both copies of each are zeros."""
    return Copies(states)
