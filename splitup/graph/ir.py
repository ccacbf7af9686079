"""The graph of a task: typed nodes in topological order, and its canonical bytes.

A graph is a pure function ``(inputs, state) -> (outputs, new state)`` over tensors. A dimension is
a number, or a **symbol** that every step binds to a number from 1 to its maximum: the rows of that
step. Weights and states have no symbols; a port, like every value in memory, has at most one, as
its leading dimension.

A graph holds data only: no source code, no pickle, no call. A node names its operation, its dtype,
its operands by their position in the list, and one argument. Shapes follow from these; the reader
of a graph computes them (``splitup.graph.rules``).

Operations and their argument:

    INPUT, WEIGHT, STATE  position in the table of that name
    IOTA                  n: the int32 values 0 … n-1
    CONST                 a scalar: "0"/"1" for bool, decimal for integers, for floats the 16
                          hexadecimal digits of the IEEE 754 binary64 of the value
    RESHAPE               the new shape. Symbols keep their order, and the number of elements
                          before, between and behind them
    EXPAND                the dimensions put in front of the operand's own
    PERMUTE               the order of axes
    PAD, SHRINK           (offset, size) for every axis; PAD fills with zeros. Of a symbolic axis,
                          SHRINK keeps all, (0, symbol), or the first row, (0, 1); PAD keeps all.
                          SHRINK may cut a fixed axis to a symbol whose maximum is not larger
    FLIP                  1 for every axis that is reversed, else 0
    LOOKUP                none: (table, int32 index) -> the row of the table for every index, and
                          zeros for an index that is outside
    STACK                 none: operands of one shape, stacked along a new first axis
    REDUCE                (ADD, MUL or MAX, n): reduces the first n axes
    CONTIGUOUS            none: the value is written to memory. Models are cut into tasks only here
    CAST, BITCAST         none: the dtype is the node's own
    arithmetic            none: operands broadcast as in numpy and share one dtype

What the format says of each operation is in ``splitup.graph.operations.table``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from splitup.core import limits
from splitup.core.codec import decode_canonical, encode_canonical
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import TensorSpec

FORMAT: Final = "splitup.graph"
VERSION: Final = 1

Dim = int | str  # a number, or the name of a symbol
Dims = tuple[Dim, ...]
Arg = int | str | tuple[Dim, ...] | tuple[tuple[int, Dim], ...] | None


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. ``srcs`` are positions of earlier nodes."""

    op: str
    dtype: str
    srcs: tuple[int, ...]
    arg: Arg = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant tensor; ``digest`` is the SHA-256 of its little-endian bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def spec(self) -> TensorSpec:
        """Return name, dtype and shape."""
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dimension that every step binds to a number from 1 to ``maximum``, which is at least 2."""

    name: str
    maximum: int


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """An output port and the node that gives its value."""

    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Update:
    """The node that gives a state's value after the step."""

    state: int
    node: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A task, or a whole model before it is cut. States start as zeros."""

    inputs: tuple[TensorSpec, ...]
    weights: tuple[Weight, ...]
    states: tuple[TensorSpec, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[GraphOutput, ...]
    updates: tuple[Update, ...]
    symbols: tuple[Symbol, ...] = ()

    def get_dims(self, spec: TensorSpec | Weight) -> Dims:
        """Return the dimensions of a port, weight or state, with its symbol by name."""
        if isinstance(spec, TensorSpec) and spec.rows:
            return (spec.rows, *spec.shape[1:])
        return spec.shape

    def to_bytes(self) -> bytes:
        """Return the canonical bytes; their SHA-256 is the task's identity."""
        return encode_canonical(
            {
                "format": FORMAT,
                "version": VERSION,
                "symbols": [[symbol.name, symbol.maximum] for symbol in self.symbols],
                "inputs": [
                    [spec.name, spec.dtype, list(self.get_dims(spec))] for spec in self.inputs
                ],
                "weights": [[w.name, w.dtype, list(w.shape), w.digest] for w in self.weights],
                "states": [[spec.name, spec.dtype, list(spec.shape)] for spec in self.states],
                "nodes": [[n.op, n.dtype, list(n.srcs), _to_lists(n.arg)] for n in self.nodes],
                "outputs": [[output.name, output.node] for output in self.outputs],
                "updates": [[update.state, update.node] for update in self.updates],
            }
        )


