"""Predict how long a step takes, to balance tasks and to show where the time goes.

A value in memory takes the longer of two times: moving bytes from and to device memory, and
computing. The prediction serves to compare tasks of one model with each other; absolute times hold
for one device. Times are whole picoseconds, so that no rounding depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from splitup.core.tensors import ITEM_BYTES
from splitup.graph.cost import compute_roles, is_pick, list_flops
from splitup.graph.operations.table import MOVEMENT, PARAMS
from splitup.graph.rules import CheckedGraph


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a device's memory and arithmetic.

    Where sums of products have special code, ``rest_per_ns`` is the speed of all other operations
    and ``launch_ps`` the additional time of each value; both are 0 where all operations are alike.
    """

    bytes_per_ns: int  # GB/s
    flops_per_ns: int  # GFLOP/s, float32 in generated kernels
    rest_per_ns: int = 0
    launch_ps: int = 0


# The card whose rent gives the price of a step (splitup.graph.cost): one row of a text model is
# bound by its memory, hundreds of rows by its arithmetic.
CARD: Final = Speed(300, 5_000)
# One core with AVX2, measured (docs/kernels.md, docs/memory.md): products in vectors, all else in
# tinygrad's scalar code.
PROCESSOR: Final = Speed(30, 90, rest_per_ns=5, launch_ps=1_000_000)
# Operations that one of these is in scalar code, a polynomial: 85 ms for 18.9 million (kernels.md).
_SERIES: Final = frozenset({"EXP2", "LOG2", "SIN"})
_SERIES_FLOPS: Final = 20

# Two homes on good fibre, 1 Gbit/s. Latency depends on which nodes are chosen and not on where the
# model is cut, so only bytes count.
NETWORK_BYTES_PER_US: Final = 125


def predict_compute_ps(nbytes: int, flops: int, speed: Speed = CARD) -> int:
    """Return the picoseconds that memory or arithmetic units are busy, the longer of the two."""
    return max(nbytes * 1000 // speed.bytes_per_ns, flops * 1000 // speed.flops_per_ns)


def predict_transfer_ps(nbytes: int) -> int:
    """Return the picoseconds that these bytes take between two nodes."""
    return nbytes * 10**6 // NETWORK_BYTES_PER_US


class Clock:
    """Predicts the time of regions of one graph."""

    def __init__(self, graph: CheckedGraph, speed: Speed = CARD) -> None:
        self._graph, self._values, self._speed = graph, graph.values, speed
        self._roles = compute_roles(graph)
        self._flops = list_flops(graph, self._roles)

    def predict_ps(self, root: int, nodes: Iterable[int]) -> int:
        """Return the time of the value at ``root``; ``nodes`` are computed on the way to it."""
        nodes = sorted(nodes, reverse=True)
        needed = self._count_needed(root, nodes)
        speed, nbytes = self._speed, self._count_bytes(root, nodes, needed)
        # of a table, only the rows that are looked up are widened or dequantised
        flops_of = {
            index: self._flops[index] * needed[index] // math.prod(self._values[index].shape)
            for index in nodes
        }
        flops = sum(flops_of.values())
        if not speed.rest_per_ns:
            return predict_compute_ps(nbytes, flops, speed)
        products = sum(flops_of[index] for index in self._find_products(nodes))
        series = sum(flops_of[index] for index in nodes if self._graph.nodes[index].op in _SERIES)
        rest = flops - products + series * (_SERIES_FLOPS - 1)
        busy = predict_compute_ps(nbytes, products, speed)
        return speed.launch_ps + busy + rest * 1000 // speed.rest_per_ns

    def _find_products(self, nodes: Sequence[int]) -> set[int]:
        """Return the sums of products, with what widens or looks up operands; ``nodes`` fall."""
        graph, inside = self._graph, set(nodes)
        found: set[int] = set()
        for index in nodes:
            node = graph.nodes[index]
            if index in found or (node.op == "REDUCE" and self._multiplies(node.srcs[0])):
                found.add(index)
                found.update(src for src in node.srcs if src in inside)
        return found

    def _multiplies(self, index: int) -> bool:
        while self._graph.nodes[index].op in MOVEMENT:
            index = self._graph.nodes[index].srcs[0]
        return self._graph.nodes[index].op == "MUL"

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
