"""Bounds what tinygrad unrolls, so that compiling a kernel takes the time that the rules predict.

tinygrad computes several elements of a kernel at once, up to 2,000 of them: a kernel's code is its
expression that many times. ``splitup.graph.compile_cost`` predicts the expression, and four of it.
A kernel whose unrolled code would take more than ``MAX_UNROLLED_US`` is compiled as it is. So the
choice depends on the kernel alone, and everybody of a determinism class makes the same.
"""

from __future__ import annotations

import math
from typing import Final

from tinygrad.codegen.opt import heuristic
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.uop.ops import AxisType, Ops, UOp

from splitup.backend.compiler.row_sums import is_named_tiled, optimize_row_sum
from splitup.core import limits
from splitup.graph.compile_cost import get_operation_us

_PREDICTED: Final = 4  # elements at once, which the costs of operations are for
_FREE: Final = frozenset({Ops.CONST, Ops.RANGE, Ops.PARAM, Ops.SINK})

_optimize = heuristic.hand_coded_optimizations


class NotTiled(Exception):
    """A kernel cannot compute several tokens at once, or would get too large."""


def install_bound() -> None:
    """Make tinygrad's optimiser leave kernels alone that would get too large."""
    heuristic.hand_coded_optimizations = _optimize_within_bound


def _optimize_within_bound(kernel: Scheduler) -> Scheduler:
    if is_named_tiled(kernel):
        tiled = optimize_row_sum(kernel, is_tiled=True)
        if tiled is None or _measure_unrolled(tiled) > limits.MAX_UNROLLED_US:
            raise NotTiled
        return tiled
    optimized = optimize_row_sum(kernel) or _optimize(kernel)
    unrolled_us = measure_expression(kernel.ast) * optimized.upcast_size() // _PREDICTED
    return kernel if unrolled_us > limits.MAX_UNROLLED_US else optimized


def _measure_unrolled(kernel: Scheduler) -> int:
    """Return what a kernel takes to compile, each operation as often as its results differ."""
    unrolled = {*kernel.ranges_of(AxisType.UPCAST, AxisType.UNROLL)}
    cost = 0
    for one in kernel.ast.toposort():
        if one.op not in _FREE:
            times = math.prod(int(axis.vmax) + 1 for axis in unrolled & one.ranges.keys())
            cost += _measure(one) * times
    return cost // _PREDICTED


def measure_expression(ast: UOp) -> int:
    """Return what a kernel's operations take to compile, each once, in microseconds."""
    return sum(_measure(one) for one in ast.toposort() if one.op not in _FREE)


def _measure(operation: UOp) -> int:
    return get_operation_us(operation.op.name, str(operation.dtype).removeprefix("dtypes."))
