"""Passes over a whole graph before it is cut. Each returns a new graph that is checked again.

Both insert CONTIGUOUS after reductions, and into expressions that are too large for one kernel. So
the graph states where values are written to memory, and machines that compile parts of
it do not decide that again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from splitup.graph.compile_cost import measure_kernel, measure_size
from splitup.graph.ir import Graph, GraphOutput, Node, Update
from splitup.graph.operations.spec import Value
from splitup.graph.operations.table import PARAMS
from splitup.graph.rules import check_graph, infer_values
from splitup_deploy.frontends.tracing import Bank, TracedModel

LARGE_KERNEL_US: Final = 600_000  # to compile, a quarter of what is legal; models' own take less


def materialise_reductions(model: TracedModel) -> TracedModel:
    """Write every reduction to memory that depends on an input, weight or state.

    It is for functions that do not mark values in memory; tinygrad would write most of them anyway.
    """
    graph = model.graph
    depends: list[bool] = []
    for node in graph.nodes:
        depends.append(node.op in PARAMS or any(depends[src] for src in node.srcs))
    chosen = [depends[index] and node.op == "REDUCE" for index, node in enumerate(graph.nodes)]
    return _materialise(model, chosen)


def materialise_shared_reductions(model: TracedModel) -> TracedModel:
    """Write a reduction to memory that several values in memory are computed from.

    Otherwise tinygrad would compute it once in the uncut graph but again in each task of the cut
    one, perhaps in another order of summation.
    """
    graph = model.graph
    readers: list[set[int]] = [set() for _ in graph.nodes]
    chosen = [False] * len(graph.nodes)
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        chosen[index] = node.op == "REDUCE" and len(readers[index]) > 1
        roots = {index} if node.op == "CONTIGUOUS" or chosen[index] else readers[index]
        for src in node.srcs:
            readers[src] |= roots
    return _materialise(model, chosen)


def _materialise(model: TracedModel, chosen: Sequence[bool]) -> TracedModel:
    """Insert CONTIGUOUS after the chosen nodes and into large kernels, unless it is there already.

    A large kernel ends with the operation that makes it so.
    """
    model = _insert(model, lambda index, nodes, origins: chosen[index])
    found = infer_values(model.graph)
    if suspects := _find_in_large_kernels(model.graph, found):
        values: list[Value] = []
        sizes: list[int] = []

        def is_large(index: int, nodes: Sequence[Node], origins: Sequence[int]) -> bool:
            for place in range(len(sizes), len(nodes)):
                values.append(found[origins[place]])
                sizes.append(measure_size(nodes[place], sizes))
            return index in suspects and _is_large(nodes, values, sizes, len(nodes) - 1)

        model = _insert(model, is_large)
    return replace(model, graph=check_graph(model.graph))


def _insert(
    model: TracedModel, choose: Callable[[int, Sequence[Node], Sequence[int]], bool]
) -> TracedModel:
    """Insert CONTIGUOUS after nodes that are chosen, unless it is there already.

    ``choose`` gets a node's index, the new nodes up to it, and which node each of them comes from.
    """
    graph = model.graph
    consumers: list[list[str]] = [[] for _ in graph.nodes]
    for node in graph.nodes:
        for src in node.srcs:
            consumers[src].append(node.op)
    nodes: list[Node] = []
    origins: list[int] = []
    moved: list[int] = []
    for index, node in enumerate(graph.nodes):
        nodes.append(Node(node.op, node.dtype, tuple(moved[src] for src in node.srcs), node.arg))
        origins.append(index)
        is_stored = node.op in (*PARAMS, "CONTIGUOUS") or consumers[index] == ["CONTIGUOUS"]
        if not is_stored and choose(index, nodes, origins):
            nodes.append(Node("CONTIGUOUS", node.dtype, (len(nodes) - 1,)))
            origins.append(index)
        moved.append(len(nodes) - 1)
    result = replace_nodes(graph, nodes, moved)
    labels = {moved[index]: label for index, label in model.labels.items()}
    banks = tuple(
        Bank(
            moved[bank.root],
            moved[bank.chosen],
            moved[bank.gates],
            tuple(moved[node] for node in bank.inputs),
            bank.experts,
        )
        for bank in model.banks
    )
    return replace(model, graph=result, labels=labels, banks=banks)


def replace_nodes(
    graph: Graph, nodes: Sequence[Node], moved: Sequence[int] | Mapping[int, int]
) -> Graph:
    """Return the graph with other nodes, of which ``moved`` says what the old ones became."""
    return Graph(
        graph.inputs,
        graph.weights,
        graph.states,
        tuple(nodes),
        tuple(GraphOutput(output.name, moved[output.node]) for output in graph.outputs),
        tuple(Update(update.state, moved[update.node]) for update in graph.updates),
        graph.symbols,
    )


def _find_in_large_kernels(graph: Graph, values: Sequence[Value]) -> frozenset[int]:
    """Return the nodes of kernels that are large; the others take no longer than their kernel."""
    sizes: list[int] = []
    for node in graph.nodes:
        sizes.append(measure_size(node, sizes))
    found: set[int] = set()
    for root, node in enumerate(graph.nodes):
        if node.op == "CONTIGUOUS" and _is_large(graph.nodes, values, sizes, root):
            pending = [*node.srcs]
            while pending:
                index = pending.pop()
                if index not in found and graph.nodes[index].op != "CONTIGUOUS":
                    found.add(index)
                    pending.extend(graph.nodes[index].srcs)
    return frozenset(found)


def _is_large(
    nodes: Sequence[Node], values: Sequence[Value], sizes: Sequence[int], root: int
) -> bool:
    """Return whether the kernel that writes a node to memory takes long to compile."""
    cost = measure_kernel(nodes, values, sizes, root, LARGE_KERNEL_US)
    return cost.cost_us > LARGE_KERNEL_US
