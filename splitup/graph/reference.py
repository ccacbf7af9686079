"""The reference: a graph computed in numpy, in one fixed order.

What each operation computes is in ``splitup.graph.operations.numpy_reference``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence

import numpy as np

from splitup.core import limits
from splitup.graph.arrays import Array
from splitup.graph.ir import Graph, Node
from splitup.graph.operations.numpy_reference import check_size
from splitup.graph.operations.table import OPERATIONS, PARAMS
from splitup.graph.rules import CheckedGraph


def list_region(graph: Graph, root: int) -> list[int]:
    """Return the nodes that are computed for the value in memory at ``root``, ascending.

    They end where other values in memory begin (``list_operands``) and hold every constant.
    """
    found, pending = {root}, list(graph.nodes[root].srcs)
    while pending:
        index = pending.pop()
        if index not in found and not is_in_memory(graph.nodes[index]):
            found.add(index)
            pending.extend(graph.nodes[index].srcs)
    return sorted(found)


def list_operands(graph: Graph, region: Iterable[int]) -> list[int]:
    """Return the values in memory that a region reads, ascending."""
    nodes = set(region)
    return sorted({src for index in nodes for src in graph.nodes[index].srcs} - nodes)


def is_computable(graph: CheckedGraph, nodes: Iterable[int]) -> bool:
    """Return whether the reference will take these nodes: none of them is too large for it."""
    for index in nodes:
        node = graph.nodes[index]
        if OPERATIONS[node.op].is_sized_by_result:
            shape = graph.values[index].shape
        else:
            shape = np.broadcast_shapes(*(graph.values[src].shape for src in node.srcs))
        if math.prod(shape) > limits.MAX_REFERENCE_ELEMENTS:
            return False
    return True


def is_in_memory(node: Node) -> bool:
    """Return whether a node's value is in memory before or after a kernel runs."""
    return node.op == "CONTIGUOUS" or node.op in PARAMS


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
