"""Where the values of a step lie in device memory: their sizes, their lifetimes, one arena.

The compiler predicts a task's memory with this, and the runtime lays it out with this
(``splitup.backend.arena_layout``), so what is predicted is what is allocated. Weights, inputs and
states have buffers of their own. All other values share an arena:

*   Values in memory are computed in the graph's order. The n-th lives from time n to the last
    time that it is read, outputs to the end; what updates a state is written to the state.
*   **Temporaries** are what tinygrad writes to memory besides, such as a reduction whose elements
    are read again and again. They live while the values are computed that they are needed for.
*   At every time the largest comes first, and each takes the lowest gap that it fits into.

Where a value comes to lie depends on earlier ones alone. So the memory of a growing task never
falls, and is found by going on.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.ir import Graph, Node
from splitup.graph.rules import MOVEMENT, Value

BUFFER_ALIGNMENT: Final = 256  # what every device's loads and copies are content with
ROW_PADDING: Final = 16  # elements between rows whose number is a symbol


def get_stride(length: int) -> int:
    """Return how many elements apart rows of ``length`` elements stand where a symbol counts them.

    Were they without a gap, tinygrad would run over rows and elements in one loop of symbolic
    length, which it does not vectorise.
    """
    return length + ROW_PADDING if length > 1 else length


def measure_buffer(spec: Value | TensorSpec) -> int:
    """Return the memory that a value or a port takes at its largest."""
    if not spec.rows:
        return round_up(spec.nbytes)
    length = math.prod(spec.shape[1:])
    return round_up(spec.shape[0] * get_stride(length) * ITEM_BYTES[spec.dtype])


def round_up(nbytes: int) -> int:
    """Return the memory that a value of ``nbytes`` takes."""
    return -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Tenant:
    """What takes memory from time ``first`` to time ``last``, both included."""

    first: int
    last: int
    space: int


class Arena:
    """Memory that is shared by values which do not live at the same time."""

    __slots__ = ("_taken", "size")

    def __init__(self) -> None:
        self.size = 0
        self._taken: list[tuple[int, int, int]] = []  # start, end, last time; by start

    def place(self, tenants: Sequence[Tenant]) -> list[int]:
        """Return the offsets of tenants that begin at one time, not before earlier ones."""
        offsets = [0] * len(tenants)
        if tenants:
            self._taken = [item for item in self._taken if item[2] >= tenants[0].first]
        for index in sorted(range(len(tenants)), key=lambda index: -tenants[index].space):
            tenant, offset = tenants[index], 0
            for start, end, _ in self._taken:
                if start - offset >= tenant.space:
                    break
                offset = end
            insort(self._taken, (offset, offset + tenant.space, tenant.last))
            self.size = max(self.size, offset + tenant.space)
            offsets[index] = offset
        return offsets


def place_tenants(tenants: Sequence[Tenant]) -> tuple[list[int], int]:
    """Return every tenant's offset, and the size of the arena."""
    arena, offsets = Arena(), [0] * len(tenants)
    starting: dict[int, list[int]] = {}
    for index, tenant in enumerate(tenants):
        starting.setdefault(tenant.first, []).append(index)
    for _, group in sorted(starting.items()):
        for index, offset in zip(group, arena.place([tenants[i] for i in group]), strict=True):
            offsets[index] = offset
    return offsets, arena.size


def find_tenants(graph: Graph, values: Sequence[Value]) -> dict[int, Tenant]:
    """Return what shares the arena, by node in the graph's order: values in memory, temporaries."""
    users = find_users(graph)
    places = {root: place for place, root in enumerate(list_roots(graph, users))}
    spans = _find_spans(graph, users, places)
    updated = {update.node for update in graph.updates}
    tenants = {
        index: Tenant(place, spans[index][1], measure_buffer(values[index]))
        for index, place in places.items()
        if index not in updated
    }
    for index in _find_temporaries(graph, values, users, spans):
        tenants[index] = Tenant(*spans[index], round_up(values[index].nbytes))
    return dict(sorted(tenants.items()))


