"""Between a graph and tinygrad's own operations, in both directions.

``read_tensors`` turns a traced, unscheduled tinygrad graph into a ``Graph``; it opens no device, so
its result does not depend on the machine. ``write_graph`` gives the tinygrad operations of a graph
for a device. Both work on tinygrad 0.14's graph before scheduling.

Three differences are bridged. tinygrad keeps shapes as operations of their own; a node holds them
in its argument. tinygrad has "weak" Python numbers; here every value has the dtype that it is
used with. And every CONTIGUOUS becomes a buffer of its own with one kernel that fills it, whether
or not the value leaves the task: so cutting a graph there changes no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tinygrad.dtype import DType, InvalidType, dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp

from splitup.errors import InvalidModel
from splitup.graph.ir import Arg, Graph, Node, Output, Update, Weight, decode_float, encode_float
from splitup.graph.rules import ARITHMETIC, COMPARISONS, INTEGERS, MOVEMENT, round_float
from splitup.tensors import ITEM_BYTES, TensorSpec

TINYGRAD_VERSION: Final = "0.14.0"

_DTYPES: Final[dict[str, DType]] = {name: getattr(dtypes, name) for name in ITEM_BYTES}
_NAMES: Final[dict[DType, str]] = {dtype: name for name, dtype in _DTYPES.items()}
_WEAK: Final[dict[DType, str]] = {dtypes.weakint: "int32", dtypes.weakfloat: "float32"}
_TRANSPARENT: Final = frozenset({Ops.DETACH, Ops.CONTIGUOUS_BACKWARD})


def get_tinygrad_dtype(name: str) -> DType:
    """Return tinygrad's dtype of this name."""
    return _DTYPES[name]