def remove_names(graph: Graph) -> Graph:
    """Return the graph with positions for names and zeros for digests: code depends on neither.

    So the blocks of a model, which differ in nothing else, become one.
    """
    return Graph(
        tuple(replace(spec, name=str(i)) for i, spec in enumerate(graph.inputs)),
        tuple(replace(w, name=str(i), digest="0" * 64) for i, w in enumerate(graph.weights)),
        tuple(replace(spec, name=str(i)) for i, spec in enumerate(graph.states)),
        graph.nodes,
        tuple(replace(output, name=str(i)) for i, output in enumerate(graph.outputs)),
        graph.updates,
        graph.symbols,
    )


def parse_graph(data: bytes | memoryview) -> Graph:
    """Read canonical bytes into a graph whose fields have the right types; raises InvalidModel.

    The graph is not checked: ``splitup.graph.rules.load_graph`` does both.
    """
    try:
        value = decode_canonical(
            bytes(data),
            max_bytes=limits.MAX_GRAPH_BYTES,
            max_values=limits.MAX_DOCUMENT_VALUES,
            max_growth=limits.DENSE_GROWTH,
        )
    except InvalidModel:
        raise
    except InvalidInput as error:
        raise InvalidModel(f"the task's bytes are no graph: {error}") from None
    _expect(isinstance(value, dict), "the top level is no object")
    keys = {"format", "version", "symbols", "inputs", "weights", "states", "nodes"}
    keys |= {"outputs", "updates"}
    _expect(set(value) == keys, "the top level has other keys than a graph")
    _expect(value["format"] == FORMAT, "the format is not " + FORMAT)
    _expect(
        type(value["version"]) is int and value["version"] == VERSION,
        f"the version is not {VERSION}; update SplitUp or compile the model again",
    )
    _bound(value, "nodes", limits.MAX_GRAPH_NODES)
    for key in ("symbols", "inputs", "states", "outputs", "updates"):
        _bound(value, key, limits.MAX_PORTS)
    _bound(value, "weights", limits.MAX_WEIGHTS)
    symbols = tuple(Symbol(*_parse_pair(row, "symbol", str, int)) for row in value["symbols"])
    maxima = {symbol.name: symbol.maximum for symbol in symbols}
    return Graph(
        inputs=tuple(_parse_input(row, maxima) for row in value["inputs"]),
        weights=tuple(_parse_weight(row) for row in value["weights"]),
        states=tuple(_parse_spec(row, "state") for row in value["states"]),
        nodes=tuple(_parse_node(row, index) for index, row in enumerate(value["nodes"])),
        outputs=tuple(
            GraphOutput(*_parse_pair(row, "output", str, int)) for row in value["outputs"]
        ),
        updates=tuple(Update(*_parse_pair(row, "update", int, int)) for row in value["updates"]),
        symbols=symbols,
    )


def encode_float(value: float) -> str:
    """Return the CONST argument of a float: IEEE 754 binary64, big-endian, in hexadecimal."""
    return struct.pack(">d", value).hex()


def decode_float(text: str) -> float:
    """Return the float of a CONST argument. The caller has checked that it is 16 hex digits."""
    result: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return result


def count_rows(ports: Sequence[TensorSpec], inputs: Sequence[bytes | memoryview]) -> dict[str, int]:
    """Return the number of rows that a step's inputs bind each symbol to.

    Raises InvalidInput for an input of a wrong length, or when two of one symbol disagree.
    """
    rows: dict[str, int] = {}
    for spec, data in zip(ports, inputs, strict=True):
        if not spec.accepts(len(data)):
            raise InvalidInput(
                f"input '{spec.name}' has {len(data)} bytes; {spec} has {spec.nbytes}"
            )
        if spec.rows:
            count = len(data) // spec.row_bytes
            if rows.setdefault(spec.rows, count) != count:
                raise InvalidInput(
                    f"input '{spec.name}' has {count} rows; another one of this step "
                    f"has {rows[spec.rows]}"
                )
    return rows


