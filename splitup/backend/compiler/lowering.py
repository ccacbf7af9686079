"""A graph as tinygrad operations for a device: what each operation of the format becomes.

``LOWERINGS`` has one entry per operation of ``splitup.graph.operations.table``; a test compares
their keys. It works on tinygrad 0.14's graph before scheduling. Every CONTIGUOUS becomes a buffer
of its own with one kernel that fills it, whether or not the value leaves the task: so cutting a
graph there changes no kernel, and each value in memory is scheduled apart from the others
(``splitup.backend.compiler.parts``), equal ones once.

A symbol is a tinygrad variable. Where it is the leading dimension of a value in memory, rows are a
little further apart than they are long (``splitup.graph.memory.get_stride``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from tinygrad.codegen.decomp.transcendental import xsin
from tinygrad.device import Device
from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.compiler.integers import (
    compute_wrapped,
    convert,
    hide_range,
    reduce_wrapped,
    reinterpret,
    shift_left,
)
from splitup.backend.compiler.parts import GraphPart, find_parts
from splitup.backend.tinygrad_types import get_tinygrad_dtype, make_variable
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.dtypes import INTEGERS
from splitup.graph.ir import Dim, Dims, Node, Weight, decode_float
from splitup.graph.memory import get_stride
from splitup.graph.operations.spec import Value
from splitup.graph.rules import CheckedGraph

# where a device lacks these, tinygrad computes with float32 or pairs of 32-bit integers instead
_CONVERTED: Final = {
    *(dtypes.float16, dtypes.bfloat16),
    *(dtypes.int64, dtypes.uint64),
}


@dataclass(frozen=True, slots=True)
class LoweredPart:
    """Operations that are scheduled together, or the earlier part that they are equal to.

    ``buffers`` are those that they mention; those of equal parts correspond to each other.
    """

    roots: tuple[UOp, ...]  # () of a part that is equal to an earlier one
    buffers: tuple[UOp, ...]
    pattern: int  # the first part that is equal


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph's tinygrad operations. Every buffer is a BUFFER operation of one axis.

    Weights, states and updates are contiguous; inputs and outputs may have rows further apart.
    """

    inputs: tuple[UOp, ...]
    weights: tuple[UOp, ...]
    states: tuple[UOp, ...]
    outputs: tuple[UOp, ...]  # the buffer that holds each output after the step
    updates: tuple[UOp, ...]  # the buffer that holds each state's new value
    values: tuple[UOp, ...]  # all buffers that the step writes, in the graph's order
    parts: tuple[LoweredPart, ...]  # what is to be scheduled, in this order


def lower_graph(graph: CheckedGraph, device: str) -> Lowered:
    """Return tinygrad operations for ``device`` that compute a graph.

    Raises InvalidModel when it has a dtype that the device lacks and tinygrad does not convert.
    """
    _check_dtypes(graph, device)
    parts = find_parts(graph)
    scope = _Scope(graph, device, is_whole=len(parts) == 1)
    lowered_parts: list[LoweredPart] = []
    scope.allocate_values(parts)
    for place, part in enumerate(parts):
        roots = scope.lower(part) if part.pattern == place else ()
        buffers = tuple(map(scope.get_buffer, part.buffers))
        lowered_parts.append(LoweredPart(roots, buffers, part.pattern))
    return Lowered(
        inputs=tuple(buffer for buffer, _ in scope.inputs),
        weights=tuple(buffer for buffer, _ in scope.weights),
        states=tuple(buffer for buffer, _ in scope.states),
        outputs=tuple(scope.stored[output.node][0] for output in graph.outputs),
        updates=tuple(scope.stored[update.node][0] for update in graph.updates),
        values=tuple(buffer for buffer, _ in scope.stored.values()),
        parts=tuple(lowered_parts),
    )


def _check_dtypes(graph: CheckedGraph, device: str) -> None:
    supported = _CONVERTED | Device[device].renderer.supported_dtypes()
    used = {node.dtype for node in graph.nodes}  # ports are nodes, too
    lacking = sorted(name for name in used if get_tinygrad_dtype(name) not in supported)
    if lacking:
        raise InvalidModel(
            f"device {device} does not compute {', '.join(lacking)}, which the task uses"
        )


