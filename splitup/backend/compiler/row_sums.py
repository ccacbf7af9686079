"""Sums along rows on GPUs: the threads of a group share a row, and neighbours read neighbours.

The time of a model's step is that of reading its weights, and each product of a weight and a vector
is a sum along the weight's rows. tinygrad's optimiser gives such a sum 16 threads that read numbers
far from each other, one at a time: on an H100 a tenth of the memory's speed with float16, less with
quantised weights. Here, for each row,

    a thread adds up to ``_WIDTH`` neighbours at a time, which it loads together,
    a group of up to ``_GROUP`` threads reads what lies side by side, and adds its sums at the end,
    a thread has the same part of ``_ROWS`` rows, so that the vector's numbers are read once,
    ``_GROUPS`` such groups are started together.

These numbers were the best of fourteen choices for float16, float32, Q4_0, Q8_0 and Q4_K. Results
depend on them: ``CLASS_PART`` names this version, and changes when they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.uop.ops import AxisType, Ops, UOp

CLASS_PART: Final = "sums 1"
_RENDERERS: Final = frozenset({"CUDA", "NVCC", "PTX", "NAK", "HIP", "HIPCC", "AMDLLVM", "METAL"})
_WIDTH: Final = 8
_GROUP: Final = 32
_ROWS: Final = 2
_GROUPS: Final = 4
_FEWEST: Final = 8  # threads of a group
_LEAST: Final = 64  # numbers in a row, and rows: below, tinygrad's choice


def applies_to(renderer: str) -> bool:
    """Return whether kernels by this code generator of tinygrad's run on a GPU."""
    return renderer in _RENDERERS


def optimize_row_sum(kernel: Scheduler) -> Scheduler | None:
    """Return the kernel, optimised; None if it is no sum along rows, or not for a GPU."""
    if not applies_to(type(kernel.ren).__name__.removesuffix("Renderer")):
        return None
    reduced = kernel.axes_of(AxisType.REDUCE)
    if kernel.reduceop is None or kernel.reduceop.arg[0] is not Ops.ADD or not reduced:
        return None
    sizes = [kernel.full_shape[axis] for axis in reduced]
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) < _LEAST:
        return None
    if not _is_read_in_order(kernel, kernel.rngs[reduced[-1]]):
        return None
    made = kernel.copy()
    try:
        width, groups = divide_row(sizes)
        if math.prod(threads for _, threads in groups) < _FEWEST:
            return None
        if width > 1:
            made.apply_opt(Opt(OptOps.UNROLL, len(sizes) - 1, width))
        for place, threads in groups:
            made.apply_opt(Opt(OptOps.GROUP, place, threads))
        _share_rows(made)
    except KernelOptError:  # of another form than was thought
        return None
    return made


def divide_row(sizes: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """Return how many numbers a thread loads together, and how many threads share each axis.

    ``sizes`` are those of the axes that are summed, the innermost last; axes without threads of
    their own are left out, and the others come in the order in which they are divided. As many
    threads as possible go before as many numbers.
    """
    best: tuple[int, int, list[tuple[int, int]]] = (0, 0, [])
    width = _WIDTH
    while width:
        if sizes[-1] % width == 0:
            found, left = [], _GROUP
            for place in reversed(range(len(sizes))):
                size = sizes[place] // width if place == len(sizes) - 1 else sizes[place]
                threads = math.gcd(size, left)
                if threads > 1:
                    found.append((place, threads))
                    left //= threads
            best = max(best, (min(_GROUP // left, _GROUP // 2), width, found), key=lambda x: x[:2])
        width //= 2
    return best[1], best[2]


def _is_read_in_order(kernel: Scheduler, axis: UOp) -> bool:
    """Return whether one more along an axis is the next element of some buffer."""
    return any(
        any(term is axis for term in buffer.src[1].get_idx().split_uop(Ops.ADD))
        for buffer in kernel.bufs
    )


def _share_rows(kernel: Scheduler) -> None:
    """Divide the last axis of rows whose length is known among threads, if there are enough."""
    known = _list_known(kernel)
    if math.prod(kernel.full_shape[axis] for axis in known) < _LEAST:
        return
    if kernel.full_shape[known[-1]] % _ROWS == 0:
        kernel.apply_opt(Opt(OptOps.UPCAST, known[-1], _ROWS))
    known = _list_known(kernel)
    if known and kernel.full_shape[known[-1]] % _GROUPS == 0:
        kernel.apply_opt(Opt(OptOps.LOCAL, known[-1], _GROUPS))


def _list_known(kernel: Scheduler) -> list[int]:
    axes = kernel.axes_of(AxisType.GLOBAL)
    return [axis for axis in axes if isinstance(kernel.full_shape[axis], int)]
