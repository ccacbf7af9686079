"""What compiling a graph takes, predicted from the graph alone: microseconds of one core.

A code generator makes one kernel of each value in memory. It has no names inside a kernel: movement
is pushed to the loads, so an operation whose value is read through two different views is computed
twice, and everything before it as well. So what counts is the size of the expression after that:
the pairs of an operation and a **view** of its value. ``y = y * shift(y)`` has two views of y, four
of the y before it, and so on: a depth of 10 gives 1,024 loads.

    pairs    each costs what the operation turns into; a sine becomes hundreds of instructions
    loads    each carries an index expression. Simplifying it takes the cube of its length, which
             reshapes, pads, shrinks and flips on the way add to, and the number of a row looked up
    kernels  equal ones are compiled once
    nodes    the scheduler's work: once each, and again for each value in memory

The numbers were fitted to tinygrad 0.14 (``bench/measure/compile_times.py`` measures them again).
They are part of the rules of a legal graph, so they are integers and equal for everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from splitup.graph.ir import Dims, Node
from splitup.graph.operations.spec import Value
from splitup.graph.operations.table import MOVEMENT, PARAMS

_NODE_US: Final = 1_200
_PASSES_NS: Final = 1_500  # for each node, once for each value in memory
_KERNEL_US: Final = 10_000
_LOAD_US: Final = 10_000
_VISIT_US: Final = 300  # one operation under one view, if it moves elements only
_OPERATION_US: Final = 1_500  # an addition, four of which are computed at once
_OPERATIONS_US: Final[Mapping[str, int]] = {
    "CAST": 3_000,
    "SHL": 3_000,
    "SHR": 3_000,
    "CDIV": 5_000,
    "WHERE": 6_000,
    "CMPLT": 6_000,
    "CMPNE": 7_000,
    "CMPEQ": 7_000,
    "MAX": 8_000,
    "FLOORDIV": 8_000,
    "CMOD": 9_000,
    "FLOORMOD": 9_000,
    "LOOKUP": 20_000,
    "LOG2": 110_000,
    "EXP2": 130_000,
    "POW": 280_000,
    "SIN": 480_000,
}
_MOST_SIZE: Final = 256
_WIDENED: Final = ("float16", "bfloat16")  # computed in float32, with casts around
_SPECIAL_US: Final[Mapping[tuple[str, str], int]] = {
    ("MUL", "bfloat16"): 90_000,
    ("EXP2", "float16"): 400_000,
    ("LOG2", "float16"): 350_000,
    ("SIN", "float16"): 1_200_000,
    ("POW", "float16"): 1_000_000,
    ("SIN", "float64"): 600_000,
    ("POW", "float64"): 600_000,
}


def get_operation_us(op: str, dtype: str) -> int:
    """Return what one operation takes, four elements of which are computed at once."""
    special = _SPECIAL_US.get((op, dtype))
    if special is not None:
        return special
    return _OPERATIONS_US.get(op, _OPERATION_US) * (2 if dtype in _WIDENED else 1)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What the kernel of one value in memory takes to compile.

    ``pairs`` were looked at. Of kernels of one ``signature`` only the first is compiled.
    """

    cost_us: int
    pairs: int
    signature: tuple[Any, ...]


def measure_size(node: Node, sizes: Sequence[int]) -> int:
    """Return how many operations a node's value takes since memory, counting shared ones again.

    ``sizes`` are those of earlier nodes. A large size is cut off: no kernel may have it.
    """
    if node.op in PARAMS or node.op == "CONTIGUOUS":
        return 1
    return min(_MOST_SIZE, 1 + sum(sizes[src] for src in node.srcs))


def measure_kernel(
    nodes: Sequence[Node],
    values: Sequence[Value],
    sizes: Sequence[int],
    root: int,
    most_us: int,
) -> KernelCost:
    """Return the cost of the kernel that writes node ``root`` to memory.

    ``sizes`` are those of ``measure_size``. It stops when the cost exceeds ``most_us``: the time is
    proportional to that.
    """
    views = _Views()
    walk = _Walk(views, sizes)
    source = nodes[root].srcs[0] if nodes[root].op == "CONTIGUOUS" else root
    pending = [(source, 0)]
    seen: set[tuple[int, int]] = set()
    slots: dict[int, int] = {}
    signature: list[Any] = [values[root].dims]
    cost_us = _KERNEL_US
    while pending and cost_us <= most_us:
        pair = pending.pop()
        if pair in seen:
            continue
        seen.add(pair)
        index, view = pair
        node, value = nodes[index], values[index]
        is_load = node.op in PARAMS or node.op == "CONTIGUOUS"
        argument = slots.setdefault(index, len(slots)) if is_load else node.arg
        signature.append((is_load or node.op, node.dtype, argument, value.dims, view))
        if is_load or node.op == "IOTA":
            cost_us += (_LOAD_US if is_load else _OPERATION_US) + views.lengths[view] ** 3 * 7 // 10
            continue
        cost_us += _VISIT_US
        if node.op == "CONST":
            continue
        if node.op not in MOVEMENT:
            cost_us += get_operation_us(node.op, node.dtype) * max(1, len(node.srcs) - 2)
        pending += walk.list_operands(index, node, value, values, view)
    return KernelCost(cost_us, len(seen), tuple(signature))


