"""Divide operations that are larger than the target into parallel pieces, and join the results.

Two kinds of operations can be divided, each into the fewest pieces that fit:

*   A value in memory that is too large to compute in one task (embedding, head, a wide MLP) is
    divided along one of its own axes. Every piece has its share of the weights. The join places
    the pieces next to each other, so it rounds nothing.
*   A bank of experts is divided by experts: a piece holds a range of them. A piece gets the gates
    of its own experts, and zero for slots that chose another expert. Where a gate is zero, the
    output is zero, so a piece whose gates are all zero needs no inputs and does not run. The join
    takes every slot from the piece that holds the slot's expert.

The arithmetic of every element stays the same. Whether the bytes stay equal depends on the kernels:
a code generator may sum in another order when a kernel has fewer elements. Pieces are multiples of
64 elements where that needs no additional piece, because kernels then keep their shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from splitup.graph.ir import Dim, Node, Weight, encode_float
from splitup.graph.rules import check_graph
from splitup_deploy.cutting.partition import find_regions
from splitup_deploy.cutting.passes import replace_nodes
from splitup_deploy.cutting.piece_plans import PiecePlan, PieceScope
from splitup_deploy.cutting.slices import Box, has, is_full, make_full_box, name_sizes, restrict_arg
from splitup_deploy.frontends.tracing import Bank, TracedModel
from splitup_deploy.frontends.weight_sources import WeightSource, select


@dataclass(frozen=True, slots=True)
class Divided:
    """The model with pieces; ``partition`` begins a task at each of the values ``borders``."""

    model: TracedModel
    borders: frozenset[int]


def divide(model: TracedModel, target_bytes: int, kept: Collection[int] = ()) -> Divided:
    """Return the model with every operation divided that is larger than the target.

    The regions of the roots ``kept`` stay whole. An operation that cannot be divided stays;
    ``partition`` then reports it. The pieces of weights have no digests until
    ``TracedModel.read_weights``.
    """
    scope = PieceScope(model)
    banks = {bank.root: bank for bank in model.banks}
    plans: dict[int, PiecePlan] = {}
    done: set[int] = set()
    for region in reversed(find_regions(model.graph, model.labels)):  # a bank's root comes first
        if region.root in kept:
            continue
        plan = None
        if (bank := banks.get(region.root)) is not None:
            cluster = scope.find_cluster(bank)
            plan = scope.plan_bank(bank, cluster, target_bytes)
            done |= cluster if plan is not None else set()
        if plan is None and region.root not in done:
            plan = scope.plan_region(region, target_bytes)
        if plan is not None:
            plans[region.root] = plan
    return _Writer(scope, plans).write() if plans else Divided(model, frozenset())


@dataclass(frozen=True, slots=True)
class _Piece:
    """One piece while it is written; ``made`` maps a node and a box of it to the written node."""

    plan: PiecePlan
    span: tuple[int, int]
    name: str
    cluster: Collection[int]
    weights: Mapping[int, Sequence[Box]]  # the piece's parts of each
    replaced: Mapping[int, int]
    made: dict[tuple[int, Box], int]


class _Writer:
    """Writes a new graph in which pieces replace the operations that are too large."""

    def __init__(self, scope: PieceScope, plans: Mapping[int, PiecePlan]) -> None:
        self._scope, self._plans = scope, plans
        self._nodes: list[Node] = []
        self._known: dict[Node, int] = {}
        self._moved: list[int] = []
        self._labels: dict[int, str] = {}
        self._weights: list[Weight] = list(scope.graph.weights)
        self._sources: dict[str, WeightSource] = dict(scope.model.weights)
        self._places: dict[str, int] = {}  # by name, of weights that are parts of others
        self._borders: set[int] = set()

    def write(self) -> Divided:
        """Return the new model."""
        model, graph = self._scope.model, self._scope.graph
        for index, node in enumerate(graph.nodes):
            if (plan := self._plans.get(index)) is not None:
                self._moved.append(self._write_plan(plan))
                continue
            srcs = tuple(self._moved[src] for src in node.srcs)
            self._moved.append(self._add(Node(node.op, node.dtype, srcs, node.arg)))
            if index in model.labels:
                self._labels[self._moved[index]] = model.labels[index]
        result = replace_nodes(graph, self._nodes, self._moved)
        graph = check_graph(replace(result, weights=tuple(self._weights)))
        model = TracedModel(graph, self._labels, self._sources, notes=model.notes)
        return Divided(model, frozenset(self._borders))

    def _add(self, node: Node) -> int:
        """Append a node, or return an equal one; values in memory are never merged."""
        if node.op != "CONTIGUOUS" and (found := self._known.get(node)) is not None:
            return found
        self._nodes.append(node)
        self._known[node] = len(self._nodes) - 1
        return len(self._nodes) - 1

    def _store(self, node: int, label: str) -> int:
        stored = self._add(Node("CONTIGUOUS", self._nodes[node].dtype, (node,)))
        self._labels[stored] = label
        return stored

    def _write_plan(self, plan: PiecePlan) -> int:
        scope, bank, count = self._scope, plan.bank, len(plan.spans)
        label = scope.model.labels.get(plan.root, f"value {plan.root}")
        group, colon, detail = label.partition(":")
        cluster = frozenset() if bank is None else scope.find_cluster(bank)
        names = [f"{group} {number} of {count}" for number in range(1, count + 1)]
        gates = [
            {} if bank is None else {bank.gates: self._write_gates(bank, span, name)}
            for name, span in zip(names, plan.spans, strict=True)
        ]
        pieces = []
        for name, span, replaced in zip(names, plan.spans, gates, strict=True):
            begin = len(self._nodes)
            box = list(make_full_box(scope.values[plan.root].shape))
            if bank is None:
                box[plan.axis] = span
            cone = scope.find_cone(plan.root, tuple(box), cluster, bank, span)
            piece = _Piece(plan, span, name, cluster, cone.weights, replaced, {})
            pieces.append(self._write_box(piece, plan.root, tuple(box)))
            if bank is not None:
                self._borders.add(
                    next(i for i in range(begin, len(self._nodes)) if i in self._labels)
                )
        joined = self._store(self._join(plan, pieces, 0, count), f"{group} join{colon}{detail}")
        if bank is not None:
            self._borders.add(joined)
        return joined

    def _write_box(self, piece: _Piece, index: int, box: Box) -> int:
        """Return the node that computes ``box`` of a node's value; recursion is shallow."""
        if (known := piece.made.get((index, box))) is not None:
            return known
        scope, graph = self._scope, self._scope.graph
        node, shape, dims = graph.nodes[index], scope.values[index].shape, scope.values[index].dims
        stored = node.op == "CONTIGUOUS"
        written = index == piece.plan.root or index in piece.cluster
        if node.op == "WEIGHT" and not is_full(box, shape):
            # the weight is cut to what the piece needs and read as before: kernels keep their form
            whole = next(part for part in piece.weights[index] if has(part, box))
            result = self._write_weight(node, whole)
            if box != whole:
                inner = tuple(
                    (start - first, size)
                    for (start, size), (first, _) in zip(box, whole, strict=True)
                )
                result = self._add(Node("SHRINK", node.dtype, (result,), inner))
        elif not node.srcs or (stored and not written):
            result = piece.replaced.get(
                index, self._moved[index] if index < len(self._moved) else 0
            )
            if not is_full(box, shape):
                result = self._add(Node("SHRINK", node.dtype, (result,), name_sizes(box, dims)))
        else:
            operands = scope.step(index, box, piece.plan.bank, piece.span)
            srcs = tuple(self._write_box(piece, *operand) for operand in operands)
            if operands[0][0] == index:
                result = self._add(Node("SHRINK", node.dtype, srcs, name_sizes(box, dims)))
            elif node.op == "SHRINK":
                result = srcs[0]
            else:
                arg = restrict_arg(graph, dims, index, box, operands[0][1])
                result = self._add(Node(node.op, node.dtype, srcs, arg))
            if stored:
                label = scope.model.labels.get(index, f"value {index}")
                _, colon, detail = label.partition(":")
                self._labels[result] = f"{piece.name}{colon}{detail}"
        piece.made[index, box] = result
        return result

    def _write_weight(self, node: Node, box: Box) -> int:
        assert isinstance(node.arg, int)  # check_graph has seen to it
        whole = self._scope.graph.weights[node.arg]
        if is_full(box, whole.shape):
            return self._add(node)
        spans = (
            ":" if (start, size) == (0, full) else f"{start}:{start + size}"
            for (start, size), full in zip(box, whole.shape, strict=True)
        )
        name = f"{whole.name}[{','.join(spans)}]"
        if name not in self._places:
            self._places[name] = len(self._weights)
            source = self._sources[name] = select(self._sources[whole.name], name, box)
            self._weights.append(source.describe_weight())
        return self._add(Node("WEIGHT", node.dtype, (), self._places[name]))

    def _write_gates(self, bank: Bank, span: tuple[int, int], name: str) -> int:
        """Return the gates of the span's experts, and zero for slots that chose another expert."""
        chosen, gates = self._moved[bank.chosen], self._moved[bank.gates]
        dtype = self._nodes[gates].dtype
        below = self._add(Node("CMPLT", "bool", (chosen, self._write_integer(sum(span)))))
        above = self._add(Node("CMPLT", "bool", (self._write_integer(span[0] - 1), chosen)))
        own = self._add(Node("AND", "bool", (below, above)))
        zero = self._add(Node("CONST", dtype, (), encode_float(0.0)))
        group = self._labels.get(gates, "router").partition(":")[0]
        return self._store(
            self._add(Node("WHERE", dtype, (own, gates, zero))), f"{group}: gates of {name}"
        )

    def _write_integer(self, number: int) -> int:
        return self._add(Node("CONST", "int32", (), str(number)))

    def _join(self, plan: PiecePlan, pieces: Sequence[int], first: int, end: int) -> int:
        """Return pieces ``first`` to ``end`` joined into one value by a tree of selections."""
        values = self._scope.values
        shape, dtype = values[plan.root].shape, values[plan.root].dtype
        dims = values[plan.root].dims
        if end - first == 1:
            if plan.bank is not None:
                return pieces[first]
            pads = list(make_full_box(shape))
            pads[plan.axis] = (plan.spans[first][0], shape[plan.axis])
            return self._add(Node("PAD", dtype, (pieces[first],), name_sizes(tuple(pads), dims)))
        middle = (first + end) // 2
        ones: list[Dim] = [1] * len(shape)
        if plan.bank is not None:
            place = self._moved[plan.bank.chosen]
            chosen = values[plan.bank.chosen].dims
            ones[: len(chosen)] = chosen
        else:
            place = self._add(Node("IOTA", "int32", (), shape[plan.axis]))
            ones[plan.axis] = shape[plan.axis]
        place = self._add(Node("RESHAPE", "int32", (place,), tuple(ones)))
        bound = self._write_integer(plan.spans[middle][0])
        left = self._add(Node("CMPLT", "bool", (place, bound)))
        parts = self._join(plan, pieces, first, middle), self._join(plan, pieces, middle, end)
        return self._add(Node("WHERE", dtype, (left, *parts)))
