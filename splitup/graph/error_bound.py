"""How far an honest kernel of any determinism class may be from the reference, element by element.

A kernel takes sums in another order, fuses a multiplication with an addition, or flushes a result
below the normal range to zero; no choice of these moves a value further than a bound that follows
from the operands ("running error analysis": N. J. Higham, Accuracy and Stability of Numerical
Algorithms, chapters 2 to 4). So the last step of a dispute needs no calibration: outside the bound
is a lie, inside it nobody can be called a liar. Where no bound can be given (bits of an uncertain
float, an uncertain divisor), it is infinite, and where only exact operations are involved it is
zero: integers have to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from splitup.graph.ir import Graph, Node
from splitup.graph.reference import Array, compute_node
from splitup.graph.rules import COMPARISONS, DIVISIONS, FLOATS, INTEGERS, MOVEMENT, SHIFTS

# Units in the last place that one operation of a kernel and of the reference may be apart. IEEE
# operations are exact to half a unit each; compilers for GPUs divide to 2, and their functions are
# documented to 4 (CUDA C++ Programming Guide, "Mathematical Functions", single precision).
_UNITS: Final = {"EXP2": 8, "LOG2": 8, "SIN": 8, "POW": 32, "SQRT": 4, "RECIPROCAL": 4, "FDIV": 4}
_BASIC_UNITS: Final = 2
_PRECISION: Final = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
_SMALLEST: Final = {"float16": 2.0**-14, "float64": 2.0**-1022}  # normal; others: 2^-126


def compute_bounds(
    graph: Graph, nodes: Sequence[int], values: dict[int, Array]
) -> dict[int, Array]:
    """Compute ``nodes`` into ``values`` as ``compute_nodes`` does; return the bounds of each.

    The graph has no symbols.
    What ``values`` holds at the start is exact: both sides have read the same bytes. Bounds are
    float64 arrays of their value's shape; of a bool, 1 where it may be the other one.
    """
    bounds = {index: np.zeros(value.shape) for index, value in values.items()}
    for index in nodes:
        node = graph.nodes[index]
        sources = [values[src] for src in node.srcs]
        values[index] = compute_node(node, sources)
        with np.errstate(all="ignore"):  # what cannot be bounded becomes NaN, and then infinite
            bound = _bound_node(node, values[index], sources, [bounds[src] for src in node.srcs])
            if node.dtype in FLOATS:
                bound = np.where(np.isfinite(values[index]), bound, math.inf)
        bounds[index] = np.where(np.isnan(bound), math.inf, bound)
    return bounds


def is_within(claimed: Array, value: Array, bound: Array) -> bool:
    """Return whether a claimed value is one that an honest kernel may give."""
    with np.errstate(all="ignore"):
        a, b = claimed.astype(np.float64), value.astype(np.float64)
        near = (np.abs(a - b) <= bound) & (bound > 0)  # 64-bit integers are not near as floats
        same = (claimed == value) | (np.isnan(a) & np.isnan(b))
        return bool(np.all(near | same | (bound == math.inf)))


def _bound_node(
    node: Node, value: Array, sources: Sequence[Array], bounds: Sequence[Array]
) -> Array:
    if not sources:
        return np.zeros(value.shape)
    if node.op in MOVEMENT or node.op in ("STACK", "CONTIGUOUS"):
        return compute_node(node, bounds)
    if node.op == "LOOKUP":
        found = compute_node(node, (bounds[0], sources[1]))
        doubtful = bounds[1].reshape(bounds[1].shape + (1,) * (found.ndim - bounds[1].ndim))
        return np.where(doubtful > 0, math.inf, found)
    exact = np.asarray(not any(bound.any() for bound in bounds))
    if node.op == "CAST":
        return _bound_cast(node, value, sources[0], bounds[0])
    if node.op == "BITCAST" or node.op in DIVISIONS or node.op in SHIFTS:
        return np.broadcast_to(_unless(exact), value.shape)
    numbers = [source.astype(np.float64) for source in sources]
    if node.op in COMPARISONS:
        either = bounds[0] + bounds[1]
        return np.where((either > 0) & (np.abs(numbers[0] - numbers[1]) <= either), 1.0, 0.0)
    if node.op == "REDUCE":
        return _bound_fold(node, value, numbers[0], bounds[0])
    if node.op == "WHERE":
        chosen = np.where(sources[0], bounds[1], bounds[2])
        apart = np.abs(numbers[1] - numbers[2]) + bounds[1] + bounds[2]
        return np.where(bounds[0] > 0, apart, chosen)
    if node.dtype == "bool" or node.op in ("AND", "OR", "XOR"):
        worst = np.broadcast_to(np.max(np.broadcast_arrays(*bounds), axis=0), value.shape)
        return np.where(worst > 0, 1.0 if node.dtype == "bool" else math.inf, 0.0)
    units = _UNITS.get(node.op, _BASIC_UNITS)
    passed = np.broadcast_to(_PASSED[node.op](numbers, bounds, value), value.shape)
    return passed + _round_off(node, np.abs(value.astype(np.float64)) + passed, units)


def _bound_cast(node: Node, value: Array, source: Array, bound: Array) -> Array:
    if node.dtype == "bool":
        return np.where((bound > 0) & (np.abs(source.astype(np.float64)) <= bound), 1.0, 0.0)
    if node.dtype in INTEGERS and source.dtype.kind == "f":
        inside = np.isfinite(source) & (np.abs(source.astype(np.float64)) < 2.0**31)
        # beyond its range, and for NaN, kernels convert as their processor does
        return np.where(inside, np.where(bound > 0, np.ceil(bound) + 1, 0.0), math.inf)
    return bound + _round_off(node, np.abs(value.astype(np.float64)) + bound, _BASIC_UNITS)


def _bound_fold(node: Node, value: Array, source: Array, bound: Array) -> Array:
    assert isinstance(node.arg, tuple) and isinstance(node.arg[1], int)  # as check_graph has seen
    rows = bound.reshape(-1, *value.shape)
    if node.arg[0] == "MAX":
        return np.max(rows, axis=0)  # type: ignore[no-any-return]
    if node.arg[0] == "ADD":
        # any order of n terms is within (n - 1) roundings of the sum of magnitudes: Higham (4.4)
        size = np.abs(source).reshape(-1, *value.shape) + rows
        sums, passed = np.sum(size, axis=0), np.sum(rows, axis=0)
        return np.asarray(passed + _round_off(node, sums, _BASIC_UNITS * len(rows)))
    exact = np.all(rows == 0, axis=0)
    size = np.abs(value.astype(np.float64))
    return np.where(exact, _round_off(node, size, _BASIC_UNITS * len(rows)), math.inf)


def _round_off(node: Node, magnitude: Array, units: int) -> Array:
    if node.dtype not in FLOATS:
        return np.zeros(magnitude.shape)
    precision = _PRECISION.get(node.dtype, 2.0**-52)
    smallest = _SMALLEST.get(node.dtype, 2.0**-126)
    if node.op == "SIN":
        magnitude = np.maximum(magnitude, 1.0)  # functions of GPUs are absolute here
    return np.where(magnitude > 0, magnitude * precision * units + smallest * units, 0.0)


def _unless(exact: Array) -> Array:
    return np.where(exact, 0.0, math.inf)


def _divide(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Array:
    size = np.abs(numbers[1]) - bounds[1]
    passed = (bounds[0] + np.abs(value.astype(np.float64)) * bounds[1]) / size
    return np.where(size > 0, passed, math.inf)


def _invert(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Array:
    return _divide([np.ones(()), numbers[0]], [np.zeros(()), bounds[0]], value)


def _log(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Array:
    size = numbers[0] - bounds[0]
    return np.where(size > 0, bounds[0] / size / math.log(2.0), math.inf)


def _root(numbers: Sequence[Array], bounds: Sequence[Array], value: Array) -> Array:
    x, error = numbers[0], bounds[0]
    return np.where(x > error, error / np.sqrt(x), np.sqrt(np.abs(x) + error) * (error > 0))


_Passed = Callable[[Sequence[Array], Sequence[Array], Array], Any]
# the operands' bounds, passed on: numbers, bounds, value -> bound before this node's own rounding
_PASSED: Final[Mapping[str, _Passed]] = {
    **dict.fromkeys(("ADD", "SUB"), lambda n, e, v: e[0] + e[1]),
    "MUL": lambda n, e, v: np.abs(n[0]) * e[1] + np.abs(n[1]) * e[0] + e[0] * e[1],
    "MAX": lambda n, e, v: np.maximum(e[0], e[1]),
    "NEG": lambda n, e, v: e[0],
    "TRUNC": lambda n, e, v: np.where(e[0] > 0, np.ceil(e[0]) + 1, 0.0),
    "FDIV": _divide,
    "RECIPROCAL": _invert,
    "SQRT": _root,
    "EXP2": lambda n, e, v: np.where(e[0] > 0, np.abs(v) * np.expm1(e[0] * math.log(2.0)), 0.0),
    "LOG2": _log,
    "SIN": lambda n, e, v: np.minimum(e[0], 2.0),
    "POW": lambda n, e, v: np.where((e[0] > 0) | (e[1] > 0), math.inf, 0.0),
}
