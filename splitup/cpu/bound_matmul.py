"""A matmul bound to memory: its machine code, and a block of arguments for each part."""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from splitup.cpu.assembler import MachineCode
from splitup.cpu.matmul_codegen import assemble
from splitup.cpu.matmul_match import Matmul
from splitup.cpu.matmul_shape import ARGUMENTS, ITEM_BYTES, MatmulShape
from splitup.cpu.threads import cut

THREAD_WORK: Final = 2**15  # multiplications below which waiting for threads costs more


@functools.lru_cache(maxsize=4_096)
def _load_code(shape: MatmulShape) -> MachineCode:
    return MachineCode(assemble(shape))


class BoundMatmul:
    """A matmul on certain buffers. A call computes it."""

    __slots__ = ("_code", "_keep", "addresses", "natives")

    def __init__(
        self,
        matmul: Matmul,
        addresses: Sequence[int],
        threads: int,
        rows: Mapping[str, ctypes.c_uint64],
    ) -> None:
        """``addresses`` are those of ``slots``; ``rows`` holds the value of each symbol."""
        lookup = matmul.shape.lookup
        bound = rows[matmul.symbol] if matmul.symbol else None
        t = ctypes.c_uint64(matmul.t) if bound is None or lookup is not None else bound
        row = ctypes.c_uint64(matmul.rows) if bound is None or lookup is None else bound
        self._code = _load_code(matmul.shape)
        table = array("q", itertools.chain(*matmul.table))
        entry_bytes = 3 * table.itemsize
        start = table.buffer_info()[0]
        out, a, b, *others = addresses
        numbers = others[0] if others else 0
        number_step = lookup.step if lookup is not None and matmul.shape.style == "dot" else 0
        blocks = []
        for first, count, entry, entries in _divide_work(matmul, threads):
            values = (
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
            blocks.append((ctypes.c_int64 * len(ARGUMENTS))(*values))
        self.natives = [
            (self._code.address, [ctypes.c_uint64(ctypes.addressof(block))]) for block in blocks
        ]
        # the words of out, a, b and numbers in every block, which may be changed between calls
        self.addresses = [
            [ctypes.c_uint64.from_buffer(block, 8 * place) for block in blocks]
            for place in range(len(addresses))
        ]
        self._keep = (table, t, row)

    def __call__(self) -> None:
        """Compute, one part after the other."""
        for _, arguments in self.natives:
            self._code.function(*arguments)


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
