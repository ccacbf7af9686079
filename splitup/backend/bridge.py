"""Between a graph and tinygrad's own operations, in both directions.

``read_tensors`` turns a traced, unscheduled tinygrad graph into a ``Graph``; it opens no device, so
its result does not depend on the machine. ``write_graph`` gives the tinygrad operations of a graph
for a device. Both work on tinygrad 0.14's graph before scheduling.

Three differences are bridged. tinygrad keeps shapes as operations of their own; a node holds them
in its argument. tinygrad has "weak" Python numbers; here every value has the dtype that it is
used with. And every CONTIGUOUS becomes a buffer of its own with one kernel that fills it, whether
or not the value leaves the task: so cutting a graph there changes no kernel.

A symbol is a tinygrad variable. Where it is the leading dimension of a value in memory, rows are a
little further apart than they are long (``splitup.graph.memory.get_stride``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tinygrad.dtype import DType, InvalidType, dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp

from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.ir import (
    Arg,
    Dim,
    Dims,
    Graph,
    Node,
    Output,
    Symbol,
    Update,
    Weight,
    decode_float,
    encode_float,
)
from splitup.graph.memory import get_stride
from splitup.graph.rules import (
    ARITHMETIC,
    COMPARISONS,
    INTEGERS,
    MOVEMENT,
    Value,
    check_graph,
    round_float,
)

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
    """What a tinygrad operation stands for: INPUT, WEIGHT or STATE and its place there, or IOTA.

    Or a LOOKUP of its operands: the table and the index.
    """

    op: str
    index: int
    dtype: str
    dims: Dims
    operands: tuple[UOp, ...] = ()


def make_variable(symbol: Symbol) -> UOp:
    """Return the tinygrad variable that a symbol is."""
    return UOp.variable(symbol.name, 1, symbol.maximum)


# ---- tinygrad -> graph -------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    placeholders: Mapping[UOp, Placeholder]
    labels: Mapping[UOp, str]
    nodes: list[Node] = field(default_factory=list)
    index: dict[Node, int] = field(default_factory=dict)
    shapes: list[Dims] = field(default_factory=list)
    done: dict[tuple[UOp, str], int] = field(default_factory=dict)
    node_labels: dict[int, str] = field(default_factory=dict)

    def add(self, node: Node, shape: Dims, is_own: bool = False) -> int:
        """Return the position of ``node``, appending it unless an equal one is there.

        A node that ``is_own`` is appended all the same.
        """
        if (found := self.index.get(node)) is None or is_own:
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
) -> tuple[Graph, dict[int, str]]:
    """Return the graph that computes ``outputs`` and ``updates``, and its nodes' labels.

    ``placeholders`` says what tinygrad operations stand for; ``updates`` has one value per
    state. Values in memory with a label are each their own, equal ones too. Raises InvalidModel
    for an operation that has no place in a task.
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
        symbols=tuple(symbols),
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
    if (known := reader.placeholders.get(uop)) is not None:
        return list(zip(known.operands, (known.dtype, "int32"), strict=False))
    if uop.op is Ops.CONST or _is_view(reader, uop):
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


def _is_view(reader: _Reader, uop: UOp) -> bool:
    """Say whether an operation gives a buffer its shape: nothing reads the buffer without one."""
    known = reader.placeholders.get(uop.src[0]) if uop.op is Ops.RESHAPE else None
    return known is not None and not known.operands


def _is_weak_const(uop: UOp) -> bool:
    return uop.op is Ops.CONST and uop.dtype in _WEAK


def _read_one(reader: _Reader, uop: UOp, dtype: str, operands: list[int]) -> int:
    buffer = uop.src[0] if _is_view(reader, uop) else uop
    if (known := reader.placeholders.get(buffer)) is not None:
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
        arg = (uop.arg[0].name, int(uop.arg[1]))
    if arg == () or (uop.op is Ops.REDUCE and uop.arg[1] == 0):
        return operands[0]
    result = "bool" if uop.op.name in COMPARISONS else dtype
    node = Node(uop.op.name, result, tuple(operands), arg)
    is_own = uop.op is Ops.CONTIGUOUS and uop in reader.labels
    position = reader.add(node, shape, is_own)
    if uop in reader.labels:
        reader.node_labels[position] = reader.labels[uop]
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


# ---- graph -> tinygrad -------------------------------------------------------------------------


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
    roots: tuple[UOp, ...]  # what is to be scheduled


