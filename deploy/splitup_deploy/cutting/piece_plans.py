"""Decide which values and banks of experts are too large for one task, and how to divide them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from splitup.core import limits
from splitup.core.tensors import TensorSpec
from splitup.graph.cost import compute_roles, is_pick
from splitup.graph.memory import find_temporaries, measure_buffer
from splitup.graph.operations.table import PARAMS
from splitup.graph.rules import check_graph
from splitup_deploy.cutting.partition import Region
from splitup_deploy.cutting.slices import Box, Indivisible, find_operands, join_boxes, make_full_box
from splitup_deploy.frontends.tracing import Bank, TracedModel

_MOST_PIECES: Final = limits.MAX_PORTS // 2  # the join reads all pieces, and other inputs
_GRAIN: Final = 64  # elements; kernels work on blocks of an output up to this size
_BLOCKS: Final = (32, 256)  # elements of a quantised row's blocks, which stay whole


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """The pieces of ``root``: each (offset, size) along ``axis``, or of the experts of ``bank``."""

    root: int
    axis: int
    spans: tuple[tuple[int, int], ...]
    bank: Bank | None = None


@dataclass(frozen=True, slots=True)
class Cone:
    """All that a piece computes (boxes of nodes) and reads (weights, inputs, values in memory)."""

    boxes: frozenset[tuple[int, Box]]  # except of weights
    weights: Mapping[int, Sequence[Box]]  # adjacent boxes are joined
    reads: frozenset[int]  # inputs and values in memory


class PieceScope:
    """Finds which part of a graph a piece needs, and how much memory that takes."""

    def __init__(self, model: TracedModel) -> None:
        self.model, self.graph = model, check_graph(model.graph)
        self.values = self.graph.values
        self.roles = compute_roles(model.graph)
        self.temporaries = find_temporaries(self.graph)
        self.updates = {update.node for update in model.graph.updates}
        self._plans: dict[tuple[Any, ...], PiecePlan | None] = {}  # by what a region looks like

    def find_cluster(self, bank: Bank) -> frozenset[int]:
        """Return all nodes between a bank's inputs and its root, the root included."""
        stops = {bank.chosen, bank.gates, *bank.inputs}
        found, pending = {bank.root}, [bank.root]
        while pending:
            for src in self.graph.nodes[pending.pop()].srcs:
                if src not in found and src not in stops:
                    found.add(src)
                    pending.append(src)
        return frozenset(found)

    def step(
        self, index: int, box: Box, bank: Bank | None, span: tuple[int, int]
    ) -> list[tuple[int, Box]]:
        """Return the boxes of a node's operands from which a box of its value is computed.

        Of a bank's lookups it is only the experts of ``span``. When the operands cannot be divided
        like this, the result is the whole node itself.
        """
        try:
            operands = find_operands(self.graph, self.values, index, box)
        except Indivisible:
            return [(index, make_full_box(self.values[index].shape))]
        if bank is not None and is_pick(self.graph.nodes[index], self.roles):
            ((src, whole),) = operands
            if self.graph.nodes[index].arg == ("ADD", 1) and whole[0] == (0, bank.experts):
                return [(src, (span, *whole[1:]))]
        return operands

    def find_cone(
        self,
        root: int,
        box: Box,
        cluster: Collection[int],
        bank: Bank | None,
        span: tuple[int, int],
    ) -> Cone:
        """Return all that is needed to compute ``box`` of ``root``."""
        boxes, reads = {(root, box)}, set()
        weights: dict[int, set[Box]] = {}
        pending = [(root, box)]
        while pending:
            for src, part in self.step(*pending.pop(), bank, span):
                op = self.graph.nodes[src].op
                if op == "INPUT" or (src not in cluster and op == "CONTIGUOUS"):
                    reads.add(src)
                elif op == "WEIGHT":
                    weights.setdefault(src, set()).add(part)
                elif (src, part) not in boxes:
                    boxes.add((src, part))
                    pending.append((src, part))
        joined = {index: join_boxes(parts) for index, parts in weights.items()}
        return Cone(frozenset(boxes), joined, frozenset(reads))

    def measure(self, cone: Cone) -> int:
        """Return the memory of a task that consists of this cone."""
        total = sum(measure_buffer(self.values[read]) for read in cone.reads)
        weights = ((index, box) for index, boxes in cone.weights.items() for box in boxes)
        for index, box in (*weights, *cone.boxes):
            node = self.graph.nodes[index]
            if node.op in ("WEIGHT", "CONTIGUOUS") or index in self.temporaries:
                shape = tuple(size for _, size in box)
                value = self.values[index]
                total += measure_buffer(TensorSpec("", value.dtype, shape, value.rows))
        return total

    def plan_region(self, region: Region, target_bytes: int) -> PiecePlan | None:
        """Return how to divide one value in memory; None when it fits or cannot be divided."""
        key = self._describe(region.root, region.nodes, region.reads, target_bytes)
        return self._reuse(key, lambda: self._plan_region(region, target_bytes), region.root)

    def _reuse(
        self, key: tuple[Any, ...], make: Callable[[], PiecePlan | None], root: int
    ) -> PiecePlan | None:
        """Return the plan of what is described by ``key``; layers are much alike."""
        if key not in self._plans:
            self._plans[key] = make()
        plan = self._plans[key]
        return None if plan is None else replace(plan, root=root)

    def _describe(
        self, root: int, nodes: Collection[int], reads: Collection[int], *others: int
    ) -> tuple[Any, ...]:
        """Return what the plan for ``root`` depends on: that of equals is equal."""
        order = sorted({*nodes, *reads})
        place = {index: number for number, index in enumerate(order)}
        parts: list[Any] = [root in self.updates, *others]
        for index in order:
            node, value = self.graph.nodes[index], self.values[index]
            srcs = tuple(place[src] for src in node.srcs) if index in nodes else ()
            arg = None if node.op in PARAMS else node.arg
            known = self.roles[index], index in self.temporaries
            parts.append((node.op, srcs, arg, value.dtype, value.dims, *known))
        return tuple(parts)

    def _plan_region(self, region: Region, target_bytes: int) -> PiecePlan | None:
        if region.root in self.updates or any(
            self.graph.nodes[index].op == "STATE" for index in region.nodes
        ):
            return None
        shape = self.values[region.root].shape
        whole = make_full_box(shape)
        nowhere = (0, 0)

        def measure(axis: int, span: tuple[int, int]) -> int:
            box = (*whole[:axis], span, *whole[axis + 1 :])
            return self.measure(self.find_cone(region.root, box, (), None, nowhere))

        if self.measure(self.find_cone(region.root, whole, (), None, nowhere)) <= target_bytes:
            return None
        best: PiecePlan | None = None
        for axis, length in enumerate(shape):
            if isinstance(self.values[region.root].dims[axis], str):
                continue
            spans = _find_spans(length, target_bytes, partial(measure, axis))
            if spans and (best is None or len(spans) < len(best.spans)):
                best = PiecePlan(region.root, axis, spans)
        return best

    def plan_bank(self, bank: Bank, cluster: frozenset[int], target_bytes: int) -> PiecePlan | None:
        """Return how to divide a bank; None when it fits, or when not even one expert does."""
        stops = {bank.chosen, bank.gates, *bank.inputs}
        key = self._describe(bank.root, cluster, stops, target_bytes, bank.experts)
        plan = self._reuse(key, lambda: self._plan_bank(bank, cluster, target_bytes), bank.root)
        return None if plan is None else replace(plan, bank=bank)

    def _plan_bank(
        self, bank: Bank, cluster: frozenset[int], target_bytes: int
    ) -> PiecePlan | None:
        box = make_full_box(self.values[bank.root].shape)

        def measure(span: tuple[int, int]) -> int:
            return self.measure(self.find_cone(bank.root, box, cluster, bank, span))

        if measure((0, bank.experts)) <= target_bytes:
            return None
        spans = _find_spans(bank.experts, target_bytes, measure, grain=1, units=(1,))
        return PiecePlan(bank.root, 0, spans, bank) if spans else None