# ---- buffers -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Scope:
    """The graph, and what has been lowered of it. Ports are pairs of a buffer and its view."""

    graph: CheckedGraph
    device: str
    is_whole: bool  # all values are scheduled together
    variables: dict[str, UOp] = field(init=False)
    inputs: list[tuple[UOp, UOp]] = field(init=False)
    weights: list[tuple[UOp, UOp]] = field(init=False)
    states: list[tuple[UOp, UOp]] = field(init=False)
    uops: dict[int, UOp] = field(default_factory=dict)  # of each node that was lowered
    stored: dict[int, tuple[UOp, UOp]] = field(default_factory=dict)  # of CONTIGUOUS nodes
    temporaries: dict[int, tuple[UOp, UOp]] = field(default_factory=dict)  # of several values

    def __post_init__(self) -> None:
        self.variables = {symbol.name: make_variable(symbol) for symbol in self.graph.symbols}
        self.inputs = [self.allocate(spec) for spec in self.graph.inputs]
        self.weights = [self.allocate(weight) for weight in self.graph.weights]
        self.states = [self.allocate(spec) for spec in self.graph.states]

    def allocate(self, spec: TensorSpec | Weight | Value) -> tuple[UOp, UOp]:
        """Return a buffer, and its view of the right shape."""
        dims = spec.dims if isinstance(spec, Value) else self.graph.get_dims(spec)
        count, dtype = _count_elements(spec.shape, dims), get_tinygrad_dtype(spec.dtype)
        buffer = UOp.new_buffer(self.device, count, dtype)
        return buffer, _view(buffer, spec.shape, dims, self.variables)

    def allocate_values(self, parts: Sequence[GraphPart]) -> None:
        """Give every value in memory its buffer, and every temporary that is a part."""
        for position, node in enumerate(self.graph.nodes):
            if node.op == "CONTIGUOUS":
                self.stored[position] = self.allocate(self.graph.values[position])
        for root in (root for part in parts if part.is_temporary for root in part.roots):
            self.temporaries[root] = self.allocate(self.graph.values[root])

    def find_held(self, position: int) -> tuple[UOp, UOp] | None:
        """Return where a value in memory or a shared temporary is; None for any other node."""
        return self.stored.get(position) or self.temporaries.get(position)

    def get_buffer(self, position: int) -> UOp:
        """Return the buffer of a port, a value in memory or a shared temporary."""
        if (held := self.find_held(position)) is not None:
            return held[0]
        node = self.graph.nodes[position]
        return self.get_ports(node.op)[_get_integer(node)][0]

    def get_ports(self, op: str) -> list[tuple[UOp, UOp]]:
        """Return the ports that an operation gives the value of."""
        return {"INPUT": self.inputs, "WEIGHT": self.weights, "STATE": self.states}[op]

    def lower(self, part: GraphPart) -> tuple[UOp, ...]:
        """Return the operations that compute a part's roots; other values are read from memory."""
        for position in part.nodes:
            node = self.graph.nodes[position]
            held = None if self.is_whole else self.find_held(position)
            if held is not None and position not in part.roots:
                self.uops[position] = held[1]
            elif position not in self.uops:
                operands = [self.uops[src] for src in node.srcs]
                self.uops[position] = LOWERINGS[node.op](self, position, operands)
        if part.is_temporary:
            views = ((root, self.temporaries[root][1]) for root in part.roots)
            return tuple(view.after(view.store(self.uops.pop(root))) for root, view in views)
        roots = tuple(dict.fromkeys(self.uops[root] for root in part.roots))
        if not self.is_whole:
            for root in part.roots:
                del self.uops[root]
        return roots

    def bind(self, size: Dim) -> Any:
        """Return the variable of a symbol; a number is returned as it is."""
        return self.variables[size] if isinstance(size, str) else size


