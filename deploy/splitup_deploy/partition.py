"""Cut a graph into tasks that each fit the target memory.

The graph is cut only at values that it writes to memory (CONTIGUOUS nodes), so cutting changes no
kernel and the cut model gives the same bytes as the whole one. Each such value, with the
operations between it and earlier values in memory, is a **region**; regions stand in the graph's
own order. A task is a run of neighbouring regions. Among all ways to cut that order, the
one is taken that

1. has the fewest tasks, each within the target; of these the one that
2. moves the fewest bytes between tasks; of these the one
3. whose largest task is smallest.

A dynamic programme over the order finds it: the three numbers are compared as a tuple, in which a
task adds (1, bytes it reads from other tasks) and takes the maximum with its memory. Both ways of
combining are monotone, so the best cut of a prefix is part of a best cut of the whole. Regions that
read or update one state stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from splitup import limits
from splitup.errors import InvalidModel
from splitup.graph.cost import is_materialised, round_up
from splitup.graph.ir import Graph
from splitup.graph.rules import PARAMS, Value


@dataclass(frozen=True, slots=True)
class Region:
    """One value in memory (``root``) and the nodes computed on the way to it."""

    root: int
    nodes: frozenset[int]  # params included, earlier values in memory not
    reads: frozenset[int]  # roots of other regions
    label: str


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of memory by what takes them, for one region."""

    weights: dict[int, int]
    inputs: dict[int, int]
    states: dict[int, int]
    reads: dict[int, int]
    activations: int


def find_regions(graph: Graph, labels: Mapping[int, str]) -> list[Region]:
    """Return the regions in the graph's order, leaving out values that no result depends on."""
    regions = []
    for root in sorted(_find_roots(graph)):
        inside: set[int] = {root}
        reads: set[int] = set()
        pending = list(graph.nodes[root].srcs)
        while pending:
            index = pending.pop()
            if graph.nodes[index].op == "CONTIGUOUS":
                reads.add(index)
            elif index not in inside:
                inside.add(index)
                pending.extend(graph.nodes[index].srcs)
        label = labels.get(root, f"value {root}")
        regions.append(Region(root, frozenset(inside), frozenset(reads), label))
    return regions


def partition(
    graph: Graph, values: Sequence[Value], labels: Mapping[int, str], target_bytes: int
) -> list[list[Region]]:
    """Return the tasks, each a list of neighbouring regions.

    Raises InvalidModel when one region, or the regions around one state, need more than the target.
    """
    regions = find_regions(graph, labels)
    sizes = [_measure(graph, values, region) for region in regions]
    nbytes = {region.root: values[region.root].nbytes for region in regions}
    glued = _find_glued(graph, regions)
    best: list[tuple[int, int, int, int] | None] = [(0, 0, 0, -1)]
    for end in range(1, len(regions) + 1):
        best.append(None)
        if end < len(regions) and end in glued:
            continue
        for start, vram, moved in _grow_backwards(regions, sizes, nbytes, end):
            if vram > target_bytes:
                break
            if start in glued or (before := best[start]) is None:
                continue
            candidate = (before[0] + 1, before[1] + moved, max(before[2], vram), start)
            known = best[end]
            if known is None or candidate[:3] < known[:3]:
                best[end] = candidate
        if best[end] is None:
            raise _explain(regions, sizes, nbytes, glued, target_bytes, end)
    cuts = [len(regions)]
    while cuts[-1] > 0:
        step = best[cuts[-1]]
        assert step is not None  # cuts lie at reachable positions only
        cuts.append(step[3])
    cuts.reverse()
    if len(cuts) - 1 > limits.MAX_TASKS:
        raise InvalidModel(
            f"a target of {target_bytes} bytes gives {len(cuts) - 1} tasks; at most "
            f"{limits.MAX_TASKS} are possible: raise --target-vram"
        )
    return [regions[start:end] for start, end in pairwise(cuts)]


def _find_roots(graph: Graph) -> frozenset[int]:
    """Return the CONTIGUOUS nodes that outputs and updates depend on."""
    pending = [output.node for output in graph.outputs] + [u.node for u in graph.updates]
    seen = set(pending)
    while pending:
        for src in graph.nodes[pending.pop()].srcs:
            if src not in seen:
                seen.add(src)
                pending.append(src)
    return frozenset(index for index in seen if graph.nodes[index].op == "CONTIGUOUS")


def _measure(graph: Graph, values: Sequence[Value], region: Region) -> _Sizes:
    tables: dict[str, dict[int, int]] = {name: {} for name in PARAMS}
    updated = {update.node for update in graph.updates}
    activations = 0
    for index in region.nodes:
        node = graph.nodes[index]
        if node.op in PARAMS:
            factor = 2 if node.op == "STATE" else 1  # old and new value
            assert isinstance(node.arg, int)  # check_graph has seen to it
            tables[node.op][node.arg] = factor * round_up(values[index].nbytes)
        elif is_materialised(node.op) and index not in updated:
            activations += round_up(values[index].nbytes)
    reads = {root: round_up(values[root].nbytes) for root in region.reads}
    return _Sizes(tables["WEIGHT"], tables["INPUT"], tables["STATE"], reads, activations)


def _find_glued(graph: Graph, regions: Sequence[Region]) -> frozenset[int]:
    """Return the positions between regions where no cut is allowed, for the sake of a state."""
    place = {region.root: position for position, region in enumerate(regions)}
    users: dict[int, list[int]] = {u.state: [place[u.node]] for u in graph.updates}
    for position, region in enumerate(regions):
        for index in region.nodes:
            node = graph.nodes[index]
            if node.op == "STATE":
                assert isinstance(node.arg, int)  # check_graph has seen to it
                users[node.arg].append(position)
    return frozenset(
        cut for spots in users.values() for cut in range(min(spots) + 1, max(spots) + 1)
    )


def _grow_backwards(
    regions: Sequence[Region], sizes: Sequence[_Sizes], nbytes: Mapping[int, int], end: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, memory, bytes read from other tasks) of the tasks that end at ``end``.

    From the shortest to the longest; memory never falls on the way, because a value that is no
    longer read from outside is from then on computed, and held, inside.
    """
    held: dict[tuple[str, int], int] = {}
    outside: dict[int, int] = {}
    activations = moved = 0
    for start in range(end - 1, -1, -1):
        size, root = sizes[start], regions[start].root
        if outside.pop(root, None) is not None:
            moved -= nbytes[root]
        for read, space in size.reads.items():
            if read not in outside:
                outside[read] = space
                moved += nbytes[read]
        for kind in ("weights", "inputs", "states"):
            held.update({(kind, entry): n for entry, n in getattr(size, kind).items()})
        activations += size.activations
        yield start, sum(held.values()) + sum(outside.values()) + activations, moved


def _explain(
    regions: Sequence[Region],
    sizes: Sequence[_Sizes],
    nbytes: Mapping[int, int],
    glued: frozenset[int],
    target_bytes: int,
    end: int,
) -> InvalidModel:
    """Say which operation is larger than the target: the shortest legal task ending here."""
    for start, vram, _ in _grow_backwards(regions, sizes, nbytes, end):
        if start not in glued:
            first, last = regions[start].label, regions[end - 1].label
            name = f"'{first}'" if start == end - 1 else f"'{first}' to '{last}' (one state)"
            return InvalidModel(
                f"operation {name} alone needs {vram} bytes of memory; "
                f"the target is {target_bytes}: raise --target-vram to at least {vram} bytes"
            )
    raise AssertionError("position 0 is never glued")
