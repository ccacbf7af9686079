"""A traced tinygrad graph, before it is scheduled, as a ``Graph``.

It opens no device, so its result does not depend on the machine. Two differences are bridged:
tinygrad keeps shapes as operations of their own, a node holds them in its argument; and tinygrad
has "weak" Python numbers, while here every value has the dtype that it is used with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tinygrad.dtype import InvalidType
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.tinygrad_types import WEAK_DTYPES, get_dtype_name
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.dtypes import INTEGERS, round_float
from splitup.graph.ir import (
    Arg,
    Dim,
    Dims,
    Graph,
    GraphOutput,
    Node,
    Symbol,
    Update,
    Weight,
    encode_float,
)
from splitup.graph.operations.table import ARITHMETIC, COMPARISONS, MOVEMENT

_TRANSPARENT: Final = frozenset({Ops.DETACH, Ops.CONTIGUOUS_BACKWARD})
_UNARY: Final = MOVEMENT | {"REDUCE", "CONTIGUOUS"}  # their one operand has the result's dtype


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The node that a tinygrad operation stands for.

    An INPUT, WEIGHT or STATE with its position, an IOTA with its length, or a LOOKUP with its
    operands, the table and the index.
    """

    op: str
    index: int
    dtype: str
    dims: Dims
    operands: tuple[UOp, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    """A part of the traced function that is read once more, with other operands.

    Where the part reads ``source``, the repetition reads ``operand``. ``placeholders`` say what
    operations of the part stand for in the repetition, where that differs. ``rename`` takes a label
    of the part and returns the repetition's.
    """

    source: UOp
    operand: UOp
    placeholders: Mapping[UOp, Placeholder]
    rename: Callable[[str], str]


# An operation, the dtype that its value is to have, and the repetition in which it is read.
_Key = tuple[UOp, str, Repetition | None]


@dataclass(slots=True)
class _Reader:
    placeholders: Mapping[UOp, Placeholder]
    labels: Mapping[UOp, str]
    repeated: Mapping[UOp, tuple[UOp, Repetition]]
    nodes: list[Node] = field(default_factory=list)
    index: dict[Node, int] = field(default_factory=dict)
    shapes: list[Dims] = field(default_factory=list)
    done: dict[_Key, int] = field(default_factory=dict)
    node_labels: dict[int, str] = field(default_factory=dict)

    def add(self, node: Node, shape: Dims, is_separate: bool = False) -> int:
        """Return the position of ``node``, appending it unless an equal one is there.

        A node that ``is_separate`` is always appended.
        """
        if (found := self.index.get(node)) is None or is_separate:
            found = self.index[node] = len(self.nodes)
            self.nodes.append(node)
            self.shapes.append(shape)
        return found


def read_tensors(
    *,
    inputs: Sequence[TensorSpec],
    weights: Sequence[Weight],
    states: Sequence[TensorSpec],
    placeholders: Mapping[UOp, Placeholder],
    labels: Mapping[UOp, str],
    outputs: Sequence[tuple[str, UOp]],
    updates: Sequence[UOp],
    symbols: Sequence[Symbol] = (),
    repeated: Mapping[UOp, tuple[UOp, Repetition]] | None = None,
) -> tuple[Graph, dict[int, str]]:
    """Return the graph that computes ``outputs`` and ``updates``, and its nodes' labels.

    ``placeholders`` says what tinygrad operations stand for; ``updates`` has one value per
    state. An operation in ``repeated`` stands for another one, read in a repetition. Equal values
    in memory are one node, unless they have a label. Raises InvalidModel for an operation that a
    graph cannot hold.
    """
    reader = _Reader(placeholders, labels, repeated or {})
    results = [_read(reader, uop) for _, uop in outputs]
    new_states = [_read(reader, uop) for uop in updates]
    graph = Graph(
        inputs=tuple(inputs),
        weights=tuple(weights),
        states=tuple(states),
        nodes=tuple(reader.nodes),
        outputs=tuple(
            GraphOutput(name, node) for (name, _), node in zip(outputs, results, strict=True)
        ),
        updates=tuple(Update(state, node) for state, node in enumerate(new_states)),
        symbols=tuple(symbols),
    )
    return graph, reader.node_labels


def _read(reader: _Reader, root: UOp) -> int:
    """Read everything below ``root``, operands first, without recursion."""
    top = _find_key(reader, root, get_dtype_name(root.dtype), None)
    pending = [top]
    while pending:
        key = pending[-1]
        if key in reader.done:
            pending.pop()
            continue
        operands = [_find_key(reader, *item, key[2]) for item in _list_operands(reader, *key)]
        missing = [operand for operand in operands if operand not in reader.done]
        if missing:
            pending.extend(reversed(missing))
            continue
        reader.done[key] = _read_one(reader, *key, [reader.done[item] for item in operands])
        pending.pop()
    return reader.done[top]


def _find_key(reader: _Reader, uop: UOp, dtype: str, within: Repetition | None) -> _Key:
    """Return what is read for an operation: itself, or what it stands for in a repetition."""
    while True:
        if within is not None and uop is within.source:
            uop, within = within.operand, None
        elif within is None and uop in reader.repeated:
            uop, within = reader.repeated[uop]
        else:
            return uop, dtype, within


def _list_operands(
    reader: _Reader, uop: UOp, dtype: str, within: Repetition | None
) -> list[tuple[UOp, str]]:
    """Return the operands to read first, each with the dtype that it is to have."""
    if (known := _find_placeholder(reader, uop, within)) is not None:
        return list(zip(known.operands, (known.dtype, "int32"), strict=False))
    if uop.op is Ops.CONST:
        return []
    if uop.op in _TRANSPARENT or uop.op.name in _UNARY:
        return [(uop.src[0], dtype)]
    if uop.op in (Ops.CAST, Ops.BITCAST):
        if uop.src[0].op is Ops.CONST and uop.src[0].dtype in WEAK_DTYPES:
            return []  # a number of any size; it is read as a constant of the result's dtype
        return [(uop.src[0], get_dtype_name(uop.src[0].dtype))]
    if uop.op.name in COMPARISONS:
        strong = [src.dtype for src in uop.src if src.dtype not in WEAK_DTYPES]
        wanted = get_dtype_name(strong[0] if strong else max(src.dtype for src in uop.src))
        return [(src, wanted) for src in uop.src]
    if uop.op is Ops.WHERE:
        return [(uop.src[0], "bool"), *((src, dtype) for src in uop.src[1:])]
    if uop.op.name in ARITHMETIC or uop.op is Ops.STACK:
        return [(src, dtype) for src in uop.src]
    if uop.op is Ops.BUFFER:
        raise InvalidModel(
            "the traced graph reads a tensor that is neither an input, a weight nor a state: "
            "realize weights before the function is traced, or build them in the function"
        )
    raise InvalidModel(f"the traced graph uses {uop.op.name}, which tasks do not support")


def _find_placeholder(reader: _Reader, uop: UOp, within: Repetition | None) -> Placeholder | None:
    """Return what an operation stands for, perhaps as the shape of a buffer that has none."""
    for one in (uop, uop.src[0]) if uop.op is Ops.RESHAPE else (uop,):
        if within is not None and one in within.placeholders:
            return within.placeholders[one]
        if one in reader.placeholders:
            return reader.placeholders[one]
    return None


def _read_one(
    reader: _Reader, uop: UOp, dtype: str, within: Repetition | None, operands: list[int]
) -> int:
    if (known := _find_placeholder(reader, uop, within)) is not None:
        arg: Arg = None if known.operands else known.index
        position = reader.add(Node(known.op, known.dtype, tuple(operands), arg), known.dims)
        return _reshape(reader, position, _get_shape(uop))
    if uop.op is Ops.CONST:
        return reader.add(Node("CONST", dtype, (), _encode_const(uop.arg, dtype)), ())
    if uop.op in _TRANSPARENT or (uop.op is Ops.TRUNC and dtype in INTEGERS):
        return operands[0]
    shape = _get_shape(uop)
    if uop.op in (Ops.CAST, Ops.BITCAST):
        if not operands:
            const = _encode_const(uop.src[0].arg, dtype)
            return reader.add(Node("CONST", dtype, (), const), ())
        if reader.nodes[operands[0]].dtype == dtype:
            return operands[0]
        return reader.add(Node(uop.op.name, dtype, (operands[0],)), shape)
    if uop.op is Ops.RESHAPE:
        return _reshape(reader, operands[0], shape)
    arg = None
    if uop.op is Ops.EXPAND:
        arg = tuple(_get_dim(size, uop.op) for size in uop.marg)
    elif uop.op in (Ops.PAD, Ops.SHRINK):
        arg = tuple((int(offset), _get_dim(size, uop.op)) for offset, size in uop.marg)
    elif uop.op in (Ops.PERMUTE, Ops.FLIP):
        arg = tuple(int(item) for item in uop.marg)
    elif uop.op is Ops.REDUCE:
        is_any = dtype == "bool" and uop.arg[0] is Ops.ADD  # what the sum of booleans is
        arg = ("MAX" if is_any else uop.arg[0].name, int(uop.arg[1]))
    if arg == () or (uop.op is Ops.REDUCE and uop.arg[1] == 0):
        return operands[0]
    result = "bool" if uop.op.name in COMPARISONS else dtype
    node = Node(uop.op.name, result, tuple(operands), arg)
    is_separate = uop.op is Ops.CONTIGUOUS and uop in reader.labels
    position = reader.add(node, shape, is_separate)
    if (label := reader.labels.get(uop)) is not None:
        reader.node_labels[position] = label if within is None else within.rename(label)
    return position


def _reshape(reader: _Reader, operand: int, shape: Dims) -> int:
    """Reshape once, and only where the shape changes: tracing leaves chains of RESHAPE behind."""
    while reader.nodes[operand].op == "RESHAPE":
        operand = reader.nodes[operand].srcs[0]
    if reader.shapes[operand] == shape:
        return operand
    node = reader.nodes[operand]
    return reader.add(Node("RESHAPE", node.dtype, (operand,), shape), shape)


def _get_shape(uop: UOp) -> Dims:
    return tuple(_get_dim(size, uop.op) for size in uop.shape)


def _get_dim(size: Any, op: Ops) -> Dim:
    if isinstance(size, UOp) and size.is_variable:
        return str(size.expr)
    if not isinstance(size, int):
        raise InvalidModel(f"the traced graph computes with a symbolic shape at {op.name}")
    return int(size)


def _encode_const(value: Any, dtype: str) -> str:
    if isinstance(value, InvalidType):
        raise InvalidModel("the traced graph holds an undefined value")
    if dtype == "bool":
        return "1" if value else "0"
    if dtype in INTEGERS:
        bits = 8 * ITEM_BYTES[dtype]
        wrapped = int(value) % 2**bits
        if dtype[0] != "u" and wrapped >= 2 ** (bits - 1):
            wrapped -= 2**bits
        return str(wrapped)
    return encode_float(round_float(float(value), dtype))