def _count_elements(shape: tuple[int, ...], dims: Dims) -> int:
    if dims and isinstance(dims[0], str):
        return shape[0] * get_stride(math.prod(shape[1:]))
    return math.prod(shape)


def _view(buffer: UOp, shape: tuple[int, ...], dims: Dims, variables: Mapping[str, UOp]) -> UOp:
    """Return the part of a buffer that is in use, for a largest shape and its dimensions."""
    if not dims or not isinstance(dims[0], str):
        return buffer.reshape(shape)
    count, length = variables[dims[0]], math.prod(shape[1:])
    rows = buffer.reshape((shape[0], get_stride(length)))
    rows = rows._mop(Ops.SHRINK, ((0, count), (0, length)))
    return rows.reshape((count, *shape[1:]))


# ---- one function per form of lowering ---------------------------------------------------------

Lower = Callable[[_Scope, int, list[UOp]], UOp]  # scope, position of the node, lowered operands


def _lower_port(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    node = scope.graph.nodes[position]
    return scope.get_ports(node.op)[_get_integer(node)][1]


def _lower_iota(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    length = _get_integer(scope.graph.nodes[position])
    return Tensor.arange(length, dtype=dtypes.int32).uop


def _lower_const(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    node = scope.graph.nodes[position]
    text = str(node.arg)
    value: float | int | bool
    if node.dtype == "bool":
        value = text == "1"
    elif node.dtype in INTEGERS:
        value = int(text)
    else:
        value = decode_float(text)
    return UOp.const(value, get_tinygrad_dtype(node.dtype))


def _lower_movement(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Lower a movement whose argument is a list of sizes or axes, or (offset, size) per axis."""
    node = scope.graph.nodes[position]
    assert isinstance(node.arg, tuple)  # as check_graph has seen
    bound = tuple(
        (item[0], scope.bind(item[1])) if isinstance(item, tuple) else scope.bind(item)
        for item in node.arg
    )
    return operands[0]._mop(Ops[node.op], bound)


def _lower_flip(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    node = scope.graph.nodes[position]
    assert isinstance(node.arg, tuple)  # as check_graph has seen
    return operands[0]._mop(Ops.FLIP, tuple(bool(item) for item in node.arg))


def _lower_cast(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    return convert(operands[0], get_tinygrad_dtype(scope.graph.nodes[position].dtype))


def _lower_bitcast(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    return reinterpret(operands[0], get_tinygrad_dtype(scope.graph.nodes[position].dtype))


def _lower_plain(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Lower an operation that tinygrad has by the same name, without an argument."""
    return UOp(Ops[scope.graph.nodes[position].op], src=tuple(operands))


def _lower_arithmetic(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Lower ADD, SUB or MUL, which wraps where it is of integers."""
    node = scope.graph.nodes[position]
    if node.dtype in INTEGERS:
        return compute_wrapped(Ops[node.op], *operands)
    return UOp(Ops[node.op], src=tuple(operands))


def _lower_negation(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    (value,) = operands
    if scope.graph.nodes[position].dtype in INTEGERS:
        return compute_wrapped(Ops.SUB, UOp.const(0, value.dtype), value)
    return UOp(Ops.NEG, src=(value,))


def _lower_division(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Lower a division by a constant; tinygrad would merge several into one whose divisor wraps."""
    return hide_range(UOp(Ops[scope.graph.nodes[position].op], src=tuple(operands)))


def _lower_float_division(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Lower FDIV; a code generator without it gets a multiplication with the reciprocal."""
    dividend, divisor = operands
    if Ops.FDIV in Device[scope.device].renderer.code_for_op:
        return UOp(Ops.FDIV, src=(dividend, divisor))
    return UOp(Ops.MUL, src=(dividend, UOp(Ops.RECIPROCAL, src=(divisor,))))


def _lower_sine(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Lower SIN; for a code generator without it, and without uint64, by a series of float32.

    tinygrad's own series reduces arguments above 30 with uint64; this one is right up to 39,800.
    """
    renderer = Device[scope.device].renderer
    (value,) = operands
    if Ops.SIN in renderer.code_for_op or dtypes.uint64 in renderer.supported_dtypes():
        return UOp(Ops.SIN, src=(value,))
    return xsin(value.cast(dtypes.float32), fast=True).cast(value.dtype)


def _lower_reduce(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Reduce axes, but not those of one element, on which tinygrad's code generator may fail."""
    node, (value,) = scope.graph.nodes[position], operands
    dims = scope.graph.values[node.srcs[0]].dims
    assert isinstance(node.arg, tuple) and isinstance(node.arg[1], int)  # as check_graph has seen
    shape, count = value.shape, node.arg[1]
    reduced = [size for size, dim in zip(shape[:count], dims, strict=False) if dim != 1]
    if len(reduced) < count:
        value = value.reshape((*reduced, *shape[count:]))
    if not reduced:
        return value
    op = Ops[str(node.arg[0])]
    if node.dtype in INTEGERS and op is not Ops.MAX:
        return reduce_wrapped(op, value, len(reduced))
    return UOp(Ops.REDUCE, src=(value,), arg=(op, len(reduced)))


def _lower_contiguous(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    view = scope.stored[position][1]
    return view.after(view.store(operands[0]))


def _lower_lookup(scope: _Scope, position: int, operands: list[UOp]) -> UOp:
    """Sum the table's rows whose number is the index: tinygrad makes of it a guarded load.

    Of the index it is told no range, so that it never takes the guard to be superfluous.
    """
    table, index = operands
    dtype = get_tinygrad_dtype(scope.graph.nodes[position].dtype)
    length, rest, shape = table.shape[0], table.shape[1:], index.shape
    largest = int(length.vmax) if isinstance(length, UOp) else length
    iota = Tensor.arange(largest, dtype=dtypes.int32).uop._mop(Ops.SHRINK, ((0, length),))
    ones = (1,) * len(rest)
    number = iota.reshape((length, *(1,) * len(shape), *ones))
    hit = Tensor(number) == Tensor(hide_range(index).reshape((1, *shape, *ones)))
    rows = Tensor(table.reshape((length, *(1,) * len(shape), *rest)))
    zero = Tensor(UOp.const(0, dtype))
    value = hit.where(rows, zero).uop
    if length == 1:
        return value.reshape((*shape, *rest))
    return UOp(Ops.REDUCE, src=(value,), arg=(Ops.ADD, 1))


def _get_integer(node: Node) -> int:
    assert isinstance(node.arg, int)  # as check_graph has seen
    return node.arg


LOWERINGS: Final[Mapping[str, Lower]] = MappingProxyType(
    {
        **dict.fromkeys(("INPUT", "WEIGHT", "STATE"), _lower_port),
        "IOTA": _lower_iota,
        "CONST": _lower_const,
        **dict.fromkeys(("RESHAPE", "EXPAND", "PERMUTE", "PAD", "SHRINK"), _lower_movement),
        "FLIP": _lower_flip,
        "CAST": _lower_cast,
        "BITCAST": _lower_bitcast,
        **dict.fromkeys(("EXP2", "LOG2", "POW", "SQRT", "RECIPROCAL", "TRUNC"), _lower_plain),
        "SIN": _lower_sine,
        "NEG": _lower_negation,
        **dict.fromkeys(("ADD", "SUB", "MUL"), _lower_arithmetic),
        "FDIV": _lower_float_division,
        **dict.fromkeys(("MAX", "AND", "OR", "XOR", "SHR"), _lower_plain),
        **dict.fromkeys(("CDIV", "CMOD", "FLOORDIV", "FLOORMOD"), _lower_division),
        "SHL": lambda scope, position, operands: shift_left(*operands),
        **dict.fromkeys(("CMPLT", "CMPNE", "CMPEQ", "WHERE", "STACK"), _lower_plain),
        "LOOKUP": _lower_lookup,
        "REDUCE": _lower_reduce,
        "CONTIGUOUS": _lower_contiguous,
    }
)
