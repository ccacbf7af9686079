"""Where the values of a step lie in device memory: their sizes, live ranges and offsets.

The compiler predicts a task's memory with this module and the runtime lays it out with this module
(``splitup.backend.compiler.arena_layout``), so what is predicted is what is allocated. Weights,
inputs and states have buffers of their own. All other values share one buffer, the arena:

*   Values in memory are computed in the graph's order. The n-th is live from time n to the last
    time that it is read, an output to the end. The value that updates a state is written to the
    state's own buffer.
*   **Temporaries** are values that tinygrad writes to memory besides, such as a reduction whose
    elements are read several times. They are live while the values that need them are computed.
*   Buffers are placed by the time at which they become live, the largest first among those of one
    time, each in the lowest gap that it fits into (first fit).

The offset of a value depends on earlier values alone. So the memory of a growing task never
falls, and adding a value needs no new placement of the others.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.ir import Graph, Node
from splitup.graph.operations.spec import Value
from splitup.graph.operations.table import ARITHMETIC, CONVERSIONS, MOVEMENT
from splitup.graph.rules import CheckedGraph

BUFFER_ALIGNMENT: Final = 256  # enough for the loads and copies of every device
ROW_PADDING: Final = 16  # elements between rows whose number is a symbol
_FEW_BUFFERS: Final = 3  # an elementwise value of more is not computed again for each reader
_ROUNDS: Final = 4  # in which it is found which of such values remain


def get_stride(length: int) -> int:
    """Return the distance, in elements, of rows of ``length`` elements whose number is a symbol.

    Without a gap between rows, tinygrad would join rows and elements into one loop of symbolic
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
class LiveRange:
    """A buffer of ``nbytes`` that is live from time ``first`` to time ``last``, both included."""

    first: int
    last: int
    nbytes: int


class Arena:
    """Memory that is shared by buffers which are not live at the same time."""

    __slots__ = ("_taken", "size")

    def __init__(self) -> None:
        self.size = 0
        self._taken: list[tuple[int, int, int]] = []  # start, end, last time; by start

    def place(self, ranges: Sequence[LiveRange]) -> list[int]:
        """Return the offsets of buffers that become live at one time, not before earlier ones."""
        offsets = [0] * len(ranges)
        if ranges:
            self._taken = [item for item in self._taken if item[2] >= ranges[0].first]
        for index in sorted(range(len(ranges)), key=lambda index: -ranges[index].nbytes):
            placed, offset = ranges[index], 0
            for start, end, _ in self._taken:
                if start - offset >= placed.nbytes:
                    break
                offset = end
            insort(self._taken, (offset, offset + placed.nbytes, placed.last))
            self.size = max(self.size, offset + placed.nbytes)
            offsets[index] = offset
        return offsets


def place_buffers(ranges: Sequence[LiveRange]) -> tuple[list[int], int]:
    """Return every buffer's offset, and the size of the arena."""
    arena, offsets = Arena(), [0] * len(ranges)
    starting: dict[int, list[int]] = {}
    for index, one in enumerate(ranges):
        starting.setdefault(one.first, []).append(index)
    for _, group in sorted(starting.items()):
        for index, offset in zip(group, arena.place([ranges[i] for i in group]), strict=True):
            offsets[index] = offset
    return offsets, arena.size


def find_live_ranges(graph: CheckedGraph) -> dict[int, LiveRange]:
    """Return what shares the arena, by node in the graph's order: values in memory, temporaries."""
    users = find_users(graph)
    times = {root: time for time, root in enumerate(list_roots(graph, users))}
    spans = _find_spans(graph, users, times)
    updated = {update.node for update in graph.updates}
    ranges = {
        index: LiveRange(time, spans[index][1], measure_buffer(graph.values[index]))
        for index, time in times.items()
        if index not in updated
    }
    for index in _find_temporaries(graph, users, spans):
        ranges[index] = LiveRange(*spans[index], round_up(graph.values[index].nbytes))
    return dict(sorted(ranges.items()))


def find_temporaries(graph: CheckedGraph) -> frozenset[int]:
    """Return the nodes that tinygrad writes to memory though the graph does not ask for it."""
    users = find_users(graph)
    times = {root: time for time, root in enumerate(list_roots(graph, users))}
    return _find_temporaries(graph, users, _find_spans(graph, users, times))


def find_users(graph: Graph) -> list[list[int]]:
    """Return the nodes that read each node, of those that an output or update depends on."""
    users: list[list[int]] = [[] for _ in graph.nodes]
    wanted = {output.node for output in graph.outputs} | {update.node for update in graph.updates}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if users[index] or index in wanted:
            for src in dict.fromkeys(graph.nodes[index].srcs):
                users[src].append(index)
    return users


