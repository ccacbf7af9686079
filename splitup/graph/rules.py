"""What a legal graph is. The compiler checks after every pass, a node before it compiles anything.

The graph may come from anybody. Everything here is linear in its size, allocates nothing that
grows with a shape, and does not recurse. The rules in order, cheapest first:

    ports       names, dtypes, shapes and digests of inputs, weights, states, outputs, updates;
                every symbol leads an input, which binds it
    op          only the operations of the allow-list
    arity       as many operands as the operation takes, all of them earlier nodes
    dtype       operands and result have dtypes that the operation is defined for
    argument    of the form the operation wants
    shape       recomputed from the operands: no index can leave its operand
    const       representable in its dtype, written in one way
    division    integers are divided by positive constants only, shifted by less than their width
    size        rank, dimensions, elements; bytes of what is written to memory. A symbol counts
                as its maximum
    depth       of the chain of operands, and of the part of it that becomes one kernel
    cost        operations per step
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec, get_numpy_dtype
from splitup.graph.ir import (
    Arg,
    Dim,
    Dims,
    Graph,
    Node,
    Weight,
    decode_float,
    encode_float,
    parse_graph,
)

FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGERS: Final = frozenset(
    {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"}
)
NUMBERS: Final = FLOATS | INTEGERS
ANY: Final = NUMBERS | {"bool"}

PARAMS: Final = frozenset({"INPUT", "WEIGHT", "STATE"})
SOURCES: Final = PARAMS | {"IOTA", "CONST"}
MOVEMENT: Final = frozenset({"RESHAPE", "EXPAND", "PERMUTE", "PAD", "SHRINK", "FLIP"})
COMPARISONS: Final = frozenset({"CMPLT", "CMPNE", "CMPEQ"})
DIVISIONS: Final = frozenset({"CDIV", "CMOD", "FLOORDIV", "FLOORMOD"})
SHIFTS: Final = frozenset({"SHL", "SHR"})
CONVERSIONS: Final = frozenset({"CAST", "BITCAST"})
# arithmetic: operands, and the dtypes that these may have
ARITHMETIC: Final[dict[str, tuple[int, frozenset[str]]]] = {
    **dict.fromkeys(("EXP2", "LOG2", "SIN", "SQRT", "RECIPROCAL", "TRUNC"), (1, FLOATS)),
    "NEG": (1, NUMBERS),
    **dict.fromkeys(("ADD", "MUL", "MAX", *COMPARISONS), (2, ANY)),
    "SUB": (2, NUMBERS),
    **dict.fromkeys(("FDIV", "POW"), (2, FLOATS)),
    **dict.fromkeys(("AND", "OR", "XOR"), (2, INTEGERS | {"bool"})),
    **dict.fromkeys((*DIVISIONS, *SHIFTS), (2, INTEGERS)),
    "WHERE": (3, ANY),
}
OPERATIONS: Final = (
    SOURCES
    | MOVEMENT
    | CONVERSIONS
    | frozenset(ARITHMETIC)
    | {"LOOKUP", "STACK", "REDUCE", "CONTIGUOUS"}
)
REDUCTIONS: Final = frozenset({"ADD", "MUL", "MAX"})

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FLOAT = re.compile(r"[0-9a-f]{16}")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_SYMBOL = re.compile(r"[A-Z]{1,8}")
_NAME = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_NAME_CHARS}}}")


_Inferred = tuple[str, Dims, int]  # dtype, dimensions, operations


@dataclass(frozen=True, slots=True)
class Value:
    """What a node gives: ``operations`` is the arithmetic it takes to compute it once.

    ``dims`` are its dimensions with symbols by name; in ``shape``, and in all that is counted from
    it, they have their maxima.
    """

    dtype: str
    shape: tuple[int, ...]
    operations: int
    dims: Dims

    @property
    def nbytes(self) -> int:
        """Bytes, were it written to memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> str:
        """Return the symbol that the leading dimension is, or ""."""
        return self.dims[0] if self.dims and isinstance(self.dims[0], str) else ""

    def make_spec(self, name: str) -> TensorSpec:
        """Return a port of this value."""
        return TensorSpec(name, self.dtype, self.shape, self.rows)


def load_graph(data: bytes | memoryview) -> Graph:
    """Return the graph in ``data``; raises InvalidModel unless it is canonical and legal."""
    graph = parse_graph(data)
    check_graph(graph)
    return graph