@dataclass(slots=True)
class _Views:
    """The views of one kernel by number, 0 being none, with the lengths of their expressions."""

    lengths: list[int] = field(default_factory=lambda: [0])
    numbers: dict[tuple[int, Any], int] = field(default_factory=dict)

    def add(self, view: int, step: Any, length: int = 0) -> int:
        """Return the view that moves as ``step`` says before ``view``."""
        number = self.numbers.setdefault((view, step), len(self.lengths))
        if number == len(self.lengths):
            self.lengths.append(self.lengths[view] + length)
        return number


@dataclass(frozen=True, slots=True)
class _Walk:
    views: _Views
    sizes: Sequence[int]

    def list_operands(
        self, index: int, node: Node, value: Value, values: Sequence[Value], view: int
    ) -> list[tuple[int, int]]:
        """Return the operands of a node that is read through ``view``, each with its own view."""
        add = self.views.add
        if node.op in MOVEMENT:
            source = values[node.srcs[0]]
            return [(node.srcs[0], add(view, *_MOVES[node.op](node, value, source)))]
        if node.op == "REDUCE":
            return [(node.srcs[0], add(view, (index,)))]
        if node.op == "STACK":
            inner = add(view, ("STACK",))
            return [(src, inner) for src in node.srcs]
        if node.op == "LOOKUP":
            table, number = node.srcs
            rank = len(values[number].dims)
            row = add(view, ("ROW", index), 3 + self.sizes[number])
            return [(table, row), (number, add(view, ("ROWS", rank)))]
        return [
            (src, view if values[src].dims == value.dims else add(view, _fit(values[src], value)))
            for src in node.srcs
        ]


def _fit(operand: Value, result: Value) -> tuple[Any, ...]:
    """Return the step from an operand to the shape that it is broadcast to."""
    axes = tuple(size == 1 for size in operand.dims)
    return "BROADCAST", len(result.dims) - len(axes), axes


_Step = tuple[Any, int]  # what distinguishes it, and how much longer it makes an index


def _reshape(node: Node, value: Value, source: Value) -> _Step:
    length = measure_reshape(value.shape, source.shape)
    return ("RESHAPE", source.dims, value.dims if length else ()), length


def _permute(node: Node, value: Value, source: Value) -> _Step:
    return ("PERMUTE", node.arg), 0


def _expand(node: Node, value: Value, source: Value) -> _Step:
    return ("EXPAND", len(value.dims) - len(source.dims)), 0


def _flip(node: Node, value: Value, source: Value) -> _Step:
    assert isinstance(node.arg, tuple)  # as check_graph has seen
    return ("FLIP", node.arg), node.arg.count(1)


def _shrink(node: Node, value: Value, source: Value) -> _Step:
    offsets = _list_offsets(node)
    return ("SHRINK", offsets), len(offsets) - offsets.count(0)


def _pad(node: Node, value: Value, source: Value) -> _Step:
    changed = [new != old for new, old in zip(value.dims, source.dims, strict=True)]
    return ("PAD", _list_offsets(node), value.dims, source.dims), 3 * sum(changed)


def _list_offsets(node: Node) -> Dims:
    assert isinstance(node.arg, tuple)  # as check_graph has seen
    return tuple(pair[0] for pair in node.arg if isinstance(pair, tuple))


_MOVES: Final[Mapping[str, Callable[[Node, Value, Value], _Step]]] = {
    "RESHAPE": _reshape,
    "PERMUTE": _permute,
    "EXPAND": _expand,
    "FLIP": _flip,
    "SHRINK": _shrink,
    "PAD": _pad,
}


def measure_reshape(shape: Sequence[int], other: Sequence[int]) -> int:
    """Return how much longer an index gets: sums for axes that are joined, divisions for others.

    Axes that stay as they are, and those of one element, add nothing.
    """
    left = [size for size in shape if size != 1]
    right = [size for size in other if size != 1]
    length = i = j = 0
    while i < len(left) and j < len(right):
        first, second = i + 1, j + 1
        products = [left[i], right[j]]
        while products[0] != products[1]:
            if products[0] < products[1]:
                products[0] *= left[first]
                first += 1
            else:
                products[1] *= right[second]
                second += 1
        if first - i > 1 or second - j > 1:
            length += first - i + 2 * (second - j)
        i, j = first, second
    return length


def compute_total_us(kernels_us: int, nodes: int, stored: int) -> int:
    """Return what a graph takes whose distinct kernels take ``kernels_us``.

    ``stored`` of its nodes are values in memory.
    """
    return kernels_us + nodes * (_NODE_US + stored * _PASSES_NS // 1_000)
