"""Tasks that only concatenate their inputs, as the join of a divided head does.

Inputs and outputs of such a task are bytes in host memory, so it needs no device: to copy a
megabyte of logits to a device, through a kernel and back takes four times as long as joining the
bytes. A join is recognised by the graph that the compiler writes
(``splitup_deploy.cutting.divide``): a tree of WHERE nodes, each of which chooses by the index along
one axis, over inputs padded along it. It selects and does not compute, so the bytes are those that
kernels give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from splitup.core.tensors import ITEM_BYTES
from splitup.graph.rules import CheckedGraph


@dataclass(frozen=True, slots=True)
class Join:
    """An output whose rows are the concatenated rows of these inputs."""

    pieces: tuple[tuple[int, int], ...]  # input, bytes of one of its rows

    def run(self, inputs: Sequence[bytes | memoryview]) -> bytes:
        """Return the output for checked inputs of any number of rows."""
        first, size = self.pieces[0]
        if len(inputs[first]) == size:
            return b"".join([inputs[index] for index, _ in self.pieces])
        views = [(memoryview(inputs[index]), size) for index, size in self.pieces]
        turns = range(len(inputs[first]) // size)
        return b"".join([view[size * n : size * (n + 1)] for n in turns for view, size in views])


class _NoMatch(Exception):
    """The graph is not a join."""


def find_join(graph: CheckedGraph) -> Join | None:
    """Return how a graph joins inputs to its one output, None if it computes something else."""
    if graph.states or len(graph.outputs) != 1:
        return None
    root = graph.outputs[0].node
    if graph.nodes[root].op == "CONTIGUOUS":
        (root,) = graph.nodes[root].srcs
    pieces: list[tuple[int, int]] = []
    try:
        axis, _ = _read_choice(graph, root)
        pending = [(root, 0, graph.values[root].shape[axis])]
        while pending:  # every choice narrows the range of the axis, so each node is seen once
            index, first, end = pending.pop()
            if graph.nodes[index].op == "PAD":
                pieces.append(_read_leaf(graph, root, axis, index, first, end))
                continue
            chosen, middle = _read_choice(graph, index)
            if chosen != axis or not first < middle < end:
                return None
            _, left, right = graph.nodes[index].srcs
            pending += [(right, middle, end), (left, first, middle)]
    except _NoMatch:
        return None
    return Join(tuple(pieces))


def _read_choice(graph: CheckedGraph, index: int) -> tuple[int, int]:
    """Return the axis along which a WHERE chooses, and the length of its first part."""
    nodes = graph.nodes
    if nodes[index].op != "WHERE" or nodes[nodes[index].srcs[0]].op != "CMPLT":
        raise _NoMatch
    place, bound = (nodes[src] for src in nodes[nodes[index].srcs[0]].srcs)
    if place.op != "RESHAPE" or nodes[place.srcs[0]].op != "IOTA" or bound.op != "CONST":
        raise _NoMatch
    assert isinstance(place.arg, tuple) and isinstance(bound.arg, str)  # as check_graph has seen
    axes = [axis for axis, size in enumerate(place.arg) if size != 1]
    if len(axes) != 1 or len(place.arg) != len(graph.values[index].dims):
        raise _NoMatch
    return axes[0], int(bound.arg)


def _read_leaf(
    graph: CheckedGraph, root: int, axis: int, index: int, first: int, end: int
) -> tuple[int, int]:
    """Return the input that a PAD pads from ``first`` to ``end``, and the bytes of its rows."""
    dims, (inner,) = graph.values[root].dims, graph.nodes[index].srcs
    source = graph.nodes[inner]
    pads = [(0, dim) for dim in dims]
    pads[axis] = (first, graph.values[root].shape[axis])
    wanted = (*dims[:axis], end - first, *dims[axis + 1 :])
    if (
        source.op != "INPUT"
        or graph.nodes[index].arg != tuple(pads)
        or graph.values[inner].dims != wanted
    ):
        raise _NoMatch
    assert isinstance(source.arg, int)  # as check_graph has seen
    return source.arg, ITEM_BYTES[source.dtype] * math.prod(graph.values[inner].shape[axis:])
