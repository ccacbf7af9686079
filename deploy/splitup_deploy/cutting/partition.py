"""Cut a graph into few, balanced tasks that each fit the target memory.

The graph is cut only at values that it writes to memory (CONTIGUOUS nodes), so cutting changes no
kernel and the cut model gives the same bytes as the whole one. Each such value, with the
operations between it and earlier values in memory, is a **region**; regions stand in the graph's
own order, which is an order in which they can be computed. Regions that read or update one state
stay together and form one **atom**, any other region is an atom of its own. A task is a run of
neighbouring atoms. Tasks need not form a chain: neighbours that read only from further back run in
parallel, as the pieces of a divided operation do (``splitup_deploy.cutting.divide``).

The criteria, each of which decides only among cuts that are equal in all before it:

    latency      fewest tasks; fewest bytes moved between tasks; shortest longest task; most even
    throughput   shortest period; fewest tasks; fewest bytes moved; most even

A task's time is the sum of its regions' predicted times (``splitup_deploy.cutting.timing``); its
period is that or the time its input takes on the network, whichever is longer, because a node
receives while it computes. A pipeline delivers one result per longest period. ``throughput`` uses
up to ``max_tasks`` tasks, and without ``max_tasks`` the fewest that are possible; ``latency`` fails
when more are needed than ``max_tasks``.

For a mixed fleet there are several targets, and tasks are cut for them in turn: the j-th task fits
the j-th card of the list, smallest first, then again from the beginning. So there are tasks for
every kind of card. An atom that is larger than the card whose turn it is becomes a task of its own
for a larger card.

Every cut of the order of atoms is searched, so the result is optimal among all of them:

*   The legal tasks from atom s are found by growing one: neither its memory
    (``splitup.graph.memory``) nor its operations nor the time that it takes to compile
    (``splitup.graph.compile_cost``) falls on the way, so after the first task that is too large, no
    larger one is legal. A part of a legal task need not be legal: a value that it reads is then an
    input, which takes memory during the whole task.
*   The numbers are found one after another by dynamic programmes over (number of tasks j,
    atom e where the j-th task ends). Each number is a sum or a maximum over tasks, hence monotone
    in that of the first j-1: the best cut that ends its j-th task at e and began it at s holds a
    best cut of j-1 tasks that ends at s. After each number only those tasks (s, e) are admitted
    that a best cut can use: for a maximum, tasks of at most that size; for a sum, those that
    continue the least sum at s to the least at e, since a sum is least if and only if all its
    beginnings are. So every next number is minimised over exactly the cuts that are left. "Most
    even" is the least sum of squared times.

Time and memory are proportional to atoms x atoms per task.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.graph.compile_cost import compute_total_us
from splitup.graph.ir import Graph, Weight
from splitup.graph.memory import Arena, LiveRange, find_live_ranges, measure_buffer
from splitup.graph.operations.table import PARAMS
from splitup.graph.rules import CheckedGraph
from splitup_deploy.cutting.timing import Clock, predict_transfer_ps

Balance = Literal["latency", "throughput"]
_Row = np.ndarray[Any, np.dtype[np.int64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]
_NEVER: Final = 2**62  # larger than any sum of bytes or picoseconds, and can be added to once
SMALLER_SIZES: Final = "for a text model, a smaller --chunk or --context"


class TargetTooSmall(InvalidModel):
    """No cut keeps to the target memory; a larger target helps. ``remedy`` says what else does."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def round_up(nbytes: int) -> int:
    """Return the next number of bytes with three significant digits."""
    unit: int = 10 ** max(0, len(str(nbytes)) - 3)
    return -(-nbytes // unit) * unit


def write_size(nbytes: int) -> str:
    """Return a size as --target-vram takes it, exactly: 1_060_000 is "1.06MB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.10g}{name}"
    return f"{nbytes}B"


@dataclass(frozen=True, slots=True)
class Region:
    """One value in memory (``root``) and the nodes computed on the way to it."""

    root: int
    nodes: frozenset[int]  # parameters included, earlier values in memory excluded
    reads: frozenset[int]  # roots of other regions
    label: str


@dataclass(frozen=True, slots=True)
class _Atom:
    """Regions ``start`` to ``end`` (excluded) that are never cut apart, and what they need."""

    start: int
    end: int
    held: dict[tuple[str, int], int]  # bytes of memory of every weight, input and state
    reads: frozenset[int]  # roots of regions outside
    buffers: tuple[tuple[int, ...], ...]  # by region: the values in the shared arena
    time_ps: int
    kernels: dict[int, int]  # microseconds to compile, by a number that equal kernels share
    nodes: int
    operations: int  # per step, as the rule 'cost' counts them


def find_regions(graph: Graph, labels: Mapping[int, str]) -> list[Region]:
    """Return the regions on which a result depends, in the graph's order."""
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
    graph: CheckedGraph,
    labels: Mapping[int, str],
    targets_bytes: int | Collection[int],
    *,
    balance: Balance = "latency",
    max_tasks: int | None = None,
    borders: Collection[int] = (),
    kept: Collection[int] = (),
) -> list[list[Region]]:
    """Return the tasks, each a list of neighbouring regions.

    ``targets_bytes`` is the memory of a card, or of every kind of card in a fleet. ``borders`` are
    roots of regions that begin a task, ``kept`` those of regions that no card has to hold. Raises
    TargetTooSmall when one atom needs more than the
    largest target, or more tasks are needed than are allowed; InvalidModel when one atom takes more
    operations than a task may.
    """
    targets = (targets_bytes,) if isinstance(targets_bytes, int) else sorted(set(targets_bytes))
    regions = find_regions(graph, labels)
    search = _Search(graph, regions, targets, borders, kept)
    search.check_atoms()
    allowed = limits.MAX_TASKS if max_tasks is None else min(max_tasks, limits.MAX_TASKS)
    is_free = balance == "throughput" and max_tasks is not None  # may use more tasks than needed
    atoms = search.atoms
    if search.is_whole_legal() and not is_free:
        return [regions]
    table = search.list_windows()
    fewest = _find_fewest(table)
    if fewest > allowed:
        raise TargetTooSmall(
            f"a target of {', '.join(map(write_size, targets))} gives at least {fewest} tasks; "
            f"{allowed} are allowed",
            "a larger --max-tasks" if max_tasks and fewest <= limits.MAX_TASKS else "",
        )
    if balance == "latency":
        cuts = _find_quickest(table, fewest)
    else:
        cuts = _find_steadiest(table, allowed if is_free else fewest)
    return [regions[atoms[a].start : atoms[b - 1].end] for a, b in pairwise(cuts)]