def check_graph(graph: Graph) -> tuple[Value, ...]:
    """Return every node's dtype, shape and cost; raises InvalidModel naming node and rule."""
    _check_tables(graph)
    maxima = {symbol.name: symbol.maximum for symbol in graph.symbols}
    values: list[Value] = []
    depths: list[int] = []
    chains: list[int] = []
    operations = 0
    for index, node in enumerate(graph.nodes):
        try:
            _check_operands(node, index)
            sources = [values[src] for src in node.srcs]
            dtype, dims, work = _infer(graph, node, sources, maxima)
            value = Value(dtype, _resolve(dims, maxima), work, dims)
            _check_value(node, value)
        except _Broken as broken:
            name = node.op if node.op in OPERATIONS else repr(node.op[:40])
            raise InvalidModel(
                f"node {index} ({name}) breaks the rule '{broken.rule}': {broken}"
            ) from None
        values.append(value)
        depths.append(1 + max((depths[src] for src in node.srcs), default=0))
        operations += value.operations
        chains.append(compute_chain(node, chains))
        if depths[-1] > limits.MAX_GRAPH_DEPTH or chains[-1] > limits.MAX_KERNEL_DEPTH:
            raise InvalidModel(
                f"node {index} ({node.op}) breaks the rule 'depth': it ends a chain of more than "
                f"{limits.MAX_GRAPH_DEPTH} operations, or {limits.MAX_KERNEL_DEPTH} since memory"
            )
        if operations > limits.MAX_TASK_FLOPS:
            raise InvalidModel(
                f"node {index} ({node.op}) breaks the rule 'cost': "
                f"one step takes more than {limits.MAX_TASK_FLOPS} operations"
            )
    _check_results(graph, values)
    return tuple(values)


def compute_chain(node: Node, chains: Sequence[int]) -> int:
    """Return how many operations a node's value is from the last values in memory.

    ``chains`` holds the numbers of earlier nodes. Code generators take time beyond proportion for
    long chains, because they make one kernel of each.
    """
    if node.op == "CONTIGUOUS" or not node.srcs:
        return 0
    return max(chains[src] for src in node.srcs) + (node.op not in MOVEMENT)


class _Broken(Exception):
    def __init__(self, rule: str, problem: str) -> None:
        super().__init__(problem)
        self.rule = rule


def _require(condition: bool, rule: str, problem: str) -> None:
    if not condition:
        raise _Broken(rule, problem)


def _check_tables(graph: Graph) -> None:
    _ports(len(graph.nodes) <= limits.MAX_GRAPH_NODES, f"more than {limits.MAX_GRAPH_NODES} nodes")
    _ports(len(graph.weights) <= limits.MAX_WEIGHTS, f"more than {limits.MAX_WEIGHTS} weights")
    _check_symbols(graph)
    specs = [weight.spec for weight in graph.weights]
    for what, table in (("input", graph.inputs), ("weight", specs), ("state", graph.states)):
        _ports(what == "weight" or len(table) <= limits.MAX_PORTS, f"too many {what}s")
        _ports(len({spec.name for spec in table}) == len(table), f"an {what} name occurs twice")
        for spec in table:
            _check_spec(what, spec)
    for weight in graph.weights:
        _ports(bool(_DIGEST.fullmatch(weight.digest)), f"weight '{weight.name}' has no digest")
    names = [output.name for output in graph.outputs]
    _ports(1 <= len(names) <= limits.MAX_PORTS, f"{len(names)} outputs")
    _ports(len(set(names)) == len(names), "an output name occurs twice")
    _ports(all(_NAME.fullmatch(name) for name in names), "an output has an illegal name")


def _check_symbols(graph: Graph) -> None:
    _ports(len(graph.symbols) <= limits.MAX_SYMBOLS, f"more than {limits.MAX_SYMBOLS} symbols")
    maxima = {symbol.name: symbol.maximum for symbol in graph.symbols}
    _ports(len(maxima) == len(graph.symbols), "a symbol's name occurs twice")
    for name, maximum in maxima.items():
        _ports(bool(_SYMBOL.fullmatch(name)), "a symbol has an illegal name")
        _ports(2 <= maximum <= limits.MAX_DIMENSION, f"symbol '{name}' has an impossible maximum")
    bound = {spec.rows for spec in graph.inputs if spec.rows}
    _ports(bound == set(maxima), "the symbols are not those that inputs bind")
    for spec in graph.inputs:
        _ports(
            not spec.rows or spec.shape[:1] == (maxima[spec.rows],),
            f"input '{spec.name}' has another size than its symbol's maximum",
        )
    _ports(all(not spec.rows for spec in graph.states), "a state has a symbol")