def _find_spans(
    length: int,
    target_bytes: int,
    measure: Callable[[tuple[int, int]], int],
    grain: int = _GRAIN,
    units: Sequence[int] = (1, *_BLOCKS),
) -> tuple[tuple[int, int], ...]:
    """Return the fewest, nearly equal spans that each fit; empty when there are none."""
    found = [_find_spans_of(length, target_bytes, measure, grain, unit) for unit in units]
    return min(filter(None, found), key=len, default=())


def _find_spans_of(
    length: int,
    target_bytes: int,
    measure: Callable[[tuple[int, int]], int],
    grain: int,
    unit: int,
) -> tuple[tuple[int, int], ...]:
    """Return the same for spans that are multiples of ``unit``.

    The binary search needs memory to grow with a span's length, which holds only where no span ends
    within a block.
    """
    low, high = 0, (length - 1) // unit  # a piece of ``low`` units fits
    while low < high:
        middle = (low + high + 1) // 2
        if measure((0, middle * unit)) <= target_bytes:
            low = middle
        else:
            high = middle - 1
    if not low:
        return ()
    largest = low * unit
    size = -(-length // -(-length // largest))
    size = -(-size // unit) * unit
    if (rounded := -(-size // grain) * grain) <= largest:
        size = rounded
    spans = tuple((start, min(size, length - start)) for start in range(0, length, size))
    if len(spans) > _MOST_PIECES or any(measure(span) > target_bytes for span in spans):
        return ()
    return spans
