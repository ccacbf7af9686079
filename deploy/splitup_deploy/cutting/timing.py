"""Predict how long a step takes, to balance tasks and to show where the time goes.

A value in memory takes the longer of two times: moving bytes from and to device memory, and
computing. The prediction serves to compare tasks of one model with each other; absolute times hold
for one card. Times are whole picoseconds, so that no rounding depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from splitup.core.tensors import ITEM_BYTES
from splitup.graph.cost import compute_roles, is_pick, list_flops
from splitup.graph.operations.table import PARAMS
from splitup.graph.rules import CheckedGraph

# The card whose rent gives the price of a step (splitup.graph.cost): one row of a text model is
# bound by its memory, hundreds of rows by its arithmetic.
BYTES_PER_NS: Final = 300  # GB/s
FLOPS_PER_NS: Final = 5_000  # GFLOP/s, float32 in generated kernels

# Two homes on good fibre, 1 Gbit/s. Latency depends on which nodes are chosen and not on where the
# model is cut, so only bytes count.
NETWORK_BYTES_PER_US: Final = 125


def predict_compute_ps(nbytes: int, flops: int) -> int:
    """Return the picoseconds that memory or arithmetic units are busy, the longer of the two."""
    return max(nbytes * 1000 // BYTES_PER_NS, flops * 1000 // FLOPS_PER_NS)


def predict_transfer_ps(nbytes: int) -> int:
    """Return the picoseconds that these bytes take between two nodes."""
    return nbytes * 10**6 // NETWORK_BYTES_PER_US


class Clock:
    """Predicts the time of regions of one graph."""

    def __init__(self, graph: CheckedGraph) -> None:
        self._graph, self._values = graph, graph.values
        self._roles = compute_roles(graph)
        self._flops = list_flops(graph, self._roles)

    def predict_ps(self, root: int, nodes: Iterable[int]) -> int:
        """Return the time of the value at ``root``; ``nodes`` are computed on the way to it."""
        nbytes, flops_of = self.count(root, nodes)
        return predict_compute_ps(nbytes, sum(flops_of.values()))

    def count(self, root: int, nodes: Iterable[int]) -> tuple[int, dict[int, int]]:
        """Return the bytes that move for the value at ``root``, and each node's operations.

        Of a table, only the rows that are looked up are widened or dequantised.
        """
        nodes = sorted(nodes, reverse=True)
        needed = self._count_needed(root, nodes)
        flops_of = {
            index: self._flops[index] * needed[index] // math.prod(self._values[index].shape)
            for index in nodes
        }
        return self._count_bytes(root, nodes, needed), flops_of

    def _count_needed(self, root: int, nodes: Sequence[int]) -> dict[int, int]:
        """Return how many elements of every value a kernel for ``root`` needs; ``nodes`` fall.

        Of every operand it is at most the result's number of elements times what a reduction folds.
        A one-hot sum needs one element for each of its result's.
        """
        graph, values = self._graph, self._values
        needed = {root: math.prod(values[root].shape)}
        for index in nodes:
            node, count = graph.nodes[index], needed[index]
            if node.op == "REDUCE" and not is_pick(node, self._roles):
                source = values[node.srcs[0]]
                count = count * math.prod(source.shape) // math.prod(values[index].shape)
            for src in node.srcs:
                bounded = min(count, math.prod(values[src].shape))
                needed[src] = max(needed.get(src, 0), bounded)
        return needed

    def _count_bytes(self, root: int, nodes: Sequence[int], needed: Mapping[int, int]) -> int:
        """Return the bytes that a kernel for ``root`` reads and writes."""
        graph, values, inside = self._graph, self._values, set(nodes)
        read = (
            count * ITEM_BYTES[values[index].dtype]
            for index, count in needed.items()
            if index not in inside or graph.nodes[index].op in PARAMS
        )
        return values[root].nbytes + sum(read)
