"""The rules of a legal graph. The compiler checks after every pass, a node before it compiles.

A graph that keeps them is a ``CheckedGraph``: all that runs or costs a graph takes one, so that the
type checker finds code that would compile an unchecked graph.

A graph may come from anybody. The check is linear in its size, allocates nothing that grows with a
shape, and does not recurse. The rules in order, cheapest first:

    ports       names, dtypes, shapes and digests of inputs, weights, states, outputs, updates;
                every symbol is the leading dimension of an input, which binds it
    op          only operations of the table (``splitup.graph.operations.table``)
    arity       as many operands as the operation takes, all of them earlier nodes
    dtype       operands and result have dtypes that the operation is defined for
    argument    of the form that the operation takes
    shape       recomputed from the operands: no index can leave its operand; only the first axis of
                a value in memory may be a symbol
    const       representable in its dtype, written in one way
    division    integers are divided by positive constants only, shifted by less than their width
    size        rank, dimensions, elements; bytes of what is written to memory. A symbol counts
                as its maximum
    depth       of the chain of operands
    compiling   the time that each kernel takes to compile (``splitup.graph.compile_cost``)

A task has two further bounds, which a whole model may exceed because nobody runs it as one task:

    compiling   the time that all kernels take to compile
    cost        operations per step
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.compile_cost import (
    KernelCost,
    compute_total_us,
    measure_kernel,
    measure_size,
)
from splitup.graph.ir import Graph, Node, parse_graph
from splitup.graph.operations.spec import OpSpec, RuleViolation, Scope, Value, require
from splitup.graph.operations.table import OPERATIONS

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SYMBOL = re.compile(r"[A-Z]{1,8}")
_NAME = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedGraph(Graph):
    """A graph that keeps all rules: to make one is to check it. ``values`` is one per node.

    ``kernels`` is what each value in memory takes to compile, in the order of the nodes.
    Raises InvalidModel, naming node and rule.
    """

    values: tuple[Value, ...] = field(init=False, repr=False)
    kernels: tuple[KernelCost, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", infer_values(self))
        object.__setattr__(self, "kernels", _measure_kernels(self, self.values))

    @property
    def operations(self) -> int:
        """Return the operations of one step, as if nothing were looked up but all added up."""
        return sum(value.operations for value in self.values)

    @property
    def compile_us(self) -> int:
        """Return the predicted time that compiling takes one core, in microseconds."""
        kernels = {kernel.signature: kernel.cost_us for kernel in self.kernels}
        return compute_total_us(sum(kernels.values()), len(self.nodes), len(self.kernels))

    def __eq__(self, other: object) -> bool:
        """Return whether the other graph, checked or not, has the same fields."""
        if not isinstance(other, Graph):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(Graph))

    __hash__ = Graph.__hash__


def check_graph(graph: Graph) -> CheckedGraph:
    """Return the graph as a checked one; raises InvalidModel naming node and rule."""
    if isinstance(graph, CheckedGraph):
        return graph
    return CheckedGraph(
        graph.inputs,
        graph.weights,
        graph.states,
        graph.nodes,
        graph.outputs,
        graph.updates,
        graph.symbols,
    )


def load_graph(data: bytes | memoryview) -> CheckedGraph:
    """Return the task in ``data``; raises InvalidModel unless it is canonical, legal and small."""
    return check_task(parse_graph(data))


def check_task(graph: Graph) -> CheckedGraph:
    """Return the graph of a task as a checked one; raises InvalidModel, also for a large one."""
    _require_ports(
        len(graph.nodes) <= limits.MAX_GRAPH_NODES,
        f"a task of more than {limits.MAX_GRAPH_NODES} nodes",
    )
    checked = check_graph(graph)
    if checked.operations > limits.MAX_TASK_FLOPS:
        raise InvalidModel(
            f"the task breaks the rule 'cost': one step takes {checked.operations} operations, "
            f"more than {limits.MAX_TASK_FLOPS}"
        )
    if checked.compile_us > limits.MAX_COMPILE_US:
        raise InvalidModel(
            f"the task breaks the rule 'compiling': compiling it takes "
            f"{checked.compile_us // 1000} ms, more than {limits.MAX_COMPILE_US // 1000}"
        )
    return checked


def infer_values(graph: Graph) -> tuple[Value, ...]:
    """Return what every node gives. Raises InvalidModel, but not for what takes long to compile."""
    _check_tables(graph)
    scope = Scope(graph, {symbol.name: symbol.maximum for symbol in graph.symbols})
    values: list[Value] = []
    depths: list[int] = []
    found = _Inferred()
    for index, node in enumerate(graph.nodes):
        try:
            values.append(found.check_node(scope, node, values))
        except RuleViolation as error:
            name = node.op if node.op in OPERATIONS else repr(node.op[:40])
            raise InvalidModel(
                f"node {index} ({name}) breaks the rule '{error.rule}': {error}"
            ) from None
        depths.append(1 + max((depths[src] for src in node.srcs), default=0))
        if depths[-1] > limits.MAX_GRAPH_DEPTH:
            raise InvalidModel(
                f"node {index} ({node.op}) breaks the rule 'depth': it ends a chain of more than "
                f"{limits.MAX_GRAPH_DEPTH} operations"
            )
    _check_results(graph, values)
    return tuple(values)


def _measure_kernels(graph: Graph, values: Sequence[Value]) -> tuple[KernelCost, ...]:
    """Return what every kernel costs; raises InvalidModel."""
    kernels: list[KernelCost] = []
    sizes: list[int] = []
    pairs, nodes = 0, max(len(graph.nodes), limits.MAX_GRAPH_NODES)
    most_pairs = limits.MAX_GRAPH_PAIRS * nodes // limits.MAX_GRAPH_NODES  # an uncut model has more
    for index, node in enumerate(graph.nodes):
        sizes.append(measure_size(node, sizes))
        if node.op == "CONTIGUOUS":
            kernels.append(measure_kernel(graph.nodes, values, sizes, index, limits.MAX_KERNEL_US))
            pairs += kernels[-1].pairs
            if kernels[-1].cost_us > limits.MAX_KERNEL_US or pairs > most_pairs:
                raise InvalidModel(
                    f"node {index} ({node.op}) breaks the rule 'compiling': its kernel takes more "
                    f"than {limits.MAX_KERNEL_US // 1000} ms to compile, or all kernels have more "
                    f"than {most_pairs} operations under different views; write more "
                    "values to memory"
                )
    return tuple(kernels)


# ---- nodes -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Inferred:
    """What nodes of one graph give: nodes that differ only in which operands they read, the same.

    ``kinds`` numbers what may be read of an operand: its dtype and dimensions, of a constant the
    number as well; ``kind_of`` is that of each node so far.
    """

    values: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    kinds: dict[tuple[Any, ...], int] = field(default_factory=dict)
    kind_of: list[int] = field(default_factory=list)

    def check_node(self, scope: Scope, node: Node, values: Sequence[Value]) -> Value:
        """Return what a node gives; ``values`` are those of the earlier nodes."""
        spec = OPERATIONS.get(node.op)
        require(spec is not None, "op", "it is not on the list of allowed operations")
        assert spec is not None  # for the type checker
        _check_operands(spec, node, len(values))
        argument = repr(node.arg)  # 1, True and "1" differ
        key = (node.op, node.dtype, argument, *[self.kind_of[src] for src in node.srcs])
        value = self.values.get(key)
        if value is None:
            value = self.values[key] = _infer_value(spec, scope, node, values)
        kind = (value.dtype, value.dims, argument if node.op == "CONST" else None)
        self.kind_of.append(self.kinds.setdefault(kind, len(self.kinds)))
        return value


def _infer_value(spec: OpSpec, scope: Scope, node: Node, values: Sequence[Value]) -> Value:
    operands = [values[src] for src in node.srcs]
    for operand in operands:
        require(operand.dtype in spec.dtypes, "dtype", f"it is not defined for {operand.dtype}")
    require(spec.has_argument or node.arg is None, "argument", "it takes none")
    dtype, dims = spec.infer(scope, node, operands)
    shape = scope.resolve(dims)
    value = Value(dtype, shape, spec.work(shape, operands), dims)
    _check_value(node, value)
    return value


def _check_operands(spec: OpSpec, node: Node, index: int) -> None:
    count = spec.arity
    if count is None:
        count = min(max(len(node.srcs), 1), limits.MAX_PORTS)
    require(len(node.srcs) == count, "arity", f"it takes {count} operands, not {len(node.srcs)}")
    require(all(0 <= src < index for src in node.srcs), "arity", "an operand is no earlier node")
    require(node.dtype in ITEM_BYTES, "dtype", f"unknown dtype {node.dtype!r:.40}")


def _check_value(node: Node, value: Value) -> None:
    require(node.dtype == value.dtype, "dtype", f"it gives {value.dtype}, not {node.dtype}")
    require(len(value.shape) <= limits.MAX_RANK, "size", f"more than {limits.MAX_RANK} axes")
    require(
        math.prod(value.shape) <= limits.MAX_ELEMENTS,
        "size",
        f"more than {limits.MAX_ELEMENTS} elements",
    )
    if node.op == "CONTIGUOUS":
        _check_in_memory(value)


def _check_in_memory(value: Value) -> None:
    require(
        value.nbytes <= limits.MAX_VALUE_BYTES,
        "size",
        f"{value.nbytes} bytes in memory, more than {limits.MAX_VALUE_BYTES}",
    )
    require(
        all(isinstance(size, int) for size in value.dims[1:]),
        "shape",
        f"it writes a value of shape [{', '.join(map(str, value.dims))}] to memory, where only "
        "the first axis may be a symbol",
    )


# ---- ports -------------------------------------------------------------------------------------


def _check_tables(graph: Graph) -> None:
    _require_ports(
        len(graph.nodes) <= limits.MAX_MODEL_NODES, f"more than {limits.MAX_MODEL_NODES} nodes"
    )
    _require_ports(
        len(graph.weights) <= limits.MAX_WEIGHTS, f"more than {limits.MAX_WEIGHTS} weights"
    )
    _check_symbols(graph)
    specs = [weight.spec for weight in graph.weights]
    for what, table in (("input", graph.inputs), ("weight", specs), ("state", graph.states)):
        _require_ports(what == "weight" or len(table) <= limits.MAX_PORTS, f"too many {what}s")
        _require_ports(
            len({spec.name for spec in table}) == len(table), f"an {what} name occurs twice"
        )
        for spec in table:
            _check_spec(what, spec)
    for weight in graph.weights:
        _require_ports(
            bool(_DIGEST.fullmatch(weight.digest)), f"weight '{weight.name}' has no digest"
        )
    names = [output.name for output in graph.outputs]
    _require_ports(1 <= len(names) <= limits.MAX_PORTS, f"{len(names)} outputs")
    _require_ports(len(set(names)) == len(names), "an output name occurs twice")
    _require_ports(all(_NAME.fullmatch(name) for name in names), "an output has an illegal name")


def _check_symbols(graph: Graph) -> None:
    _require_ports(
        len(graph.symbols) <= limits.MAX_SYMBOLS, f"more than {limits.MAX_SYMBOLS} symbols"
    )
    maxima = {symbol.name: symbol.maximum for symbol in graph.symbols}
    _require_ports(len(maxima) == len(graph.symbols), "a symbol's name occurs twice")
    for name, maximum in maxima.items():
        _require_ports(bool(_SYMBOL.fullmatch(name)), "a symbol has an illegal name")
        _require_ports(
            2 <= maximum <= limits.MAX_DIMENSION, f"symbol '{name}' has an impossible maximum"
        )
    bound = {spec.rows for spec in graph.inputs if spec.rows}
    _require_ports(bound == set(maxima), "the symbols are not those that inputs bind")
    for spec in graph.inputs:
        _require_ports(
            not spec.rows or spec.shape[:1] == (maxima[spec.rows],),
            f"input '{spec.name}' has another size than its symbol's maximum",
        )
    _require_ports(all(not spec.rows for spec in graph.states), "a state has a symbol")


def _check_spec(what: str, spec: TensorSpec) -> None:
    _require_ports(bool(_NAME.fullmatch(spec.name)), f"an {what} has an illegal name")
    _require_ports(spec.dtype in ITEM_BYTES, f"{what} '{spec.name}' has an unknown dtype")
    _require_ports(
        len(spec.shape) <= limits.MAX_RANK
        and all(1 <= size <= limits.MAX_DIMENSION for size in spec.shape)
        and spec.nbytes <= limits.MAX_VALUE_BYTES,
        f"{what} '{spec.name}' has an impossible shape",
    )


def _check_results(graph: Graph, values: Sequence[Value]) -> None:
    """Check that outputs and updates are values in memory and that every state has one update."""
    for kind, name, node in [
        *(("output", output.name, output.node) for output in graph.outputs),
        *(("update", str(update.state), update.node) for update in graph.updates),
    ]:
        _require_ports(0 <= node < len(values), f"{kind} '{name}' names a node that does not exist")
        _require_ports(
            graph.nodes[node].op == "CONTIGUOUS", f"{kind} '{name}' is no CONTIGUOUS value"
        )
    for results in (graph.outputs, graph.updates):
        nodes = [result.node for result in results]
        _require_ports(len(set(nodes)) == len(nodes), "one value is given twice")
    _require_ports(
        [update.state for update in graph.updates] == list(range(len(graph.states))),
        "the updates are not one per state, in order",
    )
    for update, state in zip(graph.updates, graph.states, strict=True):
        value = values[update.node]
        _require_ports(
            (value.dtype, value.dims) == (state.dtype, state.shape),
            f"state '{state.name}' is updated with another dtype or shape",
        )


def _require_ports(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidModel(f"the graph breaks the rule 'ports': {problem}")