def list_roots(graph: Graph, users: Sequence[Sequence[int]]) -> list[int]:
    """Return the values in memory that an output or update depends on, in order of computation."""
    wanted = {output.node for output in graph.outputs} | {update.node for update in graph.updates}
    return [
        index
        for index, node in enumerate(graph.nodes)
        if node.op == "CONTIGUOUS" and (users[index] or index in wanted)
    ]


def _find_spans(
    graph: Graph, users: Sequence[Sequence[int]], times: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """Return the first and last time at which every needed node is read.

    ``times`` says when each value in memory is computed. An output is read after all else.
    """
    spans: dict[int, tuple[int, int]] = {}
    wanted = {output.node for output in graph.outputs}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if users[index] or index in times:
            read = [
                (times[user], times[user]) if user in times else spans[user]
                for user in users[index]
            ]
            first = times.get(index, min(read)[0] if read else 0)
            last = max((end for _, end in read), default=first)
            spans[index] = first, len(times) if index in wanted else last
    return spans


def _find_temporaries(
    graph: CheckedGraph,
    users: Sequence[Sequence[int]],
    spans: dict[int, tuple[int, int]],
) -> frozenset[int]:
    """Return the temporaries.

    tinygrad computes a reduction in the kernel that reads it, unless that kernel reads an element
    several times or its readers want different elements (``spread``). It computes what follows from
    reductions in the kernels that read it, unless several values in memory need it (``shared``).
    An elementwise value of many buffers is not computed twice either.
    """
    elements = [math.prod(value.shape) for value in graph.values]
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
    found = _find_wide(graph, users, spread, shared)
    reduces = [False] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        is_own = _is_reduction(node, graph.values)
        reduces[index] = is_own or any(reduces[src] for src in node.srcs)
        if node.op == "CONTIGUOUS" or index in found:
            reduces[index] = False
        elif index in spans and ((is_own and spread[index]) or (reduces[index] and shared[index])):
            found.add(index)
            reduces[index] = False
    return frozenset(found)


def _find_wide(
    graph: CheckedGraph,
    users: Sequence[Sequence[int]],
    spread: Sequence[bool],
    shared: Sequence[bool],
) -> set[int]:
    """Return elementwise values of many buffers whose readers want different elements.

    What only such a value reads is computed in its kernel, unless the readers there differ, too.
    """
    nodes, elements = graph.nodes, [math.prod(value.shape) for value in graph.values]
    found: set[int] = set()
    for _ in range(_ROUNDS):
        known, found = found, set()
        kernels: list[int | None] = [None] * len(nodes)  # which one computes a node, if only one
        candidates: set[int] = set()
        for index in range(len(nodes) - 1, -1, -1):
            if not users[index]:
                continue
            readers = [(user, nodes[user].op) for user in users[index]]
            at = {u if op == "CONTIGUOUS" or u in known else kernels[u] for u, op in readers}
            kernels[index] = at.pop() if len(at) == 1 else None
            inside = kernels[index] in known
            differ = (
                kernels[index] is None
                or (len(readers) > 1 and any(op in MOVEMENT for _, op in readers))
                or any(elements[user] > elements[index] for user, _ in readers)
                or (spread[index] and not inside)
            )
            if differ and (nodes[index].op in ARITHMETIC or nodes[index].op in CONVERSIONS):
                candidates.add(index)
        read: list[frozenset[int]] = []
        for index, node in enumerate(nodes):
            together = frozenset().union(*(read[src] for src in node.srcs))
            if index in candidates and len(together) > _FEW_BUFFERS:
                found.add(index)
            is_kept = index in found or (
                (spread[index] or shared[index]) and _is_reduction(node, graph.values)
            )
            if is_kept or node.op in ("INPUT", "WEIGHT", "STATE", "CONTIGUOUS"):
                together = frozenset((index,))
            read.append(frozenset(islice(together, _FEW_BUFFERS + 1)))
        if found == known:
            break
    return found


def _is_reduction(node: Node, values: Sequence[Value]) -> bool:
    """Return whether a node is a reduction for tinygrad; over axes of one element it is none."""
    if node.op == "LOOKUP":
        return values[node.srcs[0]].dims[0] != 1
    if node.op != "REDUCE":
        return False
    assert isinstance(node.arg, tuple) and isinstance(node.arg[1], int)  # as check_graph has seen
    return any(size != 1 for size in values[node.srcs[0]].dims[: node.arg[1]])
