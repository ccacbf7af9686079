"""The error bound of every operation: how far an honest kernel may be from the reference.

The method is running error analysis (N. J. Higham, Accuracy and Stability of Numerical Algorithms,
chapters 2 to 4). A bound is a float64 array of the result's shape; for a bool it is 1 where the
kernel may give the other value. It is infinite where none can be given, zero where only exact
operations are involved. See ``splitup.graph.error_bound``, which applies these functions.

Each function takes the node, the reference's value, the operands and the operands' bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from splitup.graph.arrays import Array
from splitup.graph.dtypes import FLOATS, INTEGERS
from splitup.graph.ir import Node
from splitup.graph.operations.spec import Bound, Compute

# Units in the last place that one operation of a kernel and of the reference may be apart. IEEE
# operations are exact to half a unit each; compilers for GPUs divide to 2, and their functions are
# documented to 4 (CUDA C++ Programming Guide, "Mathematical Functions", single precision).
BASIC_UNITS: Final = 2
DIVISION_UNITS: Final = 4
FUNCTION_UNITS: Final = 8
POWER_UNITS: Final = 32
_PRECISION: Final = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
_SMALLEST: Final = {"float16": 2.0**-14, "float64": 2.0**-1022}  # normal; others: 2^-126

# how the operands' bounds carry over: operands in float64, their bounds, value -> bound
CarryOver = Callable[[Sequence[Array], Sequence[Array], Array], Any]


# ---- elementwise -------------------------------------------------------------------------------


def arithmetic_bound(
    carry_over: CarryOver, units: int = BASIC_UNITS, least_magnitude: float = 0.0
) -> Bound:
    """Return the bound of an operation that rounds once: what carries over, and the rounding.

    The rounding error is that of values of at least ``least_magnitude``.
    """

    def bound(
        node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
    ) -> Array:
        if node.dtype == "bool":
            return bound_bitwise(node, value, operands, bounds)
        numbers = [operand.astype(np.float64) for operand in operands]
        carried = np.broadcast_to(carry_over(numbers, bounds, value), value.shape)
        magnitude = np.maximum(np.abs(value.astype(np.float64)) + carried, least_magnitude)
        return carried + _bound_rounding(node, magnitude, units)

    return bound


def bound_comparison(
    node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
) -> Array:
    left, right = (operand.astype(np.float64) for operand in operands)
    either = bounds[0] + bounds[1]
    is_clear = np.abs(left - right) > either  # never where one is NaN
    return np.where((either > 0) & ~is_clear, 1.0, 0.0)


def bound_where(
    node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
) -> Array:
    chosen = np.where(operands[0], bounds[1], bounds[2])
    left, right = (operand.astype(np.float64) for operand in operands[1:])
    apart = np.abs(left - right) + bounds[1] + bounds[2]
    return np.where(bounds[0] > 0, apart, chosen)


def bound_bitwise(
    node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
) -> Array:
    worst = np.broadcast_to(np.max(np.broadcast_arrays(*bounds), axis=0), value.shape)
    return np.where(worst > 0, 1.0 if node.dtype == "bool" else math.inf, 0.0)


def bound_exact_only(
    node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
) -> Array:
    """Return 0 if all operands are exact, else infinity: a small error may change all bits."""
    is_exact = not any(bound.any() for bound in bounds)
    return np.broadcast_to(np.asarray(0.0 if is_exact else math.inf), value.shape)


def bound_cast(
    node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
) -> Array:
    source, bound = operands[0], bounds[0]
    if node.dtype == "bool":
        return np.where((bound > 0) & (np.abs(source.astype(np.float64)) <= bound), 1.0, 0.0)
    if node.dtype in INTEGERS and source.dtype.kind == "f":
        # beyond its range, and for NaN, kernels convert as their processor does
        info, number = np.iinfo(node.dtype), source.astype(np.float64)
        low, high = max(info.min, -(2**31)), min(info.max, 2**31 - 1)
        inside = (number - bound > low - 1) & (number + bound < high + 1)
        return np.where(inside, np.where(bound > 0, np.ceil(bound) + 1, 0.0), math.inf)
    return bound + _bound_rounding(node, np.abs(value.astype(np.float64)) + bound, BASIC_UNITS)


# ---- movement, reduction, lookup ---------------------------------------------------------------


def moved_bound(compute: Compute) -> Bound:
    """Return the bound of an operation that moves elements: their bounds move along."""
    return lambda node, value, operands, bounds: compute(node, bounds)


def bound_lookup(compute: Compute) -> Bound:
    """Return the bound of a lookup: the found row's, infinite where the index is not exact."""

    def bound(
        node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
    ) -> Array:
        found = compute(node, (bounds[0], operands[1]))
        inexact = bounds[1].reshape(bounds[1].shape + (1,) * (found.ndim - bounds[1].ndim))
        return np.where(inexact > 0, math.inf, found)

    return bound


