"""Where the values of a step lie in device memory: their sizes, their lifetimes, one arena.

The compiler predicts a task's memory with this, and the runtime lays it out with this
(``splitup.graph.layout``), so what is predicted is what is allocated. Weights, inputs and states
have buffers of their own. All other values share an arena:

*   Values in memory are computed in the graph's order. The n-th lives from time n to the last
    time that it is read, outputs to the end; what updates a state is written to the state.
*   A reduction that is read more often than it has elements is a **temporary**: tinygrad writes it
    to memory too. It lives while the values are computed that it is needed for.
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

from splitup.graph.ir import Graph
from splitup.graph.rules import MOVEMENT, Value
from splitup.tensors import ITEM_BYTES, TensorSpec

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
    roots = list_roots(graph, users)
    places = {root: place for place, root in enumerate(roots)}
    lasts = find_lasts(graph, users, places)
    temporaries = find_temporaries(graph, users)
    updated = {update.node for update in graph.updates}
    firsts: dict[int, int] = {}
    tenants: dict[int, Tenant] = {}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if index in places:
            if index not in updated:
                space = measure_buffer(values[index])
                tenants[index] = Tenant(places[index], lasts[index], space)
        elif users[index]:
            firsts[index] = min(places.get(user, firsts.get(user, 0)) for user in users[index])
            if index in temporaries:
                space = round_up(values[index].nbytes)
                tenants[index] = Tenant(firsts[index], lasts[index], space)
    return dict(sorted(tenants.items()))


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


def find_lasts(
    graph: Graph, users: Sequence[Sequence[int]], places: dict[int, int]
) -> dict[int, int]:
    """Return when every needed node is read last: a time, or that after all for an output."""
    lasts: dict[int, int] = {}
    wanted = {output.node for output in graph.outputs}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if index in wanted:
            lasts[index] = len(places)
        elif users[index] or index in places:
            lasts[index] = max(
                (places.get(user, lasts.get(user, 0)) for user in users[index]),
                default=places.get(index, 0),
            )
    return lasts


def find_temporaries(graph: Graph, users: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the reductions that tinygrad writes to memory though the graph does not ask for it.

    A reduction is computed within the kernel that reads it, unless an EXPAND lies between, or
    several readers want different elements of it.
    """
    spread = [False] * len(graph.nodes)
    found = []
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        ops = [graph.nodes[user].op for user in users[index]]
        spread[index] = (
            any(op in ("EXPAND", "LOOKUP") for op in ops)
            or (len(ops) > 1 and any(op in MOVEMENT and op != "RESHAPE" for op in ops))
            or any(
                spread[user] and op not in ("CONTIGUOUS", "REDUCE")
                for user, op in zip(users[index], ops, strict=True)
            )
        )
        if spread[index] and node.op in ("REDUCE", "LOOKUP"):
            found.append(index)
    return frozenset(found)


def measure_arena(tenants: Iterable[Tenant]) -> int:
    """Return the size of the arena that the tenants share."""
    return place_tenants(list(tenants))[1]