def bind_rows(graph: Graph, rows: Mapping[str, int]) -> Graph:
    """Return the graph without symbols that a legal graph is in a step of these rows."""

    def bind(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(map(bind, item))
        return rows[item] if isinstance(item, str) else item

    if not graph.symbols:
        return graph
    inputs = tuple(
        TensorSpec(spec.name, spec.dtype, bind(graph.get_dims(spec))) for spec in graph.inputs
    )
    nodes = tuple(
        replace(node, arg=bind(node.arg))
        if isinstance(node.arg, tuple) and node.op != "REDUCE"
        else node
        for node in graph.nodes
    )
    return replace(graph, inputs=inputs, nodes=nodes, symbols=())


def _to_lists(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return [list(item) if isinstance(item, tuple) else item for item in arg]
    return arg


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidModel(f"the task's bytes are no graph: {problem}")


def _bound(value: dict[str, Any], key: str, limit: int) -> None:
    _expect(isinstance(value[key], list), f"'{key}' is no list")
    _expect(len(value[key]) <= limit, f"'{key}' has {len(value[key])} entries, more than {limit}")


def _is_dim(value: Any) -> bool:
    return type(value) is int or isinstance(value, str)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _parse_spec(row: Any, what: str) -> TensorSpec:
    _expect(
        isinstance(row, list)
        and len(row) == 3
        and isinstance(row[0], str)
        and isinstance(row[1], str)
        and _is_shape(row[2]),
        f"an {what} is not [name, dtype, shape]",
    )
    return TensorSpec(row[0], row[1], tuple(row[2]))


def _parse_input(row: Any, maxima: dict[str, int]) -> TensorSpec:
    """Read an input, whose leading dimension may be a symbol: the spec gets its maximum."""
    rows = ""
    if isinstance(row, list) and len(row) == 3 and isinstance(row[2], list) and row[2]:
        first = row[2][0]
        if isinstance(first, str):
            _expect(first in maxima, "an input's symbol is not in the table of symbols")
            rows, row = first, [row[0], row[1], [maxima[first], *row[2][1:]]]
    spec = _parse_spec(row, "input")
    return TensorSpec(spec.name, spec.dtype, spec.shape, rows)


def _parse_weight(row: Any) -> Weight:
    _expect(
        isinstance(row, list) and len(row) == 4 and isinstance(row[3], str),
        "a weight is not [name, dtype, shape, digest]",
    )
    spec = _parse_spec(row[:3], "weight")
    return Weight(spec.name, spec.dtype, spec.shape, row[3])


def _parse_node(row: Any, index: int) -> Node:
    _expect(
        isinstance(row, list)
        and len(row) == 4
        and isinstance(row[0], str)
        and isinstance(row[1], str)
        and _is_shape(row[2]),
        f"node {index} is not [op, dtype, operands, argument]",
    )
    return Node(row[0], row[1], tuple(row[2]), _parse_arg(row[3], index))


def _parse_arg(value: Any, index: int) -> Arg:
    if value is None or isinstance(value, str) or type(value) is int:
        return value
    if isinstance(value, list):
        if all(_is_dim(item) for item in value):
            return tuple(value)
        if all(
            isinstance(item, list) and len(item) == 2 and type(item[0]) is int and _is_dim(item[1])
            for item in value
        ):
            return tuple((item[0], item[1]) for item in value)
    raise InvalidModel(f"the task's bytes are no graph: node {index} has an unknown argument")


def _parse_pair(row: Any, what: str, first: type, second: type) -> tuple[Any, Any]:
    _expect(
        isinstance(row, list)
        and len(row) == 2
        and type(row[0]) is first
        and type(row[1]) is second,
        f"an {what} is not a pair",
    )
    return row[0], row[1]