def bound_reduce(
    node: Node, value: Array, operands: Sequence[Array], bounds: Sequence[Array]
) -> Array:
    arg: Any = node.arg
    rows = bounds[0].reshape(-1, *value.shape)
    if arg[0] == "MAX":
        return np.max(rows, axis=0)  # type: ignore[no-any-return]
    if arg[0] == "ADD":
        # any order of n terms is within (n - 1) roundings of the sum of magnitudes: Higham (4.4)
        size = np.abs(operands[0].astype(np.float64)).reshape(-1, *value.shape) + rows
        sums, carried = np.sum(size, axis=0), np.sum(rows, axis=0)
        return np.asarray(carried + _bound_rounding(node, sums, BASIC_UNITS * len(rows)))
    is_exact = np.all(rows == 0, axis=0)
    size = np.abs(value.astype(np.float64))
    return np.where(is_exact, _bound_rounding(node, size, BASIC_UNITS * len(rows)), math.inf)


def _bound_rounding(node: Node, magnitude: Array, units: int) -> Array:
    if node.dtype not in FLOATS:
        return np.zeros(magnitude.shape)
    precision = _PRECISION.get(node.dtype, 2.0**-52)
    smallest = _SMALLEST.get(node.dtype, 2.0**-126)
    return np.where(magnitude > 0, magnitude * precision * units + smallest * units, 0.0)


# ---- how the operands' bounds carry over -------------------------------------------------------


def carry_sum(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    return bounds[0] + bounds[1]


def carry_product(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    (x, y), (dx, dy) = numbers, bounds
    return np.abs(x) * dy + np.abs(y) * dx + dx * dy


def carry_maximum(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    return np.maximum(bounds[0], bounds[1])


def carry_same(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    return bounds[0]


def carry_truncation(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    return np.where(bounds[0] > 0, np.ceil(bounds[0]) + 1, 0.0)


def carry_quotient(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    size = np.abs(numbers[1]) - bounds[1]
    carried = (bounds[0] + np.abs(value.astype(np.float64)) * bounds[1]) / size
    return np.where(size > 0, carried, math.inf)


def carry_reciprocal(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    one, exact = np.ones(()), np.zeros(())
    return carry_quotient([one, numbers[0]], [exact, bounds[0]], value)


def carry_square_root(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    x, error = numbers[0], bounds[0]
    return np.where(x > error, error / np.sqrt(x), np.sqrt(np.abs(x) + error) * (error > 0))


def carry_exp2(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    growth = np.abs(value) * np.expm1(bounds[0] * math.log(2.0))
    return np.where(bounds[0] > 0, growth, 0.0)


def carry_log2(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    size = numbers[0] - bounds[0]
    return np.where(size > 0, bounds[0] / size / math.log(2.0), math.inf)


def carry_sine(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    return np.minimum(bounds[0], 2.0)


def carry_power(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Any:
    return np.where((bounds[0] > 0) | (bounds[1] > 0), math.inf, 0.0)
