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

A step of several tokens would read each weight once for each of them. So there is a second kernel
for such steps, in which a thread has the same part of ``_TOKENS`` tokens and of ``_TOKEN_ROWS``
rows. It adds the same numbers in the same order, and its bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, UOp

CLASS_PART: Final = "sums 2"
_RENDERERS: Final = frozenset({"CUDA", "NVCC", "PTX", "NAK", "HIP", "HIPCC", "AMDLLVM", "METAL"})
_WIDTH: Final = 8
_GROUP: Final = 32
_ROWS: Final = 2
_GROUPS: Final = 4
_FEWEST: Final = 8  # threads of a group
_LEAST: Final = 64  # numbers in a row, and rows: below, tinygrad's choice
_TILED: Final = "tiled"
_TOKENS: Final = 8
_TOKEN_ROWS: Final = 4  # of which a thread of several tokens has a part; 8 compile half as fast
_FEWEST_TOKENS: Final = 2  # below, a kernel of one token is faster


def applies_to(renderer: Renderer) -> bool:
    """Return whether kernels by this code generator of tinygrad's run on a GPU."""
    return type(renderer).__name__.removesuffix("Renderer") in _RENDERERS


def optimize_row_sum(kernel: Scheduler, *, is_tiled: bool = False) -> Scheduler | None:
    """Return the kernel, optimised; None if it is no sum along rows, or not for a GPU.

    One that ``is_tiled`` computes several tokens at once; None if it has no tokens.
    """
    if not applies_to(kernel.ren):
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
        if is_tiled and not made.axes_of(AxisType.REDUCE):
            return None  # no accumulator: the compiler chooses the order of two products
        if is_tiled:
            _tile(made)
        else:
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
    _start_together(kernel)


def _start_together(kernel: Scheduler) -> None:
    known = _list_known(kernel)
    if known and kernel.full_shape[known[-1]] % _GROUPS == 0:
        kernel.apply_opt(Opt(OptOps.LOCAL, known[-1], _GROUPS))


# ---- several tokens at once --------------------------------------------------------------------


def is_for_tiles(counts: Iterable[int]) -> bool:
    """Return whether a step of so many tokens is faster with a kernel of several at once."""
    return min(counts, default=0) >= _FEWEST_TOKENS


def name_tiled(kernel: UOp) -> UOp:
    """Return a kernel, before it is compiled, as one of several tokens at once."""
    return kernel.replace(arg=replace(kernel.arg or KernelInfo(), name=_TILED))


def is_named_tiled(kernel: Scheduler) -> bool:
    """Return whether a kernel is one of several tokens at once."""
    return kernel.ast.arg is not None and kernel.ast.arg.name == _TILED


def _tile(kernel: Scheduler) -> None:
    """Divide the tokens among threads, too; raises KernelOptError where there are none to divide.

    The last tile of a step may have fewer: then rows are read that hold nothing, and not written.
    Tiles of the same weights are started one after the other, while the weights are near.
    """
    axes = kernel.axes_of(AxisType.GLOBAL)
    counted = [axis for axis in axes if not isinstance(kernel.full_shape[axis], int)]
    known = _list_known(kernel)
    if len(counted) != 1 or not known or kernel.full_shape[known[-1]] % _TOKEN_ROWS:
        raise KernelOptError("no axis of tokens, or rows that cannot be divided")
    token = kernel.rngs[counted[0]]
    count = token.src[0]
    if count.op is not Ops.PARAM or (token.vmax + 1) % _TOKENS:
        raise KernelOptError("tokens are not counted by a symbol, or tiles would leave the buffer")
    if all(token in buffer.src[1].ranges for buffer in kernel.bufs):
        raise KernelOptError("nothing is read for several tokens")
    guarded = {}
    for buffer in {store.src[0] for store in kernel.ast.backward_slice if store.op is Ops.STORE}:
        index = buffer.src[1]
        inside = (token < count) & index.get_valid()
        guarded[buffer] = buffer.replace(src=(buffer.src[0], index.get_idx().valid(inside)))
    kernel.ast = kernel.ast.substitute(guarded)
    tile = token.replace(src=((count + (_TOKENS - 1)) // _TOKENS,))
    within = UOp.range(_TOKENS, next(kernel.opt_range), AxisType.UPCAST, dtype=token.dtype)
    kernel.ast = kernel.ast.substitute({token: tile * _TOKENS + within})
    kernel.apply_opt(Opt(OptOps.UPCAST, _list_known(kernel)[-1], _TOKEN_ROWS))
    _start_together(kernel)
    axes = kernel.axes_of(AxisType.GLOBAL)
    counted = [axis for axis in axes if not isinstance(kernel.full_shape[axis], int)]
    if counted and counted[0] != axes[-1]:  # a step of one tile has no axis of tiles
        kernel.apply_opt(Opt(OptOps.SWAP, counted[0], axes[-1]))


def _list_known(kernel: Scheduler) -> list[int]:
    axes = kernel.axes_of(AxisType.GLOBAL)
    return [axis for axis in axes if isinstance(kernel.full_shape[axis], int)]