def _resolve(dims: Dims, maxima: Mapping[str, int]) -> tuple[int, ...]:
    """Return the largest shape that these dimensions may have."""
    return tuple(maxima[size] if isinstance(size, str) else size for size in dims)


def _check_spec(what: str, spec: TensorSpec) -> None:
    _ports(bool(_NAME.fullmatch(spec.name)), f"an {what} has an illegal name")
    _ports(spec.dtype in ITEM_BYTES, f"{what} '{spec.name}' has an unknown dtype")
    _ports(
        len(spec.shape) <= limits.MAX_RANK
        and all(1 <= size <= limits.MAX_DIMENSION for size in spec.shape)
        and spec.nbytes <= limits.MAX_VALUE_BYTES,
        f"{what} '{spec.name}' has an impossible shape",
    )


def _ports(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidModel(f"the graph breaks the rule 'ports': {problem}")


def _check_results(graph: Graph, values: list[Value]) -> None:
    """Check that outputs and updates are values in memory and that every state has one update."""
    for kind, name, node in [
        *(("output", output.name, output.node) for output in graph.outputs),
        *(("update", str(update.state), update.node) for update in graph.updates),
    ]:
        _ports(0 <= node < len(values), f"{kind} '{name}' names a node that does not exist")
        _ports(graph.nodes[node].op == "CONTIGUOUS", f"{kind} '{name}' is no CONTIGUOUS value")
    for results in (graph.outputs, graph.updates):
        nodes = [result.node for result in results]
        _ports(len(set(nodes)) == len(nodes), "one value is given twice")
    _ports(
        [update.state for update in graph.updates] == list(range(len(graph.states))),
        "the updates are not one per state, in order",
    )
    for update, state in zip(graph.updates, graph.states, strict=True):
        value = values[update.node]
        _ports(
            (value.dtype, value.dims) == (state.dtype, state.shape),
            f"state '{state.name}' is updated with another dtype or shape",
        )
    for output in graph.outputs:
        _ports(
            all(type(size) is int for size in values[output.node].dims[1:]),
            f"output '{output.name}' has a symbol that is not in front",
        )


def _check_operands(node: Node, index: int) -> None:
    _require(node.op in OPERATIONS, "op", "it is not on the list of allowed operations")
    if node.op == "STACK":
        count = min(max(len(node.srcs), 1), limits.MAX_PORTS)
    elif node.op in SOURCES:
        count = 0
    elif node.op in ARITHMETIC:
        count = ARITHMETIC[node.op][0]
    else:
        count = 2 if node.op == "LOOKUP" else 1
    _require(len(node.srcs) == count, "arity", f"it takes {count} operands, not {len(node.srcs)}")
    _require(all(0 <= src < index for src in node.srcs), "arity", "an operand is no earlier node")
    _require(node.dtype in ITEM_BYTES, "dtype", f"unknown dtype {node.dtype!r:.40}")


def _infer(graph: Graph, node: Node, sources: list[Value], maxima: Mapping[str, int]) -> _Inferred:
    """Return a node's dtype, dimensions and operations."""
    if node.op in PARAMS:
        return _infer_param(graph, node)
    if node.op == "IOTA":
        _require(
            type(node.arg) is int and 1 <= node.arg <= limits.MAX_DIMENSION,
            "argument",
            "it wants a length",
        )
        assert isinstance(node.arg, int)  # for the type checker
        return "int32", (node.arg,), 0
    if node.op == "CONST":
        _check_const(graph, node)
        return node.dtype, (), 0
    source = sources[0]
    if node.op in MOVEMENT:
        return source.dtype, _infer_movement(node.op, node.arg, source.dims, maxima), 0
    if node.op == "REDUCE":
        return _infer_reduce(node, source)
    _require(node.arg is None, "argument", "it takes none")
    if node.op == "LOOKUP":
        _require(sources[1].dtype == "int32", "dtype", "its index is not int32")
        _require(len(source.dims) >= 1, "shape", "its table has no axis")
        dims = sources[1].dims + source.dims[1:]
        _require(len(dims) <= limits.MAX_RANK, "size", f"more than {limits.MAX_RANK} axes")
        return source.dtype, dims, math.prod(_resolve(dims, maxima))
    if node.op == "STACK":
        _require(
            all((s.dtype, s.dims) == (source.dtype, source.dims) for s in sources),
            "shape",
            "its operands differ",
        )
        return source.dtype, (len(sources), *source.dims), 0
    if node.op == "CONTIGUOUS":
        return source.dtype, source.dims, 0
    if node.op in CONVERSIONS:
        if node.op == "BITCAST":
            _require(
                "bool" not in (node.dtype, source.dtype)
                and ITEM_BYTES[node.dtype] == ITEM_BYTES[source.dtype],
                "dtype",
                f"{source.dtype} cannot be read as {node.dtype}",
            )
        return node.dtype, source.dims, 0
    return _infer_arithmetic(graph, node, sources)


def _infer_param(graph: Graph, node: Node) -> _Inferred:
    tables: dict[str, Sequence[TensorSpec | Weight]] = {
        "INPUT": graph.inputs,
        "WEIGHT": graph.weights,
        "STATE": graph.states,
    }
    table = tables[node.op]
    _require(
        type(node.arg) is int and 0 <= node.arg < len(table),
        "argument",
        "it names no entry of its table",
    )
    assert isinstance(node.arg, int)  # for the type checker
    entry = table[node.arg]
    return entry.dtype, graph.get_dims(entry), 0


def _infer_movement(op: str, arg: Arg, dims: Dims, maxima: Mapping[str, int]) -> Dims:
    if op in ("PAD", "SHRINK"):
        _require(_is_pairs(arg, len(dims)), "argument", "it wants (offset, size) per axis")
        pairs: tuple[tuple[int, Dim], ...] = arg  # type: ignore[assignment]
        for (offset, size), old in zip(pairs, dims, strict=True):
            _require(
                _fits(op, offset, size, old, maxima),
                "shape",
                f"({offset}, {size!s:.40}) does not fit an axis of {old}",
            )
        return tuple(size for _, size in pairs)
    _require(
        isinstance(arg, tuple) and all(isinstance(item, int | str) for item in arg),
        "argument",
        "it wants a list of integers or symbols",
    )
    sizes: Dims = arg  # type: ignore[assignment]
    _require(len(sizes) <= limits.MAX_RANK, "size", f"more than {limits.MAX_RANK} axes")
    if op in ("PERMUTE", "FLIP"):
        _require(
            all(type(item) is int for item in sizes), "argument", "it wants a list of integers"
        )
        return _infer_order(op, sizes, dims)  # type: ignore[arg-type]
    _require(
        all(
            size in maxima if isinstance(size, str) else 1 <= size <= limits.MAX_DIMENSION
            for size in sizes
        ),
        "size",
        "a size is impossible",
    )
    if op == "EXPAND":
        return sizes + dims
    _require(_measure(sizes) == _measure(dims), "shape", "the number of elements changes")
    return sizes


def _infer_order(op: str, numbers: tuple[int, ...], dims: Dims) -> Dims:
    if op == "PERMUTE":
        _require(sorted(numbers) == list(range(len(dims))), "shape", "it is no order of the axes")
        return tuple(dims[axis] for axis in numbers)
    _require(
        len(numbers) == len(dims) and set(numbers) <= {0, 1},
        "argument",
        "it wants a 0 or 1 per axis",
    )
    _require(
        not any(flip and isinstance(size, str) for flip, size in zip(numbers, dims, strict=True)),
        "shape",
        "it reverses a symbolic axis",
    )
    return dims


def _fits(op: str, offset: int, size: Dim, old: Dim, maxima: Mapping[str, int]) -> bool:
    """Say whether an axis may be padded or shrunk like this, whatever the symbols are bound to."""
    if isinstance(size, str):
        if size not in maxima or offset != 0:
            return False
        return size == old or (op == "SHRINK" and isinstance(old, int) and maxima[size] <= old)
    if isinstance(old, str):
        return op == "SHRINK" and (offset, size) == (0, 1)
    inner, outer = (old, size) if op == "PAD" else (size, old)
    return offset >= 0 and size >= 1 and offset + inner <= outer


def _measure(dims: Dims) -> list[Dim]:
    """Return the symbols in order, and the number of elements before, between and behind them."""
    result: list[Dim] = []
    product = 1
    for size in dims:
        if isinstance(size, str):
            result += [product, size]
            product = 1
        else:
            product *= size
    return [*result, product]


def _is_pairs(arg: Arg, length: int) -> bool:
    return (
        isinstance(arg, tuple)
        and len(arg) == length
        and all(isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int for pair in arg)
    )


def _infer_reduce(node: Node, source: Value) -> _Inferred:
    arg = node.arg
    _require(
        isinstance(arg, tuple)
        and len(arg) == 2
        and arg[0] in REDUCTIONS
        and type(arg[1]) is int
        and 1 <= arg[1] <= len(source.shape),
        "argument",
        "it wants (ADD, MUL or MAX, number of axes)",
    )
    assert isinstance(arg, tuple) and isinstance(arg[1], int)  # for the type checker
    _require(source.dtype in NUMBERS or arg[0] != "ADD", "dtype", "bool cannot be added up")
    return source.dtype, source.dims[arg[1] :], math.prod(source.shape)


def _infer_arithmetic(graph: Graph, node: Node, sources: list[Value]) -> _Inferred:
    operands = sources
    if node.op == "WHERE":
        _require(sources[0].dtype == "bool", "dtype", "its condition is not bool")
        operands = sources[1:]
    dtype = operands[0].dtype
    _require(
        all(operand.dtype == dtype for operand in operands),
        "dtype",
        f"its operands differ: {', '.join(operand.dtype for operand in operands)}",
    )
    _require(dtype in ARITHMETIC[node.op][1], "dtype", f"it is not defined for {dtype}")
    if node.op in DIVISIONS or node.op in SHIFTS:
        _check_divisor(graph, node)
    dims = _broadcast([source.dims for source in sources])
    shape = _broadcast([source.shape for source in sources])
    result = "bool" if node.op in COMPARISONS else dtype
    return result, dims, math.prod(shape)  # type: ignore[arg-type]


def _broadcast(shapes: list[Dims]) -> Dims:
    rank = max(len(shape) for shape in shapes)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            _require(
                size == result[axis] or size == 1 or result[axis] == 1,
                "shape",
                f"operands of sizes {result[axis]} and {size} do not broadcast",
            )
            result[axis] = size if result[axis] == 1 else result[axis]
    return tuple(result)


def _check_divisor(graph: Graph, node: Node) -> None:
    divisor = graph.nodes[node.srcs[1]]
    _require(divisor.op == "CONST", "division", "its second operand is no constant")
    number = int(str(divisor.arg))  # the constant was checked when its own turn came
    if node.op in DIVISIONS:
        _require(number >= 1, "division", f"it divides by {number}")
    else:
        bits = 8 * ITEM_BYTES[divisor.dtype]
        _require(0 <= number < bits, "division", f"it shifts {bits} bits by {number}")


def _check_const(graph: Graph, node: Node) -> None:
    text = node.arg
    _require(isinstance(text, str), "argument", "it wants its value as text")
    assert isinstance(text, str)  # for the type checker
    if node.dtype == "bool":
        _require(text in ("0", "1"), "const", "bool is 0 or 1")
    elif node.dtype in INTEGERS:
        _require(bool(_INTEGER.fullmatch(text)), "const", "not a decimal integer")
        bits = 8 * ITEM_BYTES[node.dtype]
        low, high = (0, 2**bits) if node.dtype[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        _require(low <= int(text) < high, "const", f"{text} is no {node.dtype}")
    else:
        _require(bool(_FLOAT.fullmatch(text)), "const", "not 16 hexadecimal digits")
        rounded = encode_float(round_float(decode_float(text), node.dtype))
        _require(text == rounded, "const", f"no {node.dtype} has this value")


def round_float(value: float, dtype: str) -> float:
    """Return the nearest value that ``dtype`` can hold; every NaN becomes the canonical one."""
    if math.isnan(value):
        return math.nan
    if dtype == "float64" or math.isinf(value) or value == 0:
        return value
    if dtype == "bfloat16":
        return _round_bfloat16(value)
    with np.errstate(over="ignore"):  # beyond the range is infinity, as in the kernels
        return float(get_numpy_dtype(dtype).type(value))


def _round_bfloat16(value: float) -> float:
    if abs(value) >= 2.0**128:
        return math.copysign(math.inf, value)
    exponent = math.frexp(value)[1]  # |value| is in [2**(exponent - 1), 2**exponent)
    step = max(exponent - 8, -133)  # 8 bits of precision; subnormals end at 2**-133
    rounded = math.ldexp(float(round(math.ldexp(value, -step))), step)
    largest = (2.0 - 2.0**-7) * 2.0**127
    return rounded if abs(rounded) <= largest else math.copysign(math.inf, value)


def _check_value(node: Node, value: Value) -> None:
    _require(node.dtype == value.dtype, "dtype", f"it gives {value.dtype}, not {node.dtype}")
    _require(len(value.shape) <= limits.MAX_RANK, "size", f"more than {limits.MAX_RANK} axes")
    _require(
        math.prod(value.shape) <= limits.MAX_ELEMENTS,
        "size",
        f"more than {limits.MAX_ELEMENTS} elements",
    )
    if node.op == "CONTIGUOUS":
        _require(
            value.nbytes <= limits.MAX_VALUE_BYTES,
            "size",
            f"{value.nbytes} bytes in memory, more than {limits.MAX_VALUE_BYTES}",
        )
