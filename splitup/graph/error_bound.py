"""How far an honest kernel of any determinism class may be from the reference, element by element.

A kernel takes sums in another order, fuses a multiplication with an addition, or flushes a result
below the normal range to zero. None of these choices moves a value further than a bound that
follows from the operands. So the last step of a dispute needs no calibration: a value outside the
bound is a false claim; within the bound, no claim can be called false. Where no bound can be given
(bits of an inexact float, an inexact divisor), it is infinite. Where only exact operations are
involved it is zero, so integers have to be equal.

The bound of each operation is in ``splitup.graph.operations.error_bounds``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from splitup.graph.arrays import Array
from splitup.graph.dtypes import FLOATS, INTEGERS
from splitup.graph.ir import Node
from splitup.graph.operations.numpy_reference import check_size
from splitup.graph.operations.table import OPERATIONS
from splitup.graph.rules import CheckedGraph


def compute_node(node: Node, operands: Sequence[Array]) -> Array:
    """Return the reference's value of one operation, which is neither INPUT, WEIGHT nor STATE.

    Raises InvalidInput when a value has more than ``MAX_REFERENCE_ELEMENTS`` elements.
    """
    spec = OPERATIONS[node.op]
    assert spec.compute is not None  # it is no param
    if not spec.is_sized_by_result:
        check_size(np.broadcast_shapes(*(operand.shape for operand in operands)))
    with np.errstate(all="ignore"):  # overflow, division by zero and NaN have defined results
        return spec.compute(node, operands)


def compute_bounds(
    graph: CheckedGraph, nodes: Sequence[int], values: dict[int, Array]
) -> dict[int, Array]:
    """Compute ``nodes``, which ascend, into ``values`` by the reference; return the bounds of each.

    The graph has no symbols. What ``values`` holds at the start is exact: both sides have read the
    same bytes. Bounds are float64 arrays of their value's shape; of a bool, 1 where a kernel may
    give the other value.
    """
    bounds = {index: np.zeros(value.shape) for index, value in values.items()}
    for index in nodes:
        node = graph.nodes[index]
        operands = [values[src] for src in node.srcs]
        values[index] = compute_node(node, operands)
        find_bound = OPERATIONS[node.op].bound
        if find_bound is None:
            bounds[index] = np.zeros(values[index].shape)
            continue
        with np.errstate(all="ignore"):  # what cannot be bounded becomes NaN, and then infinite
            bound = find_bound(node, values[index], operands, [bounds[src] for src in node.srcs])
            if node.dtype in FLOATS:
                bound = np.where(np.isfinite(values[index]), bound, math.inf)
            elif node.dtype in INTEGERS:
                bound = np.where(_may_wrap(node.dtype, values[index], bound), math.inf, bound)
        bounds[index] = np.where(np.isnan(bound), math.inf, bound)
    return bounds


def _may_wrap(dtype: str, value: Array, bound: Array) -> Array:
    """Return where an inexact integer may lie at the other end of its dtype's range."""
    info, number = np.iinfo(dtype), value.astype(np.float64)
    return (bound > 0) & ((number - bound < info.min) | (number + bound > info.max))


def is_within(claimed: Array, value: Array, bound: Array) -> bool:
    """Return whether an honest kernel may give the claimed value."""
    with np.errstate(all="ignore"):
        a, b = claimed.astype(np.float64), value.astype(np.float64)
        near = (np.abs(a - b) <= bound) & (bound > 0)  # 64-bit integers are not near as floats
        same = (claimed == value) | (np.isnan(a) & np.isnan(b))
        return bool(np.all(near | same | (bound == math.inf)))
