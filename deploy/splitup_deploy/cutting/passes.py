"""Passes over a whole graph before it is cut. Each returns a new graph that is checked again.

Both insert CONTIGUOUS after reductions, and into expressions that are too large for one kernel. So
the graph states where values are written to memory, and machines that compile parts of
it do not decide that again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from splitup.graph.compile_cost import measure_kernel, measure_size
from splitup.graph.ir import Graph, Node, Output, Update
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
    graph = model.graph
    found = infer_values(graph)
    consumers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for src in node.srcs:
            consumers.setdefault(src, []).append(index)
    nodes: list[Node] = []
    values: list[Value] = []
    sizes: list[int] = []
    moved: list[int] = []
    for index, node in enumerate(graph.nodes):
        nodes.append(Node(node.op, node.dtype, tuple(moved[src] for src in node.srcs), node.arg))
        values.append(found[index])
        sizes.append(measure_size(nodes[-1], sizes))
        users = [graph.nodes[user].op for user in consumers.get(index, [])]
        is_stored = node.op in (*PARAMS, "CONTIGUOUS") or users == ["CONTIGUOUS"]
        if not is_stored and (chosen[index] or _is_large(nodes, values, sizes)):
            nodes.append(Node("CONTIGUOUS", node.dtype, (len(nodes) - 1,)))
            values.append(found[index])
            sizes.append(measure_size(nodes[-1], sizes))
        moved.append(len(nodes) - 1)
    result = Graph(
        graph.inputs,
        graph.weights,
        graph.states,
        tuple(nodes),
        tuple(Output(output.name, moved[output.node]) for output in graph.outputs),
        tuple(Update(update.state, moved[update.node]) for update in graph.updates),
        graph.symbols,
    )
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
    return replace(model, graph=check_graph(result), labels=labels, banks=banks)


def _is_large(nodes: Sequence[Node], values: Sequence[Value], sizes: Sequence[int]) -> bool:
    """Return whether the kernel that writes the last node to memory takes long to compile."""
    cost = measure_kernel(nodes, values, sizes, len(nodes) - 1, LARGE_KERNEL_US)
    return cost.cost_us > LARGE_KERNEL_US
