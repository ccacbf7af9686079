"""What a legal graph is. The compiler checks after every pass, a node before it compiles anything.

The graph may come from anybody. Everything here is linear in its size, allocates nothing that
grows with a shape, and does not recurse. The rules in order, cheapest first:

    ports       names, dtypes, shapes and digests of inputs, weights, states, outputs, updates
    op          only the operations of the allow-list
    arity       as many operands as the operation takes, all of them earlier nodes
    dtype       operands and result have dtypes that the operation is defined for
    argument    of the form the operation wants
    shape       recomputed from the operands: no index can leave its operand
    const       representable in its dtype, written in one way
    division    integers are divided by positive constants only, shifted by less than their width
    size        rank, dimensions, elements; bytes of what is written to memory
    depth       of the chain of operands, and of the part of it that becomes one kernel
    cost        operations per step
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup import limits
from splitup.errors import InvalidModel
from splitup.graph.ir import Arg, Graph, Node, Weight, decode_float, encode_float, parse_graph
from splitup.tensors import ITEM_BYTES, TensorSpec, get_numpy_dtype

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
    SOURCES | MOVEMENT | CONVERSIONS | frozenset(ARITHMETIC) | {"STACK", "REDUCE", "CONTIGUOUS"}
)
REDUCTIONS: Final = frozenset({"ADD", "MUL", "MAX"})

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FLOAT = re.compile(r"[0-9a-f]{16}")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_NAME = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Value:
    """What a node gives: ``operations`` is the arithmetic it takes to compute it once."""

    dtype: str
    shape: tuple[int, ...]
    operations: int

    @property
    def nbytes(self) -> int:
        """Bytes, were it written to memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def load_graph(data: bytes | memoryview) -> Graph:
    """Return the graph in ``data``; raises InvalidModel unless it is canonical and legal."""
    graph = parse_graph(data)
    check_graph(graph)
    return graph


def check_graph(graph: Graph) -> tuple[Value, ...]:
    """Return every node's dtype, shape and cost; raises InvalidModel naming node and rule."""
    _check_tables(graph)
    values: list[Value] = []
    depths: list[int] = []
    chains: list[int] = []
    operations = 0
    for index, node in enumerate(graph.nodes):
        try:
            _check_operands(node, index)
            sources = [values[src] for src in node.srcs]
            value = _infer(graph, node, sources)
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
            (value.dtype, value.shape) == (state.dtype, state.shape),
            f"state '{state.name}' is updated with another dtype or shape",
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
        count = 1
    _require(len(node.srcs) == count, "arity", f"it takes {count} operands, not {len(node.srcs)}")
    _require(all(0 <= src < index for src in node.srcs), "arity", "an operand is no earlier node")
    _require(node.dtype in ITEM_BYTES, "dtype", f"unknown dtype {node.dtype!r:.40}")


def _infer(graph: Graph, node: Node, sources: list[Value]) -> Value:
    if node.op in PARAMS:
        return _infer_param(graph, node)
    if node.op == "IOTA":
        _require(
            type(node.arg) is int and 1 <= node.arg <= limits.MAX_DIMENSION,
            "argument",
            "it wants a length",
        )
        assert isinstance(node.arg, int)  # for the type checker
        return Value("int32", (node.arg,), 0)
    if node.op == "CONST":
        _check_const(graph, node)
        return Value(node.dtype, (), 0)
    source = sources[0]
    if node.op in MOVEMENT:
        return Value(source.dtype, _infer_movement(node.op, node.arg, source.shape), 0)
    if node.op == "REDUCE":
        return _infer_reduce(node, source)
    _require(node.arg is None, "argument", "it takes none")
    if node.op == "STACK":
        _require(
            all((s.dtype, s.shape) == (source.dtype, source.shape) for s in sources),
            "shape",
            "its operands differ",
        )
        return Value(source.dtype, (len(sources), *source.shape), 0)
    if node.op == "CONTIGUOUS":
        return Value(source.dtype, source.shape, 0)
    if node.op in CONVERSIONS:
        if node.op == "BITCAST":
            _require(
                "bool" not in (node.dtype, source.dtype)
                and ITEM_BYTES[node.dtype] == ITEM_BYTES[source.dtype],
                "dtype",
                f"{source.dtype} cannot be read as {node.dtype}",
            )
        return Value(node.dtype, source.shape, 0)
    return _infer_arithmetic(graph, node, sources)


def _infer_param(graph: Graph, node: Node) -> Value:
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
    return Value(entry.dtype, entry.shape, 0)


def _infer_movement(op: str, arg: Arg, shape: tuple[int, ...]) -> tuple[int, ...]:
    if op in ("PAD", "SHRINK"):
        _require(_is_pairs(arg, len(shape)), "argument", "it wants (offset, size) per axis")
        assert isinstance(arg, tuple)  # for the type checker
        result: list[int] = []
        for pair, old in zip(arg, shape, strict=True):
            assert isinstance(pair, tuple)  # for the type checker
            offset, size = pair
            inner, outer = (old, size) if op == "PAD" else (size, old)
            _require(
                offset >= 0 and size >= 1 and offset + inner <= outer,
                "shape",
                f"({offset}, {size}) does not fit an axis of {old}",
            )
            result.append(size)
        return tuple(result)
    _require(
        isinstance(arg, tuple) and all(type(item) is int for item in arg),
        "argument",
        "it wants a list of integers",
    )
    numbers: tuple[int, ...] = arg  # type: ignore[assignment]
    _require(len(numbers) <= limits.MAX_RANK, "size", f"more than {limits.MAX_RANK} axes")
    if op == "PERMUTE":
        _require(sorted(numbers) == list(range(len(shape))), "shape", "it is no order of the axes")
        return tuple(shape[axis] for axis in numbers)
    if op == "FLIP":
        _require(
            len(numbers) == len(shape) and set(numbers) <= {0, 1},
            "argument",
            "it wants a 0 or 1 per axis",
        )
        return shape
    _require(
        all(1 <= size <= limits.MAX_DIMENSION for size in numbers), "size", "a size is impossible"
    )
    if op == "EXPAND":
        return numbers + shape
    _require(math.prod(numbers) == math.prod(shape), "shape", "the number of elements changes")
    return numbers


def _is_pairs(arg: Arg, length: int) -> bool:
    return (
        isinstance(arg, tuple)
        and len(arg) == length
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in arg)
    )


def _infer_reduce(node: Node, source: Value) -> Value:
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
    return Value(source.dtype, source.shape[arg[1] :], math.prod(source.shape))


def _infer_arithmetic(graph: Graph, node: Node, sources: list[Value]) -> Value:
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
    shape = _broadcast([source.shape for source in sources])
    result = "bool" if node.op in COMPARISONS else dtype
    return Value(result, shape, math.prod(shape))


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(len(shape) for shape in shapes)
    result = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            _require(
                size == result[axis] or size == 1 or result[axis] == 1,
                "shape",
                f"operands of sizes {result[axis]} and {size} do not broadcast",
            )
            result[axis] = max(result[axis], size)
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
