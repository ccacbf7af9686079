"""Merkle trees over what a task computed, for disputes: over its values, and over one kernel.

A *value trace* has a leaf for every input and every value that was written to memory, step by step.
Tasks and kernels end at such values (docs/adr/0001-cut-at-materialised-values.md), so two nodes of
one determinism class have equal leaves. An *operation trace* has a leaf for every operation of one
kernel, from the values that it reads to the one that it writes, computed by the reference.

A leaf is the SHA-256 of the value's bytes. Trees are those of RFC 9162 section 2.1 (Certificate
Transparency): 0x00 before a leaf, 0x01 before two children, the left one a full power of two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec
from splitup.graph.arrays import Array, decode_array, encode_array
from splitup.graph.ir import Graph, Node, Output, bind_rows
from splitup.graph.reference import compute_nodes, list_operands, list_region
from splitup.graph.rules import CheckedGraph, check_graph

_LEAF: Final = b"\0"
_NODE: Final = b"\1"


# ---- trees -------------------------------------------------------------------------------------


def hash_leaf(digest: bytes) -> bytes:
    """Return the hash of a leaf that holds ``digest``."""
    return hashlib.sha256(_LEAF + digest).digest()


def hash_children(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(_NODE + left + right).digest()


def split_range(start: int, end: int) -> int:
    """Return where the leaves ``start`` … ``end`` - 1, at least two, are split."""
    return start + (1 << ((end - start - 1).bit_length() - 1))


class MerkleTree:
    """A tree over at least one digest; 64 bytes of memory per leaf."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        if not 1 <= len(digests) <= limits.MAX_TRACE_LEAVES:
            raise InvalidInput(
                f"a trace has 1 to {limits.MAX_TRACE_LEAVES} leaves, not {len(digests)}"
            )
        self.digests = tuple(digests)
        self._levels = [[hash_leaf(digest) for digest in digests]]
        while len(level := self._levels[-1]) > 1:
            pairs = range(0, len(level) - 1, 2)
            self._levels.append([hash_children(level[i], level[i + 1]) for i in pairs])

    @property
    def root(self) -> bytes:
        """Return the hash of the whole tree."""
        return self.hash_range(0, len(self.digests))

    def hash_range(self, start: int, end: int) -> bytes:
        """Return the hash of the node over these leaves; they must be those of a node."""
        size = end - start
        if size & (size - 1) == 0:
            return self._levels[size.bit_length() - 1][start // size]
        middle = split_range(start, end)
        return hash_children(self.hash_range(start, middle), self.hash_range(middle, end))

    def prove(self, index: int) -> tuple[bytes, ...]:
        """Return the siblings on the way from the root down to a leaf."""
        siblings, start, end = [], 0, len(self.digests)
        while end - start > 1:
            middle = split_range(start, end)
            if index < middle:
                siblings.append(self.hash_range(middle, end))
                end = middle
            else:
                siblings.append(self.hash_range(start, middle))
                start = middle
        return tuple(siblings)


def is_leaf(root: bytes, count: int, index: int, digest: bytes, siblings: Sequence[bytes]) -> bool:
    """Return whether the tree of ``count`` leaves under ``root`` holds ``digest`` at ``index``."""
    if not 0 <= index < count:
        return False
    went_left, start, end = [], 0, count
    while end - start > 1:
        middle = split_range(start, end)
        went_left.append(index < middle)
        start, end = (start, middle) if index < middle else (middle, end)
    if len(siblings) != len(went_left):
        return False
    value = hash_leaf(digest)
    for left, sibling in zip(reversed(went_left), reversed(siblings), strict=True):
        value = hash_children(value, sibling) if left else hash_children(sibling, value)
    return value == root


# ---- which leaf is what ------------------------------------------------------------------------


Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ValueLayout:
    """The leaves of a task's value trace.

    A step has one leaf per input, in order, then one per value written to memory, in order.
    ``rows`` holds per step the numbers that the graph's symbols, in their order, were bound to.
    """

    graph: CheckedGraph
    rows: Rows
    _bound: dict[tuple[int, ...], CheckedGraph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise InvalidInput for rows that the graph does not take."""
        for counts in set(self.rows):
            if len(counts) != len(self.graph.symbols) or not all(
                1 <= count <= symbol.maximum
                for count, symbol in zip(counts, self.graph.symbols, strict=False)
            ):
                raise InvalidInput(f"the task takes no step of {counts} rows")

    def bind(self, step: int) -> CheckedGraph:
        """Return the graph of one step, which has no symbols."""
        counts = self.rows[step]
        if counts not in self._bound:
            names = [symbol.name for symbol in self.graph.symbols]
            graph = bind_rows(self.graph, dict(zip(names, counts, strict=True)))
            self._bound[counts] = check_graph(graph)
        return self._bound[counts]

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """Return the nodes whose values are written to memory."""
        return tuple(i for i, node in enumerate(self.graph.nodes) if node.op == "CONTIGUOUS")

    @property
    def width(self) -> int:
        """Return the number of leaves of one step."""
        return len(self.graph.inputs) + len(self.stored)

    @property
    def count(self) -> int:
        """Return the number of leaves."""
        return len(self.rows) * self.width

    def locate(self, leaf: int) -> tuple[int, int | None]:
        """Return a leaf's step and node, None for one that is an input."""
        step, slot = divmod(leaf, self.width)
        inputs = len(self.graph.inputs)
        return step, None if slot < inputs else self.stored[slot - inputs]

    def find_operand(self, step: int, index: int) -> int | str:
        """Return the leaf of node ``index`` in a step, or its digest where that is known.

        Weights are known from the graph, and the state before the first step is zero.
        """
        node = self.graph.nodes[index]
        base = step * self.width
        if node.op == "INPUT":
            assert isinstance(node.arg, int)  # check_graph has seen to it
            return base + node.arg
        if node.op == "CONTIGUOUS":
            return base + len(self.graph.inputs) + self.stored.index(index)
        assert isinstance(node.arg, int)
        if node.op == "WEIGHT":
            return self.graph.weights[node.arg].digest
        if step == 0:
            return hashlib.sha256(bytes(self.graph.states[node.arg].nbytes)).hexdigest()
        return self.find_operand(step - 1, self.graph.updates[node.arg].node)

    def get_spec(self, step: int, index: int) -> TensorSpec:
        """Return dtype and shape of a node in a step, with a name made of its number."""
        return self.bind(step).values[index].make_spec(f"node {index}")


# ---- a kernel on its own -----------------------------------------------------------------------


def expose_values(graph: CheckedGraph) -> list[CheckedGraph]:
    """Return graphs that together give every value in memory as an output, named by its node.

    Values and kernels are those of ``graph``, where each such value has a buffer of its own too.
    """
    stored = [index for index, node in enumerate(graph.nodes) if node.op == "CONTIGUOUS"]
    parts = range(0, len(stored), limits.MAX_PORTS)
    return [
        replace(
            graph,
            outputs=tuple(Output(str(i), i) for i in stored[start : start + limits.MAX_PORTS]),
        )
        for start in parts
    ]


def cut_region(graph: CheckedGraph, root: int) -> CheckedGraph:
    """Return a task that computes one value in memory from the values in memory that it reads.

    Its inputs are ``list_operands`` of the region, and then one input of bools for every symbol
    that no operand binds; nothing reads it, it only binds the symbol. A node of the same
    determinism class that runs this task gives the bytes that the whole task gives. Raises
    InvalidModel when an operand has a symbol that is not its leading dimension.
    """
    values, region = graph.values, list_region(graph, root)
    operands = list_operands(graph, region)
    nodes = [Node("INPUT", values[i].dtype, (), place) for place, i in enumerate(operands)]
    moved = {index: place for place, index in enumerate(operands)}
    for index in region:
        node = graph.nodes[index]
        moved[index] = len(nodes)
        nodes.append(replace(node, srcs=tuple(moved[src] for src in node.srcs)))
    used = {size for index in (*region, *operands) for size in values[index].dims}
    specs = [values[i].make_spec(str(i)) for i in operands]
    bound = {spec.rows for spec in specs}
    symbols = tuple(symbol for symbol in graph.symbols if symbol.name in used)
    specs += [
        TensorSpec(f"rows/{symbol.name}", "bool", (symbol.maximum,), symbol.name)
        for symbol in symbols
        if symbol.name not in bound
    ]
    outputs = (Output(str(root), moved[root]),)
    return CheckedGraph(tuple(specs), (), (), tuple(nodes), outputs, (), symbols)


def list_region_inputs(
    region: Graph, layout: ValueLayout, step: int, operands: Mapping[int, bytes]
) -> list[bytes]:
    """Return the inputs of a graph of ``cut_region`` for one step, from its operands' bytes."""
    names = [symbol.name for symbol in layout.graph.symbols]
    rows = dict(zip(names, layout.rows[step], strict=True))
    data = [operands[index] for index in sorted(operands)]
    return data + [bytes(rows[spec.rows]) for spec in region.inputs[len(data) :]]


def trace_operations(
    layout: ValueLayout, step: int, root: int, operands: Mapping[int, bytes]
) -> list[bytes]:
    """Return the digests of a region's operation trace; ``operands`` holds the bytes it reads.

    Raises InvalidInput when the region is too large for the reference.
    """
    graph = layout.bind(step)
    region = list_region(graph, root)
    values = decode_operands(layout, step, operands)
    compute_nodes(graph, region, values)
    return [
        hashlib.sha256(encode_array(graph.nodes[index].dtype, values[index])).digest()
        for index in region
    ]


def decode_operands(
    layout: ValueLayout, step: int, operands: Mapping[int, bytes]
) -> dict[int, Array]:
    """Return the arrays of nodes' bytes."""
    return {i: decode_array(layout.get_spec(step, i), data) for i, data in operands.items()}