def get_dtype_name(dtype: DType) -> str:
    """Return the name of a tinygrad dtype; raises InvalidModel when tasks do not support it."""
    return _concrete(dtype)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What a tinygrad BUFFER stands for: INPUT, WEIGHT or STATE and its place there, or IOTA."""

    op: str
    index: int
    dtype: str
    shape: tuple[int, ...]


# ---- tinygrad -> graph -------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    placeholders: Mapping[UOp, Placeholder]
    labels: Mapping[UOp, str]
    nodes: list[Node] = field(default_factory=list)
    index: dict[Node, int] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    done: dict[tuple[UOp, str], int] = field(default_factory=dict)
    node_labels: dict[int, str] = field(default_factory=dict)

    def add(self, node: Node, shape: tuple[int, ...]) -> int:
        """Return the position of ``node``, appending it unless an equal one is there."""
        if (found := self.index.get(node)) is None:
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
) -> tuple[Graph, dict[int, str]]:
    """Return the graph that computes ``outputs`` and ``updates``, and its nodes' labels.

    ``placeholders`` says what each tinygrad BUFFER stands for; ``updates`` has one value per
    state. Raises InvalidModel for an operation that has no place in a task.
    """
    reader = _Reader(placeholders, labels)
    results = [_read(reader, uop) for _, uop in outputs]
    new_states = [_read(reader, uop) for uop in updates]
    graph = Graph(
        inputs=tuple(inputs),
        weights=tuple(weights),
        states=tuple(states),
        nodes=tuple(reader.nodes),
        outputs=tuple(Output(name, node) for (name, _), node in zip(outputs, results, strict=True)),
        updates=tuple(Update(state, node) for state, node in enumerate(new_states)),
    )
    return graph, reader.node_labels


def _read(reader: _Reader, root: UOp) -> int:
    """Read everything below ``root``, operands first, without recursion."""
    top = (root, _concrete(root.dtype))
    pending: list[tuple[UOp, str]] = [top]
    while pending:
        key = pending[-1]
        if key in reader.done:
            pending.pop()
            continue
        operands = _list_operands(reader, *key)
        missing = [operand for operand in operands if operand not in reader.done]
        if missing:
            pending.extend(reversed(missing))
            continue
        reader.done[key] = _read_one(reader, *key, [reader.done[item] for item in operands])
        pending.pop()
    return reader.done[top]


def _concrete(dtype: DType) -> str:
    if dtype in _WEAK:
        return _WEAK[dtype]
    if dtype not in _NAMES:
        raise InvalidModel(f"the traced graph uses dtype {dtype}, which tasks do not support")
    return _NAMES[dtype]


def _list_operands(reader: _Reader, uop: UOp, dtype: str) -> list[tuple[UOp, str]]:
    """Return the operands to read first, each with the dtype that it is to have."""
    if uop in reader.placeholders or uop.op is Ops.CONST:
        return []
    if uop.op in _TRANSPARENT or uop.op.name in MOVEMENT or uop.op in (Ops.REDUCE, Ops.CONTIGUOUS):
        return [(uop.src[0], dtype)]
    if uop.op in (Ops.CAST, Ops.BITCAST):
        if _is_weak_const(uop.src[0]):
            return []  # a number of any size; it is read as a constant of the result's dtype
        return [(uop.src[0], _concrete(uop.src[0].dtype))]
    if uop.op.name in COMPARISONS:
        strong = [src.dtype for src in uop.src if src.dtype not in _WEAK]
        wanted = _concrete(strong[0] if strong else max(src.dtype for src in uop.src))
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


def _is_weak_const(uop: UOp) -> bool:
    return uop.op is Ops.CONST and uop.dtype in _WEAK


def _read_one(reader: _Reader, uop: UOp, dtype: str, operands: list[int]) -> int:
    if (known := reader.placeholders.get(uop)) is not None:
        position = reader.add(Node(known.op, known.dtype, (), known.index), known.shape)
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
    arg: Arg = None
    if uop.op is Ops.EXPAND:
        arg = tuple(int(size) for size in uop.marg)
    elif uop.op in (Ops.PAD, Ops.SHRINK):
        arg = tuple((int(offset), int(size)) for offset, size in uop.marg)
    elif uop.op in (Ops.PERMUTE, Ops.FLIP):
        arg = tuple(int(item) for item in uop.marg)
    elif uop.op is Ops.REDUCE:
        arg = (uop.arg[0].name, int(uop.arg[1]))
    if arg == () or (uop.op is Ops.REDUCE and uop.arg[1] == 0):
        return operands[0]
    result = "bool" if uop.op.name in COMPARISONS else dtype
    position = reader.add(Node(uop.op.name, result, tuple(operands), arg), shape)
    if uop in reader.labels:
        reader.node_labels[position] = reader.labels[uop]
    return position


def _reshape(reader: _Reader, operand: int, shape: tuple[int, ...]) -> int:
    """Reshape once, and only where the shape changes: tracing leaves chains of RESHAPE behind."""
    while reader.nodes[operand].op == "RESHAPE":
        operand = reader.nodes[operand].srcs[0]
    if reader.shapes[operand] == shape:
        return operand
    node = reader.nodes[operand]
    return reader.add(Node("RESHAPE", node.dtype, (operand,), shape), shape)


def _get_shape(uop: UOp) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in uop.shape):
        raise InvalidModel(f"the traced graph has a symbolic shape at {uop.op.name}: use integers")
    return tuple(int(size) for size in uop.shape)


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


# ---- graph -> tinygrad -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph's tinygrad operations. Every buffer is a BUFFER operation of one axis."""

    inputs: tuple[UOp, ...]
    weights: tuple[UOp, ...]
    states: tuple[UOp, ...]
    outputs: tuple[UOp, ...]  # the buffer that holds each output after the step
    updates: tuple[UOp, ...]  # the buffer that holds each state's new value
    roots: tuple[UOp, ...]  # what is to be scheduled


