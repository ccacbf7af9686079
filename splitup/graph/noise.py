"""A task in which every rounding errs by one unit more: are its results defined at all?

Two honest devices round differently: they take sums in another order, fuse a multiplication with an
addition, and have other functions. A task may enlarge that without limit: by differences of nearly
equal numbers, by sums that nearly cancel, by iterating a chaotic map. Then honest results differ as
much as a lie does, and comparing cannot tell them apart. Who registers the model and chooses the
inputs could make honest nodes look like liars that way.

Here the result of every operation that rounds is multiplied, element by element, by 1 + d or 1 - d,
where d is one unit in the last place. The sign is a hash of the element's position, the operation
and a seed that nobody knew when the inputs were chosen. If that alone changes the outputs, a
difference says nothing about who computed them. This is Monte Carlo arithmetic (D. S. Parker, UCLA
CSD-970002, 1997), with two values in place of a continuous range.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from splitup.core.codec import compute_digest
from splitup.graph.compare import MANTISSA_BITS
from splitup.graph.dtypes import FLOATS
from splitup.graph.ir import Arg, Dims, Graph, Node, Output, Update, encode_float
from splitup.graph.rules import CheckedGraph, check_graph

_ROUNDING: Final = frozenset(
    ("ADD", "SUB", "MUL", "FDIV", "RECIPROCAL", "SQRT", "EXP2", "LOG2", "SIN", "POW", "REDUCE")
)
_MULTIPLIERS: Final = (-1640531535, 739982445, 695872825)  # odd: they mix bits and lose none
_SHIFT: Final = 15


def add_noise(graph: CheckedGraph, seed: str) -> CheckedGraph:
    """Return the graph with noise in every float that an operation rounds.

    Zeros, infinities and NaN stay what they are. Raises InvalidModel when that breaks a rule,
    because the graph becomes too large.
    """
    noisy = _NoisyCopy(seed)
    for place, node in enumerate(graph.nodes):
        noisy.copy(place, node, graph.values[place].dims)
    return check_graph(
        Graph(
            graph.inputs,
            graph.weights,
            graph.states,
            tuple(noisy.nodes),
            tuple(Output(output.name, noisy.moved[output.node]) for output in graph.outputs),
            tuple(Update(update.state, noisy.moved[update.node]) for update in graph.updates),
            graph.symbols,
        )
    )


class _NoisyCopy:
    """Builds the graph node by node; ``moved`` says where each old node's value is now."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._constants: dict[tuple[str, str], int] = {}
        self._hashes: dict[int, int] = {}  # by number of elements
        self.nodes: list[Node] = []
        self.moved: dict[int, int] = {}

    def copy(self, place: int, node: Node, dims: Dims) -> None:
        self.nodes.append(replace(node, srcs=tuple(self.moved[src] for src in node.srcs)))
        self.moved[place] = len(self.nodes) - 1
        if node.dtype in FLOATS and node.op in _ROUNDING:
            factor = self._add_factor(place, node.dtype, dims)
            self.moved[place] = self._add("MUL", node.dtype, self.moved[place], factor)

    def _add_factor(self, place: int, dtype: str, dims: Dims) -> int:
        """Add 1 + d or 1 - d for every element; the rows of a symbol share theirs."""
        key = int(compute_digest(f"{self._seed}/{place}".encode())[:8], 16) - 2**31
        distance = 2.0 ** -MANTISSA_BITS[dtype]
        more = self._get_constant(dtype, encode_float(1 + distance))
        less = self._get_constant(dtype, encode_float(1 - distance))
        shape = tuple(dim if isinstance(dim, int) else 1 for dim in dims)
        count = math.prod(shape)
        if count == 1:
            return more if key % 2 else less
        keyed = self._add("XOR", "int32", self._get_hash(count), self._get_int(key))
        mixed = self._add("MUL", "int32", keyed, self._get_int(_MULTIPLIERS[0]))
        sign = self._add("CMPLT", "bool", mixed, self._get_int(0))
        factor = self._add("WHERE", dtype, sign, more, less)
        return self._add("RESHAPE", dtype, factor, arg=shape)

    def _get_hash(self, count: int) -> int:
        """Return a node of pseudo-random int32 numbers, one for each element."""
        if count not in self._hashes:
            mixed = self._add("IOTA", "int32", arg=count)
            for multiplier in _MULTIPLIERS:
                scaled = self._add("MUL", "int32", mixed, self._get_int(multiplier))
                high = self._add("SHR", "int32", scaled, self._get_int(_SHIFT))
                mixed = self._add("XOR", "int32", scaled, high)
            self._hashes[count] = mixed
        return self._hashes[count]

    def _get_int(self, value: int) -> int:
        return self._get_constant("int32", str(value))

    def _get_constant(self, dtype: str, text: str) -> int:
        if (dtype, text) not in self._constants:
            self._constants[dtype, text] = self._add("CONST", dtype, arg=text)
        return self._constants[dtype, text]

    def _add(self, op: str, dtype: str, *srcs: int, arg: Arg = None) -> int:
        self.nodes.append(Node(op, dtype, srcs, arg))
        return len(self.nodes) - 1
