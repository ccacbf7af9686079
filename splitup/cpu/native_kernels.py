"""Native code, beside the kernels that tinygrad compiles: what the backend asks of this package.

    match    which kernels of a schedule, and which updates of states, it computes
    keep     its kernels as nested lists, for the kernel cache
    bind     a kernel on certain memory; ``splitup.backend.launching`` runs what is bound

A kernel is plain data that only this package understands; equal kernels are equal data. Running
bound kernels in sequence is ``splitup.cpu.kernel_sequence``, which works without vectors too.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from tinygrad.uop.ops import UOp

from splitup.cpu.cache_writes import CacheWrite, Copies, StateWrite, bind_write, find_cache_writes
from splitup.cpu.kernel_parts import split_reduction
from splitup.cpu.machine_code import BoundCode, load_code
from splitup.cpu.matmul_codegen import assemble
from splitup.cpu.matmul_match import Matmul, match_matmul
from splitup.cpu.matmul_shape import ITEM_BYTES, BlockDecoder, LookupShape, MatmulShape
from splitup.cpu.row_copies import CopyShape, RowCopy, bind_row_copy, match_row_copy
from splitup.cpu.threads import cut
from splitup.cpu.vector_codegen import Pointer, VectorShape
from splitup.cpu.vector_match import VectorKernel, bind_vectors, match_vectors
from splitup.graph.rules import CheckedGraph

NativeKernel: TypeAlias = Hashable

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


def computes_for(device: str) -> bool:
    """Return whether there is native code for a device such as "CPU" or "CUDA:1", and it runs."""
    return device.partition(":")[0] == "CPU" and is_supported()


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
) -> BoundCode:
    """Return a kernel on certain memory; the result may depend on neither threads nor addresses.

    ``rows`` holds the value of each symbol. ``state`` is, for the update of a state, what is known
    of the states' rows, the state, and which of its two copies is the old one.
    """
    if isinstance(kernel, CacheWrite):
        return bind_write(kernel, addresses, state, rows)
    if isinstance(kernel, VectorKernel):
        return bind_vectors(kernel, addresses, threads, rows)
    if isinstance(kernel, RowCopy):
        return bind_row_copy(kernel, addresses, rows)
    assert isinstance(kernel, Matmul)
    return bind_matmul(kernel, addresses, threads, rows)


THREAD_WORK: Final = 2**15  # multiplications below which waiting for threads costs more


def bind_matmul(
    matmul: Matmul,
    addresses: Sequence[int],
    threads: int,
    rows: Mapping[str, ctypes.c_uint64],
) -> BoundCode:
    """Return a matmul on certain memory.

    ``addresses`` are those of ``slots``; ``rows`` holds the value of each symbol.
    """
    lookup = matmul.shape.lookup
    bound = rows[matmul.symbol] if matmul.symbol else None
    t = ctypes.c_uint64(matmul.t) if bound is None or lookup is not None else bound
    row = ctypes.c_uint64(matmul.rows) if bound is None or lookup is None else bound
    code = load_code(assemble, matmul.shape)
    table = array("q", itertools.chain(*matmul.table))
    entry_bytes = 3 * table.itemsize
    start = table.buffer_info()[0]
    out, a, b, *others = addresses
    numbers = others[0] if others else 0
    number_step = lookup.step if lookup is not None and matmul.shape.style == "dot" else 0
    parts = []
    for first, count, entry, entries in _divide_work(matmul, threads):
        words = (  # ``ARGUMENTS``
            out + first * matmul.shape.out_n,
            a,
            b + first * _get_b_step(matmul.shape),
            numbers + first * number_step,
            start + entry * entry_bytes,
            entries,
            count,
            ctypes.addressof(t),
            ctypes.addressof(row),
            0,
            0 if lookup is None else lookup.largest,
        )
        parts.append((code, words))
    return BoundCode(parts, len(addresses), table, t, row)


def _get_b_step(shape: MatmulShape) -> int:
    return shape.b_n if shape.style == "dot" else ITEM_BYTES[shape.kind]


def _divide_work(matmul: Matmul, threads: int) -> list[tuple[int, int, int, int]]:
    """Return parts of a matmul: first n, number of n, first entry of the table, number."""
    entries = len(matmul.table)
    if threads < 2 or matmul.work < THREAD_WORK:
        return [(0, matmul.n, 0, entries)]
    unit = 8 * matmul.shape.n_unit  # whole tiles
    if matmul.n >= 2 * unit * threads or entries == 1:
        return [
            (unit * first, min(unit * end, matmul.n) - unit * first, 0, entries)
            for first, end in cut(-(-matmul.n // unit), threads)
        ]
    return [(0, matmul.n, first, end - first) for first, end in cut(entries, threads)]