def write_graph(graph: Graph, device: str) -> Lowered:
    """Return tinygrad operations for ``device`` that compute a graph; it has been checked."""

    def allocate(spec: TensorSpec | Weight) -> UOp:
        size = 1
        for length in spec.shape:
            size *= length
        return UOp.new_buffer(device, size, _DTYPES[spec.dtype])

    tables = {
        "INPUT": [allocate(spec) for spec in graph.inputs],
        "WEIGHT": [allocate(weight) for weight in graph.weights],
        "STATE": [allocate(spec) for spec in graph.states],
    }
    specs: dict[str, Sequence[TensorSpec | Weight]] = {
        "INPUT": graph.inputs,
        "WEIGHT": graph.weights,
        "STATE": graph.states,
    }
    values: list[UOp] = []
    stored: dict[int, UOp] = {}
    for position, node in enumerate(graph.nodes):
        sources = [values[src] for src in node.srcs]
        if node.op in tables:
            assert isinstance(node.arg, int)  # check_graph has seen to it
            values.append(tables[node.op][node.arg].reshape(specs[node.op][node.arg].shape))
        elif node.op == "CONTIGUOUS":
            value = sources[0]
            size = 1
            for length in value.shape:
                size *= length
            stored[position] = buffer = UOp.new_buffer(device, size, _DTYPES[node.dtype])
            view = buffer.reshape(value.shape)
            values.append(view.after(view.store(value)))
        else:
            values.append(_WRITERS.get(node.op, _write_plain)(node, sources))
    roots = [values[output.node] for output in graph.outputs]
    roots += [values[update.node] for update in graph.updates]
    return Lowered(
        inputs=tuple(tables["INPUT"]),
        weights=tuple(tables["WEIGHT"]),
        states=tuple(tables["STATE"]),
        outputs=tuple(stored[output.node] for output in graph.outputs),
        updates=tuple(stored[update.node] for update in graph.updates),
        roots=tuple(dict.fromkeys(roots)),
    )


def _write_plain(node: Node, sources: list[UOp]) -> UOp:
    return UOp(Ops[node.op], src=tuple(sources))


def _write_const(node: Node, sources: list[UOp]) -> UOp:
    text = str(node.arg)
    value: float | int | bool
    if node.dtype == "bool":
        value = text == "1"
    elif node.dtype in INTEGERS:
        value = int(text)
    else:
        value = decode_float(text)
    return UOp.const(value, _DTYPES[node.dtype])


def _write_movement(node: Node, sources: list[UOp]) -> UOp:
    arg = node.arg
    if node.op == "FLIP":
        assert isinstance(arg, tuple)  # check_graph has seen to it
        arg = tuple(bool(item) for item in arg)
    return sources[0]._mop(Ops[node.op], arg)


def _write_reduce(node: Node, sources: list[UOp]) -> UOp:
    """Fold axes, but not those of one element, on which tinygrad's code generator may fail."""
    assert isinstance(node.arg, tuple) and isinstance(node.arg[1], int)  # as check_graph has seen
    shape, count = sources[0].shape, node.arg[1]
    folded = tuple(size for size in shape[:count] if size != 1)
    value = sources[0].reshape((*folded, *shape[count:])) if len(folded) < count else sources[0]
    if not folded:
        return value
    return UOp(Ops.REDUCE, src=(value,), arg=(Ops[str(node.arg[0])], len(folded)))


def _write_conversion(node: Node, sources: list[UOp]) -> UOp:
    return UOp(Ops[node.op], src=(sources[0],), arg=_DTYPES[node.dtype])


def _write_iota(node: Node, sources: list[UOp]) -> UOp:
    assert isinstance(node.arg, int)  # check_graph has seen to it
    return Tensor.arange(node.arg, dtype=dtypes.int32).uop


_WRITERS: Final[dict[str, Callable[[Node, list[UOp]], UOp]]] = {
    "CONST": _write_const,
    "IOTA": _write_iota,
    "REDUCE": _write_reduce,
    "CAST": _write_conversion,
    "BITCAST": _write_conversion,
    **dict.fromkeys(MOVEMENT, _write_movement),
}
