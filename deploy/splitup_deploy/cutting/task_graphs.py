"""Turn a partition into task graphs, and give tasks and ports readable names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitup.graph.ir import Graph, GraphOutput, Node, Update
from splitup.graph.operations.table import PARAMS
from splitup.graph.rules import CheckedGraph, check_task
from splitup_deploy.cutting.partition import Region, find_first_equals


@dataclass(frozen=True, slots=True)
class CutTask:
    """One task of a cut graph.

    ``sources`` holds for each input where its value comes from: a model input's name, or (task,
    output position). ``outputs`` are the nodes of the whole graph whose values are the outputs.
    """

    label: str
    graph: CheckedGraph
    sources: tuple[str | tuple[int, int], ...]
    outputs: tuple[int, ...]


def cut_graph(graph: CheckedGraph, parts: Sequence[Sequence[Region]]) -> list[CutTask]:
    """Return one task per part, in order."""
    names = _name_values(graph, [region for part in parts for region in part])
    labels = name_tasks(parts)
    wanted = {output.node for output in graph.outputs}
    readers: dict[int, set[int]] = {}
    for index, part in enumerate(parts):
        for region in part:
            for read in region.reads:
                readers.setdefault(read, set()).add(index)
    made: dict[int, tuple[int, int]] = {}
    tasks = []
    for index, part in enumerate(parts):
        roots = [region.root for region in part]
        outputs = [r for r in roots if r in wanted or readers.get(r, set()) - {index}]
        made.update({root: (index, port) for port, root in enumerate(outputs)})
        reads = sorted({read for region in part for read in region.reads} - set(roots))
        nodes = sorted({node for region in part for node in region.nodes})
        cut, inputs = _extract(graph, nodes, reads, outputs, names)
        sources: list[str | tuple[int, int]] = [*inputs, *(made[read] for read in reads)]
        tasks.append(CutTask(labels[index], cut, tuple(sources), tuple(outputs)))
    return tasks


def name_tasks(parts: Sequence[Sequence[Region]]) -> list[str]:
    """Return a short name per task from its regions' labels, "group: detail"."""
    labels = []
    for part in parts:
        groups = list(dict.fromkeys(region.label.partition(":")[0] for region in part))
        if len(groups) <= 2:
            labels.append(" + ".join(groups))
        else:
            labels.append(f"{groups[0]} ... {groups[-1]}")
    total, seen = Counter(labels), Counter[str]()
    for index, label in enumerate(labels):
        seen[label] += 1
        if total[label] > 1:
            labels[index] = f"{label} ({seen[label]} of {total[label]})"
    return labels


def _name_values(graph: Graph, regions: Sequence[Region]) -> dict[int, str]:
    """Return a port name per value in memory: its label, or the output's own name."""
    names: dict[int, str] = {}
    for region in regions:
        name = re.sub(r"[^a-z0-9]+", "-", region.label.lower()).strip("-") or "value"
        names[region.root] = f"{name}-{region.root}" if name in names.values() else name
    for output in graph.outputs:
        names[output.node] = output.name
    return names


def _extract(
    graph: CheckedGraph,
    nodes: Sequence[int],
    reads: Sequence[int],
    outputs: Sequence[int],
    names: dict[int, str],
    *,
    merges: bool = True,
) -> tuple[CheckedGraph, list[str]]:
    """Return the sub-graph of ``nodes`` and its inputs: model inputs first, then ``reads``.

    Equal weights, such as the layers' rope tables, become one, and so does what is computed alike
    from them: tinygrad computes and holds such a value once, too. Nothing is merged where that
    would make two outputs or two new states one value, which no graph may give twice.
    """
    used: dict[str, list[int]] = {op: [] for op in PARAMS}
    for index in nodes:
        node = graph.nodes[index]
        if node.op in PARAMS:
            assert isinstance(node.arg, int)  # check_graph has seen to it
            used[node.op].append(node.arg)
    place = {op: {arg: i for i, arg in enumerate(sorted(set(args)))} for op, args in used.items()}
    held = list(place["WEIGHT"])
    firsts = [*range(len(held))]
    if merges:
        firsts = find_first_equals([graph.weights[arg] for arg in held])
    kept = {first: i for i, first in enumerate(sorted(set(firsts)))}
    place["WEIGHT"] = {arg: kept[first] for arg, first in zip(held, firsts, strict=True)}
    inputs = [graph.inputs[arg] for arg in place["INPUT"]]
    ports = [graph.values[read].make_spec(names[read]) for read in reads]
    bound = {spec.rows for spec in (*inputs, *ports)}
    result: list[Node] = []
    moved: dict[int, int] = {}
    for position, read in enumerate(reads, len(inputs)):
        moved[read] = len(result)
        result.append(Node("INPUT", graph.values[read].dtype, (), position))
    made: dict[tuple[Node, str], int] = {}  # with the argument's text: 0.0 equals -0.0
    for index in nodes:
        node = graph.nodes[index]
        arg = place[node.op][node.arg] if node.op in PARAMS else node.arg  # type: ignore[index]
        node = Node(node.op, node.dtype, tuple(moved[src] for src in node.srcs), arg)
        moved[index] = made.setdefault((node, repr(arg)), len(result)) if merges else len(result)
        if moved[index] == len(result):
            result.append(node)
    states = place["STATE"]
    given = [update.node for update in graph.updates if update.state in states]
    if merges and any(len({moved[n] for n in ns}) < len(ns) for ns in (outputs, given)):
        return _extract(graph, nodes, reads, outputs, names, merges=False)
    cut = Graph(
        inputs=(*inputs, *ports),
        weights=tuple(graph.weights[held[first]] for first in kept),
        states=tuple(graph.states[arg] for arg in states),
        nodes=tuple(result),
        outputs=tuple(GraphOutput(names[root], moved[root]) for root in outputs),
        updates=tuple(
            Update(states[update.state], moved[update.node])
            for update in graph.updates
            if update.state in states
        ),
        symbols=tuple(symbol for symbol in graph.symbols if symbol.name in bound),
    )
    return check_task(cut), [spec.name for spec in inputs]
