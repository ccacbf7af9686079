"""What the format says of one operation (``OpSpec``), and what a node gives (``Value``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.arrays import Array
from splitup.graph.dtypes import ANY
from splitup.graph.ir import Dims, Graph, Node

Kind = Literal[
    "param",  # the value of an input, a weight or a state
    "constant",  # known from the node alone
    "movement",  # other places for the same elements
    "conversion",  # elementwise, to another dtype
    "arithmetic",  # elementwise; operands broadcast as in numpy and share one dtype
    "comparison",  # likewise, with a bool for each pair
    "other",
]


@dataclass(frozen=True, slots=True)
class Value:
    """The dtype and shape of what a node gives, and the arithmetic it takes to compute it once.

    ``dims`` are its dimensions with symbols by name. In ``shape``, and in all that is counted from
    it, each symbol has its maximum.
    """

    dtype: str
    shape: tuple[int, ...]
    operations: int
    dims: Dims

    @property
    def nbytes(self) -> int:
        """Return the bytes that the value takes in memory, without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> str:
        """Return the symbol that is the leading dimension, or ""."""
        return self.dims[0] if self.dims and isinstance(self.dims[0], str) else ""

    def make_spec(self, name: str) -> TensorSpec:
        """Return a port of this dtype and shape."""
        return TensorSpec(name, self.dtype, self.shape, self.rows)


class RuleViolation(Exception):
    """A node breaks a rule of ``splitup.graph.rules``."""

    def __init__(self, rule: str, problem: str) -> None:
        super().__init__(problem)
        self.rule = rule


def require(condition: bool, rule: str, problem: str) -> None:
    """Raise RuleViolation unless the condition holds."""
    if not condition:
        raise RuleViolation(rule, problem)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a node's dtype and shape depend on besides the node and its operands."""

    graph: Graph
    maxima: Mapping[str, int]  # of each symbol

    def resolve(self, dims: Dims) -> tuple[int, ...]:
        """Return the largest shape that these dimensions may have."""
        return tuple(self.maxima[size] if isinstance(size, str) else size for size in dims)


# The number that every element of a value is known to be; None when it is not known.
Known = int | float | None

Infer = Callable[[Scope, Node, Sequence[Value]], tuple[str, Dims]]
CountWork = Callable[[tuple[int, ...], Sequence[Value]], int]
Compute = Callable[[Node, Sequence[Array]], Array]
Bound = Callable[[Node, Array, Sequence[Array], Sequence[Array]], Array]
Propagate = Callable[[Node, Sequence[Known]], Known]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """What the format says of one operation. The table is ``splitup.graph.operations.table``.

    infer      the result's dtype and dimensions from the operands'; raises RuleViolation for an
               argument, a dtype or a shape that the operation does not take
    compute    the reference: the result in numpy. None for params, whose values are given
    bound      how far an honest kernel may be from the reference, given the reference's value, the
               operands and their own bounds. None for operations without operands, which are exact
    propagate  the number that every element is known to be, given the same of the operands
    work       arithmetic operations, counted from the result's shape and the operands
    """

    kind: Kind
    arity: int | None  # None: any number from 1 to MAX_PORTS
    infer: Infer
    compute: Compute | None
    bound: Bound | None
    propagate: Propagate
    work: CountWork
    dtypes: frozenset[str] = ANY  # of the operands; of WHERE, of those that are chosen from
    has_argument: bool = False
    is_sized_by_result: bool = False  # the reference allocates the result, not what it reads
