"""The parts of a graph that tinygrad schedules one by one, and which of them are equal.

Scheduling takes longer the more operations it sees at once, and the layers of a model are equal but
for the buffers that they read and write. So each value in memory is a part of its own, and of equal
parts one is scheduled. A temporary that several values need is one as well: it is computed once for
all of them. Where its size is a symbol, tinygrad decides where its rows lie; then the whole graph
is one part.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final

from splitup.graph.memory import find_live_ranges, find_users, list_roots
from splitup.graph.rules import CheckedGraph

_PORTS: Final = frozenset({"INPUT", "WEIGHT", "STATE"})


@dataclass(frozen=True, slots=True)
class GraphPart:
    """Values in memory that are scheduled together, by their nodes in the graph.

    ``nodes`` are all that they need, operands first; ``buffers`` are those of them that are in
    memory, in an order that equal parts share. ``pattern`` is the place of the first equal part.
    """

    roots: tuple[int, ...]
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]
    pattern: int
    is_temporary: bool = False


def find_parts(graph: CheckedGraph) -> tuple[GraphPart, ...]:
    """Return the parts of a graph, in an order in which they can be computed."""
    temporaries = _find_shared_temporaries(graph)
    if any(isinstance(size, str) for node in temporaries for size in graph.values[node].dims):
        wanted = [output.node for output in graph.outputs]
        wanted += [update.node for update in graph.updates]
        roots = tuple(dict.fromkeys(wanted))
        return (GraphPart(roots, tuple(range(len(graph.nodes))), (), 0),)
    patterns: dict[tuple[Any, ...], int] = {}
    parts: list[GraphPart] = []
    stored = {*list_roots(graph, find_users(graph)), *temporaries}
    held = {node for node, one in enumerate(graph.nodes) if one.op in _PORTS} | stored
    for root in sorted(stored):  # operands first, as all of a graph's nodes
        nodes = _list_nodes(graph, root, held)
        numbers = {node: number for number, node in enumerate(nodes)}
        key = tuple(
            _describe(graph, node, numbers, is_read=node != root and node in held) for node in nodes
        )
        buffers = tuple(node for node in nodes if node in held)
        pattern = patterns.setdefault((root in temporaries, *key), len(parts))
        parts.append(GraphPart((root,), nodes, buffers, pattern, root in temporaries))
    return tuple(parts)


def _find_shared_temporaries(graph: CheckedGraph) -> frozenset[int]:
    """Return the temporaries that several values in memory need."""
    return frozenset(
        node
        for node, live in find_live_ranges(graph).items()
        if graph.nodes[node].op != "CONTIGUOUS" and live.first != live.last
    )


def _list_nodes(graph: CheckedGraph, root: int, held: Container[int]) -> tuple[int, ...]:
    """Return what a value needs, operands first; what is ``held`` is read, not computed."""
    found: dict[int, None] = {}
    pending = [root]
    while pending:
        node = pending[-1]
        is_read = node != root and node in held
        missing = [] if is_read else [src for src in graph.nodes[node].srcs if src not in found]
        if node not in found and missing:
            pending.extend(reversed(missing))
            continue
        found[node] = None
        pending.pop()
    return tuple(found)


def _describe(
    graph: CheckedGraph, index: int, numbers: dict[int, int], *, is_read: bool
) -> tuple[Any, ...]:
    """Return all of a node that decides on the kernel: not which buffer it is."""
    node, value = graph.nodes[index], graph.values[index]
    if is_read:
        return "BUFFER", node.dtype, value.shape, value.dims
    return node.op, node.dtype, tuple(numbers[src] for src in node.srcs), node.arg, value.dims