def check_target(
    graph: CheckedGraph,
    labels: Mapping[int, str],
    target_bytes: int,
    kept: Collection[int] = (),
) -> None:
    """Raise TargetTooSmall when one atom alone needs more memory than the target."""
    _Search(graph, find_regions(graph, labels), (target_bytes,), kept=kept).check_memory()


def bound_target(graph: CheckedGraph, labels: Mapping[int, str]) -> tuple[int, int]:
    """Return a target below which no cut can be, and one with which nothing has to be divided.

    What has state is never divided. Where another value is, the join holds all pieces and the whole
    (``splitup_deploy.cutting.divide``).
    """
    search = _Search(graph, find_regions(graph, labels), (0,))
    memory = search.measure_atoms()
    needed = map(search.bound_memory, search.atoms, memory)
    return max(needed), max(memory)


def find_first_equals(weights: Sequence[Weight]) -> list[int]:
    """Return for each weight the first one with the same bytes: a task holds equal ones once."""
    first: dict[tuple[str, str, tuple[int, ...]], int] = {}
    return [
        first.setdefault((weight.digest, weight.dtype, weight.shape), place)
        for place, weight in enumerate(weights)
    ]


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


def _form_atoms(
    graph: CheckedGraph, regions: Sequence[Region], ranges: Mapping[int, LiveRange]
) -> list[_Atom]:
    glued = _find_glued(graph, regions)
    edges = [cut for cut in range(len(regions)) if cut not in glued] + [len(regions)]
    clock = Clock(graph)
    roots = [index for index, node in enumerate(graph.nodes) if node.op == "CONTIGUOUS"]
    numbers: dict[Any, int] = {}
    kernels = {
        root: (numbers.setdefault(kernel.signature, len(numbers)), kernel.cost_us)
        for root, kernel in zip(roots, graph.kernels, strict=True)
    }
    atoms, firsts = [], find_first_equals(graph.weights)
    for start, end in pairwise(edges):
        held: dict[tuple[str, int], int] = {}
        reads: set[int] = set()
        time_ps = 0
        for region in regions[start:end]:
            reads |= region.reads
            time_ps += clock.predict_ps(region.root, region.nodes)
            for index in region.nodes:
                node = graph.nodes[index]
                if node.op in PARAMS:
                    factor = 2 if node.op == "STATE" else 1  # old and new value
                    assert isinstance(node.arg, int)  # check_graph has seen to it
                    place = firsts[node.arg] if node.op == "WEIGHT" else node.arg
                    held[node.op, place] = factor * measure_buffer(graph.values[index])
        reads -= {region.root for region in regions[start:end]}
        present = tuple(
            tuple(sorted(region.nodes & ranges.keys())) for region in regions[start:end]
        )
        costs = dict(kernels[region.root] for region in regions[start:end])
        nodes = sum(len(region.nodes) + len(region.reads) for region in regions[start:end])
        work = sum(graph.values[n].operations for r in regions[start:end] for n in r.nodes)
        read = frozenset(reads)
        atoms.append(_Atom(start, end, held, read, present, time_ps, costs, nodes, work))
    return atoms