def write_graph(graph: Graph, device: str) -> Lowered:
    """Return tinygrad operations for ``device`` that compute a graph; raises InvalidModel."""
    checked = check_graph(graph)
    variables = {symbol.name: make_variable(symbol) for symbol in graph.symbols}

    def allocate(spec: TensorSpec | Weight | Value) -> tuple[UOp, UOp]:
        """Return a buffer and its view of the right shape."""
        dims = spec.dims if isinstance(spec, Value) else graph.get_dims(spec)
        buffer = UOp.new_buffer(device, _count_elements(spec.shape, dims), _DTYPES[spec.dtype])
        return buffer, _view(buffer, spec.shape, dims, variables)

    tables = {
        "INPUT": [allocate(spec) for spec in graph.inputs],
        "WEIGHT": [allocate(weight) for weight in graph.weights],
        "STATE": [allocate(spec) for spec in graph.states],
    }
    values: list[UOp] = []
    stored: dict[int, UOp] = {}
    for position, node in enumerate(graph.nodes):
        sources = [values[src] for src in node.srcs]
        if node.op in tables:
            assert isinstance(node.arg, int)  # check_graph has seen to it
            values.append(tables[node.op][node.arg][1])
        elif node.op == "CONTIGUOUS":
            stored[position], view = allocate(checked[position])
            values.append(view.after(view.store(sources[0])))
        elif node.op == "REDUCE":
            values.append(_write_reduce(node, sources[0], checked[node.srcs[0]].dims))
        else:
            bound = Node(node.op, node.dtype, node.srcs, _bind(node, variables))
            values.append(_WRITERS.get(node.op, _write_plain)(bound, sources))
    roots = [values[output.node] for output in graph.outputs]
    roots += [values[update.node] for update in graph.updates]
    return Lowered(
        inputs=tuple(buffer for buffer, _ in tables["INPUT"]),
        weights=tuple(buffer for buffer, _ in tables["WEIGHT"]),
        states=tuple(buffer for buffer, _ in tables["STATE"]),
        outputs=tuple(stored[output.node] for output in graph.outputs),
        updates=tuple(stored[update.node] for update in graph.updates),
        values=tuple(stored.values()),
        roots=tuple(dict.fromkeys(roots)),
    )


def _count_elements(shape: tuple[int, ...], dims: Dims) -> int:
    if dims and isinstance(dims[0], str):
        return shape[0] * get_stride(math.prod(shape[1:]))
    return math.prod(shape)


def _view(buffer: UOp, shape: tuple[int, ...], dims: Dims, variables: Mapping[str, UOp]) -> UOp:
    """Return the rows in use of a buffer for a value of these largest and actual dimensions."""
    bound = tuple(variables[size] if isinstance(size, str) else size for size in dims)
    if dims and isinstance(dims[0], str):
        length = math.prod(shape[1:])
        rows = buffer.reshape((shape[0], get_stride(length)))
        rows = rows._mop(Ops.SHRINK, ((0, bound[0]), (0, length)))
        return rows.reshape((bound[0], *shape[1:]))
    view = buffer.reshape(shape)
    if bound == shape:
        return view
    return view._mop(Ops.SHRINK, tuple((0, size) for size in bound))


def _bind(node: Node, variables: Mapping[str, UOp]) -> Any:
    """Return a movement's argument with variables in place of symbols."""
    if node.op not in MOVEMENT or not variables:
        return node.arg
    assert isinstance(node.arg, tuple)  # check_graph has seen to it

    def bind(size: Dim) -> Any:
        return variables[size] if isinstance(size, str) else size

    return tuple(
        (item[0], bind(item[1])) if isinstance(item, tuple) else bind(item) for item in node.arg
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


def _write_reduce(node: Node, value: UOp, dims: Dims) -> UOp:
    """Fold axes, but not those of one element, on which tinygrad's code generator may fail."""
    assert isinstance(node.arg, tuple) and isinstance(node.arg[1], int)  # as check_graph has seen
    shape, count = value.shape, node.arg[1]
    folded = [size for size, dim in zip(shape[:count], dims, strict=False) if dim != 1]
    if len(folded) < count:
        value = value.reshape((*folded, *shape[count:]))
    if not folded:
        return value
    return UOp(Ops.REDUCE, src=(value,), arg=(Ops[str(node.arg[0])], len(folded)))


def _write_conversion(node: Node, sources: list[UOp]) -> UOp:
    return UOp(Ops[node.op], src=(sources[0],), arg=_DTYPES[node.dtype])


def _write_iota(node: Node, sources: list[UOp]) -> UOp:
    assert isinstance(node.arg, int)  # check_graph has seen to it
    return Tensor.arange(node.arg, dtype=dtypes.int32).uop


def _write_lookup(node: Node, sources: list[UOp]) -> UOp:
    """Add up the table's rows where their number is the index: tinygrad makes it a guarded load."""
    table, index = sources
    length, rest, shape = table.shape[0], table.shape[1:], index.shape
    largest = int(length.vmax) if isinstance(length, UOp) else length
    iota = Tensor.arange(largest, dtype=dtypes.int32).uop._mop(Ops.SHRINK, ((0, length),))
    ones = (1,) * len(rest)
    number = iota.reshape((length, *(1,) * len(shape), *ones))
    hit = Tensor(number) == Tensor(index.reshape((1, *shape, *ones)))
    rows = Tensor(table.reshape((length, *(1,) * len(shape), *rest)))
    zero = Tensor(UOp.const(0, _DTYPES[node.dtype]))
    value = hit.where(rows, zero).uop
    if length == 1:
        return value.reshape((*shape, *rest))
    return UOp(Ops.REDUCE, src=(value,), arg=(Ops.ADD, 1))


_WRITERS: Final[dict[str, Callable[[Node, list[UOp]], UOp]]] = {
    "CONST": _write_const,
    "IOTA": _write_iota,
    "LOOKUP": _write_lookup,
    "CAST": _write_conversion,
    "BITCAST": _write_conversion,
    **dict.fromkeys(MOVEMENT, _write_movement),
}