def find_temporaries(graph: Graph, values: Sequence[Value]) -> frozenset[int]:
    """Return the nodes that tinygrad writes to memory though the graph does not ask for it."""
    users = find_users(graph)
    places = {root: place for place, root in enumerate(list_roots(graph, users))}
    return _find_temporaries(graph, values, users, _find_spans(graph, users, places))


def find_users(graph: Graph) -> list[list[int]]:
    """Return for every node those that read it and that a result depends on."""
    users: list[list[int]] = [[] for _ in graph.nodes]
    wanted = {output.node for output in graph.outputs} | {update.node for update in graph.updates}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if users[index] or index in wanted:
            for src in dict.fromkeys(graph.nodes[index].srcs):
                users[src].append(index)
    return users


def list_roots(graph: Graph, users: Sequence[Sequence[int]]) -> list[int]:
    """Return the values in memory that a result depends on, in the order of computing them."""
    wanted = {output.node for output in graph.outputs} | {update.node for update in graph.updates}
    return [
        index
        for index, node in enumerate(graph.nodes)
        if node.op == "CONTIGUOUS" and (users[index] or index in wanted)
    ]


def _find_spans(
    graph: Graph, users: Sequence[Sequence[int]], places: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """Return when every needed node is read first and last; an output last after all else."""
    spans: dict[int, tuple[int, int]] = {}
    wanted = {output.node for output in graph.outputs}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if users[index] or index in places:
            read = [
                (places[user], places[user]) if user in places else spans[user]
                for user in users[index]
            ]
            first = places.get(index, min(read)[0] if read else 0)
            last = max((end for _, end in read), default=first)
            spans[index] = first, len(places) if index in wanted else last
    return spans


def _find_temporaries(
    graph: Graph,
    values: Sequence[Value],
    users: Sequence[Sequence[int]],
    spans: dict[int, tuple[int, int]],
) -> frozenset[int]:
    """Return the temporaries.

    A reduction is computed within the kernel that reads it, unless that reads it again and again,
    or several readers want different elements of it. So is what is computed from reductions, unless
    several values in memory are computed from it.
    """
    elements = [math.prod(value.shape) for value in values]
    spread, shared = [False] * len(graph.nodes), [False] * len(graph.nodes)
    for index in range(len(graph.nodes) - 1, -1, -1):
        ops = [graph.nodes[user].op for user in users[index]]
        shared[index] = 1 < len(
            {
                spans[user][:1] if op == "CONTIGUOUS" else spans[user]
                for user, op in zip(users[index], ops, strict=True)
            }
        )
        spread[index] = (
            len(ops) > 1 and any(op in MOVEMENT and op != "RESHAPE" for op in ops)
        ) or any(
            op == "LOOKUP"
            or (spread[user] and op not in ("CONTIGUOUS", "REDUCE"))
            or (elements[user] > elements[index] and op not in ("PAD", "STACK"))
            for user, op in zip(users[index], ops, strict=True)
        )
    found, folds = set(), [False] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        is_fold = _is_fold(node, values)
        folds[index] = is_fold or any(folds[src] for src in node.srcs)
        if node.op == "CONTIGUOUS":
            folds[index] = False
        elif index in spans and ((is_fold and spread[index]) or (folds[index] and shared[index])):
            found.add(index)
            folds[index] = False
    return frozenset(found)


def _is_fold(node: Node, values: Sequence[Value]) -> bool:
    """Say whether a node is a reduction for tinygrad; over axes of one element it is none."""
    if node.op == "LOOKUP":
        return values[node.srcs[0]].dims[0] != 1
    if node.op != "REDUCE":
        return False
    assert isinstance(node.arg, tuple) and isinstance(node.arg[1], int)  # as check_graph has seen
    return any(size != 1 for size in values[node.srcs[0]].dims[: node.arg[1]])


def measure_arena(tenants: Iterable[Tenant]) -> int:
    """Return the size of the arena that the tenants share."""
    return place_tenants(list(tenants))[1]