def _find_glued(graph: Graph, regions: Sequence[Region]) -> frozenset[int]:
    """Return the positions between regions where a cut would separate two users of one state.

    Or a state from the int8 that are written to it: integers that tasks send each other have to be
    equal (``splitup.graph.compare``), and what two devices round need not be.
    """
    place = {region.root: position for position, region in enumerate(regions)}
    users: dict[int, list[int]] = {}
    for update in graph.updates:
        written = regions[place[update.node]]
        rounded = [place[root] for root in written.reads if graph.nodes[root].dtype == "int8"]
        users[update.state] = [place[update.node], *rounded]
    for position, region in enumerate(regions):
        for index in region.nodes:
            node = graph.nodes[index]
            if node.op == "STATE":
                assert isinstance(node.arg, int)  # check_graph has seen to it
                users[node.arg].append(position)
    return frozenset(
        cut for spots in users.values() for cut in range(min(spots) + 1, max(spots) + 1)
    )


@dataclass(frozen=True, slots=True)
class _Windows:
    """Every legal task, sorted by its end: atoms ``starts`` to ``ends`` (excluded)."""

    count: int  # of atoms
    starts: _Row
    ends: _Row
    moved: _Row  # bytes read from other tasks
    times: _Row  # picoseconds
    memory: _Row  # bytes
    first: _Row  # position of the first task that ends at 1, 2, ...
    cards: tuple[int, ...]  # bytes of memory of the cards that take turns

    def fold(self, candidates: _Row) -> _Row:
        """Return the least candidate for every end, _NEVER for end 0."""
        least = np.minimum.reduceat(candidates, self.first)
        return np.concatenate([[_NEVER], np.minimum(least, _NEVER)])

    def admit(self, turn: int) -> _Mask:
        """Return for every task whether it may be the one with this number, counted from 0."""
        card = self.cards[turn % len(self.cards)]
        result: _Mask = (self.memory <= card) | (self.ends - self.starts == 1)
        return result

    def begin(self) -> _Row:
        """Return the costs of the empty cut: 0 at the beginning."""
        return np.concatenate([[0], np.full(self.count, _NEVER)]).astype(np.int64)


