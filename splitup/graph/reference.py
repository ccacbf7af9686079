"""The reference: a graph computed in numpy, in one fixed order.

What each operation computes is in ``splitup.graph.operations.numpy_reference``.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence

import numpy as np

from splitup.graph.arrays import Array
from splitup.graph.ir import Node
from splitup.graph.operations.numpy_reference import check_size
from splitup.graph.operations.table import OPERATIONS
from splitup.graph.rules import CheckedGraph


def compute_nodes(
    graph: CheckedGraph, nodes: Iterable[int], values: MutableMapping[int, Array]
) -> None:
    """Compute ``nodes``, which ascend, into ``values``, which holds what they read.

    The graph has no symbols (``bind_rows``). Raises InvalidInput when a value has more than
    ``MAX_REFERENCE_ELEMENTS`` elements.
    """
    for index in nodes:
        node = graph.nodes[index]
        values[index] = compute_node(node, [values[src] for src in node.srcs])


def compute_node(node: Node, operands: Sequence[Array]) -> Array:
    """Return the value of one operation, which is neither INPUT, WEIGHT nor STATE.

    Raises InvalidInput when a value has more than ``MAX_REFERENCE_ELEMENTS`` elements.
    """
    spec = OPERATIONS[node.op]
    assert spec.compute is not None  # it is no param
    if not spec.is_sized_by_result:
        check_size(np.broadcast_shapes(*(operand.shape for operand in operands)))
    with np.errstate(all="ignore"):  # overflow, division by zero and NaN have defined results
        return spec.compute(node, operands)
