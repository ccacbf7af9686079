"""A task in which every rounding errs by one unit more: are its results defined at all?

Two honest devices round differently: they take sums in another order, fuse a multiplication with an
addition, and have other functions. A task may enlarge that without limit: by differences of nearly
equal numbers, by sums that nearly cancel, by iterating a chaotic map. Then honest results differ as
much as a lie does, and comparing cannot tell them apart. Who registers the model and chooses the
inputs could make honest nodes look like liars that way.

Here the result of every operation that rounds is multiplied, element by element, by 1 + d or 1 - d,
where d is one unit in the last place. The sign is a hash of the element's position and a key of the
operation, which follows from a seed that nobody knew when the inputs were chosen. If that alone
changes the outputs, a difference says nothing about who computed them. This is Monte Carlo
arithmetic (D. S. Parker, UCLA CSD-970002, 1997), with two values in place of a continuous range.

The keys are a weight of the noisy task, so that it is compiled once for all seeds. They are no
input: a task may have as many inputs as the rules allow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from splitup.core.tensors import ITEM_BYTES
from splitup.graph.compare import MANTISSA_BITS
from splitup.graph.dtypes import FLOATS
from splitup.graph.ir import Arg, Dims, Graph, GraphOutput, Node, Update, Weight, encode_float
from splitup.graph.rules import CheckedGraph, check_graph

_ROUNDING: Final = frozenset(
    ("ADD", "SUB", "MUL", "FDIV", "RECIPROCAL", "SQRT", "EXP2", "LOG2", "SIN", "POW", "REDUCE")
)
_MULTIPLIERS: Final = (-1640531535, 739982445, 695872825)  # odd: they mix bits and lose none
_SHIFT: Final = 15


def add_noise(graph: CheckedGraph, seed: str) -> tuple[CheckedGraph, dict[str, bytes]]:
    """Return the graph with noise in every float that an operation rounds.

    And the bytes of the weight that it has besides, by name: the keys that follow from ``seed``
    (SHAKE256, FIPS 202), int32 [operations that round], none if nothing rounds. Compiled code does
    not depend on the seed. Zeros, infinities and NaN stay what they are. Raises InvalidModel when
    that breaks a rule, because the graph becomes too large.
    """
    noisy = _NoisyCopy(len(graph.weights))
    for place, node in enumerate(graph.nodes):
        noisy.copy(place, node, graph.values[place].dims)
    keys = noisy.make_keys(seed, {weight.name for weight in graph.weights})
    made = check_graph(
        Graph(
            graph.inputs,
            (*graph.weights, *(weight for weight, _ in keys)),
            graph.states,
            tuple(noisy.nodes),
            tuple(GraphOutput(output.name, noisy.moved[output.node]) for output in graph.outputs),
            tuple(Update(update.state, noisy.moved[update.node]) for update in graph.updates),
            graph.symbols,
        )
    )
    return made, {weight.name: data for weight, data in keys}


class _NoisyCopy:
    """Builds the graph node by node; ``moved`` says where each old node's value is now."""

    def __init__(self, weights: int) -> None:
        self._weights = weights
        self._keys = 0  # so many are in use
        self._constants: dict[tuple[str, str], int] = {}
        self._hashes: dict[int, int] = {}  # by number of elements
        self.nodes: list[Node] = []
        self.moved: dict[int, int] = {}
        self._source: int | None = None  # the node of all keys

    def make_keys(self, seed: str, names: Collection[str]) -> list[tuple[Weight, bytes]]:
        """Return the weight that holds the keys, under a name that is not among ``names``."""
        if not self._keys:
            return []
        name = next(
            name for count in range(len(names) + 1) if (name := f"noise{count}") not in names
        )
        data = hashlib.shake_256(seed.encode()).digest(ITEM_BYTES["int32"] * self._keys)
        return [(Weight(name, "int32", (self._keys,), hashlib.sha256(data).hexdigest()), data)]

    def copy(self, place: int, node: Node, dims: Dims) -> None:
        self.nodes.append(replace(node, srcs=tuple(self.moved[src] for src in node.srcs)))
        self.moved[place] = len(self.nodes) - 1
        if node.dtype in FLOATS and node.op in _ROUNDING:
            factor = self._add_factor(node.dtype, dims)
            self.moved[place] = self._add("MUL", node.dtype, self.moved[place], factor)

    def _add_factor(self, dtype: str, dims: Dims) -> int:
        """Add 1 + d or 1 - d for every element; the rows of a symbol share theirs."""
        distance = 2.0 ** -MANTISSA_BITS[dtype]
        more = self._get_constant(dtype, encode_float(1 + distance))
        less = self._get_constant(dtype, encode_float(1 - distance))
        shape = tuple(dim if isinstance(dim, int) else 1 for dim in dims)
        count = math.prod(shape)
        keyed = self._add_key()
        if count > 1:
            keyed = self._add("XOR", "int32", self._get_hash(count), keyed)
            keyed = self._add("MUL", "int32", keyed, self._get_int(_MULTIPLIERS[0]))
        sign = self._add("CMPLT", "bool", keyed, self._get_int(0))
        factor = self._add("WHERE", dtype, sign, more, less)
        return self._add("RESHAPE", dtype, factor, arg=shape)

    def _add_key(self) -> int:
        """Add the next key, a scalar."""
        if self._source is None:
            self._source = self._add("WEIGHT", "int32", arg=self._weights)
        one = self._add("SHRINK", "int32", self._source, arg=((self._keys, 1),))
        self._keys += 1
        return self._add("RESHAPE", "int32", one, arg=())

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