class _Search:
    """The legal tasks of one graph."""

    def __init__(
        self,
        graph: CheckedGraph,
        regions: Sequence[Region],
        targets_bytes: Sequence[int],
        borders: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> None:
        self.cards, self.target_bytes = tuple(targets_bytes), targets_bytes[-1]
        self._regions, self._ranges = regions, find_live_ranges(graph)
        self.atoms = _form_atoms(graph, regions, self._ranges)
        self._nbytes = {region.root: graph.values[region.root].nbytes for region in regions}
        self._spaces = {r.root: measure_buffer(graph.values[r.root]) for r in regions}
        self._place: dict[int, int] = {}
        self._borders: set[int] = set()
        self._kept = {place for place, a in enumerate(self.atoms) if regions[a.start].root in kept}
        for position, atom in enumerate(self.atoms):
            for region in regions[atom.start : atom.end]:
                self._place[region.root] = position
            if regions[atom.start].root in borders:
                self._borders.add(position)

    def grow(self, start: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (end, memory, bytes read, picoseconds) of the tasks from ``start``, growing.

        The last one may be larger than the target; memory never falls on the way. None takes longer
        to compile, or more operations, than is legal, but for a single atom.
        """
        kernels: dict[int, int] = {}
        count = kernels_us = operations = 0
        held: set[tuple[str, int]] = set()
        outside: set[int] = set()
        inside: set[int] = set()
        arena = Arena()
        apart = moved = time_ps = 0
        for position in range(start, len(self.atoms)):
            if position > start and position in self._borders:
                return
            atom = self.atoms[position]
            count += atom.nodes
            operations += atom.operations
            kernels_us += sum(atom.kernels[one] for one in atom.kernels.keys() - kernels.keys())
            kernels |= atom.kernels
            stored = atom.end - self.atoms[start].start
            compile_us = compute_total_us(kernels_us, count, stored)
            is_long = compile_us > limits.MAX_COMPILE_US or operations > limits.MAX_TASK_FLOPS
            if position > start and is_long:
                return
            time_ps += atom.time_ps
            for key, space in atom.held.items():
                if key not in held:
                    held.add(key)
                    apart += space
            for root in atom.reads:
                if root not in outside and self._place[root] < start:
                    outside.add(root)
                    apart += self._spaces[root]
                    moved += self._nbytes[root]
            for time, nodes in enumerate(atom.buffers, atom.start):
                fresh = [self._ranges[node] for node in nodes if node not in inside]
                inside.update(nodes)
                arena.place([LiveRange(time, one.last, one.nbytes) for one in fresh])
            memory = 0 if start in self._kept else apart + arena.size
            yield position + 1, memory, moved, time_ps
            if memory > self.target_bytes:
                return

    def is_whole_legal(self) -> bool:
        """Say whether one task is enough."""
        *_, (end, memory, _, _) = self.grow(0)
        return end == len(self.atoms) and (memory <= self.cards[0] or end == 1)

    def measure_atoms(self) -> list[int]:
        """Return the memory that each atom alone needs."""
        return [next(self.grow(position))[1] for position in range(len(self.atoms))]

    def bound_memory(self, atom: _Atom, memory: int) -> int:
        """Return what an atom needs at least, which alone needs ``memory``, however it is cut."""
        if any(kind == "STATE" for kind, _ in atom.held):
            return memory
        return min(memory, 2 * self._spaces[self._regions[atom.start].root])

    def check_memory(self) -> None:
        """Raise TargetTooSmall for an atom that needs more than the target."""
        memory = self.measure_atoms()
        largest = max(range(len(memory)), key=memory.__getitem__)
        if memory[largest] > self.target_bytes:
            raise TargetTooSmall(
                f"operation {self._name(largest)} alone needs "
                f"{write_size(round_up(memory[largest]))} of memory unless it is divided; the "
                f"target is {write_size(self.target_bytes)}",
                SMALLER_SIZES,
            )

    def check_atoms(self) -> None:
        """Raise InvalidModel for an atom that needs more than the target, or than is legal."""
        self.check_memory()
        for position, atom in enumerate(self.atoms):
            if atom.operations > limits.MAX_TASK_FLOPS:
                raise InvalidModel(
                    f"operation {self._name(position)} alone takes {atom.operations} "
                    f"operations a step; a task may take {limits.MAX_TASK_FLOPS}: give a smaller "
                    "--chunk"
                )

    def _name(self, position: int) -> str:
        atom = self.atoms[position]
        shares = " with what shares its state" if atom.end - atom.start > 1 else ""
        return f"'{self._regions[atom.start].label}'{shares}"

    def list_windows(self) -> _Windows:
        """Return every legal task."""
        columns = [array("q") for _ in range(5)]
        for start in range(len(self.atoms)):
            for end, memory, moved, time_ps in self.grow(start):
                if memory <= self.target_bytes:
                    found = (start, end, moved, time_ps, memory)
                    for column, number in zip(columns, found, strict=True):
                        column.append(number)
        rows = [np.frombuffer(column, np.int64) for column in columns]
        order = np.argsort(rows[1], kind="stable")
        starts, ends, moves, times, memories = (row[order] for row in rows)
        first = np.searchsorted(ends, np.arange(1, len(self.atoms) + 1))
        return _Windows(len(self.atoms), starts, ends, moves, times, memories, first, self.cards)


def _find_fewest(table: _Windows) -> int:
    """Return the number of tasks that are needed; every atom alone is a legal one."""
    row, tasks = table.begin(), 0
    while row[-1] == _NEVER:
        row = table.fold(np.where(table.admit(tasks), row[table.starts], _NEVER))
        tasks += 1
    return tasks


def _find_quickest(table: _Windows, tasks: int) -> list[int]:
    """Return cuts into this many tasks: least bytes moved, shortest longest task, most even."""
    choice = _Choice(table, tasks)
    choice.minimise_sum(table.moved)
    choice.minimise_maximum(table.times)
    return choice.settle(table.times)


def _find_steadiest(table: _Windows, most: int) -> list[int]:
    """Return cuts into up to this many tasks: shortest period, fewest, least moved, most even."""
    periods = np.maximum(table.times, table.moved * predict_transfer_ps(1))
    row, ends = table.begin(), []
    for turn in range(min(most, table.count)):
        larger = np.maximum(row[table.starts], periods)
        row = table.fold(np.where(table.admit(turn), larger, _NEVER))
        ends.append(int(row[-1]))
    choice = _Choice(table, 1 + ends.index(min(ends)))
    choice.minimise_maximum(periods)
    choice.minimise_sum(table.moved)
    return choice.settle(table.times)


class _Choice:
    """All cuts that are equally good so far: for each j, which tasks their j-th task may be."""

    def __init__(self, table: _Windows, tasks: int) -> None:
        self._table = table
        self._admitted = [table.admit(turn) for turn in range(tasks)]

    def minimise_maximum(self, costs: _Row) -> None:
        """Keep only the tasks of cuts whose largest cost is smallest."""
        table, row = self._table, self._table.begin()
        for admitted in self._admitted:
            larger = np.maximum(row[table.starts], costs)
            row = table.fold(np.where(admitted, larger, _NEVER))
        self._admitted = [admitted & (costs <= row[-1]) for admitted in self._admitted]

    def settle(self, times: _Row) -> list[int]:
        """Return the cuts that are left with the least sum of squared times: the most even ones.

        Times count in steps of a 2^25th of the longest, so that sums of squares stay exact.
        """
        squares = (times >> max(int(times.max()).bit_length() - 25, 0)) ** 2
        self.minimise_sum(squares)
        table, cuts = self._table, [self._table.count]
        for admitted in reversed(self._admitted):
            low, high = np.searchsorted(table.ends, [cuts[-1], cuts[-1] + 1])
            cuts.append(int(table.starts[low + np.argmax(admitted[low:high])]))
        return cuts[::-1]

    def minimise_sum(self, costs: _Row) -> None:
        """Keep only the tasks of cuts whose sum of costs is smallest."""
        table, row = self._table, self._table.begin()
        for index, admitted in enumerate(self._admitted):
            total = np.where(admitted, row[table.starts] + costs, _NEVER)
            row = table.fold(total)
            self._admitted[index] = (total < _NEVER) & (total == row[table.ends])
