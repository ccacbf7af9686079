"""Builds small graphs for tests, node by node."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from splitup.core.tensors import TensorSpec, encode_safetensors_header
from splitup.graph.arrays import Array
from splitup.graph.error_bound import compute_node
from splitup.graph.ir import Arg, Graph, GraphOutput, Node, Symbol, Update, Weight, bind_rows
from splitup.graph.operations.table import PARAMS
from splitup.graph.rules import check_graph


class Builder:
    """Collects nodes; every method returns the new node's position."""

    def __init__(self) -> None:
        self.inputs: list[TensorSpec] = []
        self.states: list[TensorSpec] = []
        self.weights: list[Weight] = []
        self.weight_bytes: dict[str, bytes] = {}
        self.nodes: list[Node] = []
        self.symbols: dict[str, int] = {}

    def add(self, op: str, dtype: str, *srcs: int, arg: Arg = None) -> int:
        self.nodes.append(Node(op, dtype, srcs, arg))
        return len(self.nodes) - 1

    def input(self, name: str, dtype: str, *shape: int) -> int:
        self.inputs.append(TensorSpec(name, dtype, shape))
        return self.add("INPUT", dtype, arg=len(self.inputs) - 1)

    def rows(self, name: str, dtype: str, symbol: str, maximum: int, *shape: int) -> int:
        """Add an input whose leading dimension is a symbol."""
        self.symbols[symbol] = maximum
        self.inputs.append(TensorSpec(name, dtype, (maximum, *shape), symbol))
        return self.add("INPUT", dtype, arg=len(self.inputs) - 1)

    def state(self, name: str, dtype: str, *shape: int) -> int:
        self.states.append(TensorSpec(name, dtype, shape))
        return self.add("STATE", dtype, arg=len(self.states) - 1)

    def weight(self, name: str, array: np.ndarray) -> int:
        data = array.tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self.weights.append(Weight(name, str(array.dtype), array.shape, digest))
        self.weight_bytes[name] = data
        return self.add("WEIGHT", str(array.dtype), arg=len(self.weights) - 1)

    def const(self, dtype: str, text: str) -> int:
        return self.add("CONST", dtype, arg=text)

    def store(self, dtype: str, src: int) -> int:
        return self.add("CONTIGUOUS", dtype, src)

    def graph(self, outputs: dict[str, int], updates: Sequence[int] = ()) -> Graph:
        return Graph(
            tuple(self.inputs),
            tuple(self.weights),
            tuple(self.states),
            tuple(self.nodes),
            tuple(GraphOutput(name, node) for name, node in outputs.items()),
            tuple(Update(state, node) for state, node in enumerate(updates)),
            tuple(Symbol(*item) for item in self.symbols.items()),
        )

    def safetensors(self) -> bytes:
        header = encode_safetensors_header([weight.spec for weight in self.weights])
        return header + b"".join(self.weight_bytes[weight.name] for weight in self.weights)


def make_counter(size: int = 4) -> Builder:
    """y = x * w + s with state s' = y."""
    b = Builder()
    x = b.input("x", "float32", size)
    s = b.state("s", "float32", size)
    w = b.weight("w", np.arange(1, size + 1, dtype=np.float32))
    b.store("float32", b.add("ADD", "float32", b.add("MUL", "float32", x, w), s))
    return b


def make_legal() -> Graph:
    """One small legal graph with an input, a weight, a state and a few operations."""
    b = make_counter()
    return b.graph({"y": len(b.nodes) - 1}, [len(b.nodes) - 1])


def make_running_sum(most: int = 8, size: int = 4) -> Graph:
    """y = x x + s for the rows x of a step, and s' = s + the sum of all x x: float32 [T, size]."""
    b = Builder()
    x = b.rows("x", "float32", "T", most, size)
    s = b.state("s", "float32", size)
    squares = b.store("float32", b.add("MUL", "float32", x, x))
    total = b.add("REDUCE", "float32", squares, arg=("ADD", 1))
    y = b.store("float32", b.add("ADD", "float32", squares, s))
    return b.graph({"y": y}, [b.store("float32", b.add("ADD", "float32", s, total))])


def compute_graph(graph: Graph, params: Mapping[tuple[str, int], Array]) -> dict[int, Array]:
    """Return the reference value of every node; ``params`` by op and position.

    The inputs bind the graph's symbols.
    """
    inputs = enumerate(graph.inputs)
    rows = {spec.rows: len(params["INPUT", place]) for place, spec in inputs if spec.rows}
    bound = check_graph(bind_rows(graph, rows))
    values: dict[int, Array] = {}
    for index, node in enumerate(bound.nodes):
        if node.op in PARAMS:
            assert isinstance(node.arg, int)
            values[index] = params[node.op, node.arg]
        else:
            values[index] = compute_node(node, [values[src] for src in node.srcs])
    return values


def list_region(graph: Graph, root: int) -> list[int]:
    """Return the nodes that are computed for the value in memory at ``root``, ascending.

    They end where other values in memory begin (``list_operands``) and hold every constant.
    """
    found, pending = {root}, list(graph.nodes[root].srcs)
    while pending:
        index = pending.pop()
        if index not in found and not is_in_memory(graph.nodes[index]):
            found.add(index)
            pending.extend(graph.nodes[index].srcs)
    return sorted(found)


def list_operands(graph: Graph, region: Iterable[int]) -> list[int]:
    """Return the values in memory that a region reads, ascending."""
    nodes = set(region)
    return sorted({src for index in nodes for src in graph.nodes[index].srcs} - nodes)


def is_in_memory(node: Node) -> bool:
    """Return whether a node's value is in memory before or after a kernel runs."""
    return node.op == "CONTIGUOUS" or node.op in PARAMS
