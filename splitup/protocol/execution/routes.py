"""Routes: which tensors a node reads, computes and sends in an execution. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitup.core import tuning
from splitup.core.errors import PeerFault
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import InputSource, Manifest, TaskSource
from splitup.messages.base import CLIENT
from splitup.messages.plans import Plan
from splitup.protocol.execution.task_queue import LocalTask, PortId


@dataclass(frozen=True, slots=True)
class Routes:
    """One node's part in an execution."""

    tasks: tuple[LocalTask, ...]
    targets: dict[PortId, tuple[str, ...]]  # other nodes that read an output of ours
    # the targets that need the output in some steps only, each with our outputs that are its tasks'
    # gates: in a step in which all of these gates are zero, the target needs no other output
    gates: dict[PortId, dict[str, frozenset[int]]]
    to_client: frozenset[PortId]  # our outputs that are the execution's outputs
    specs: dict[PortId, TensorSpec]  # what our tasks read
    head_starts: tuple[int, ...]  # in the queue, of every task of the model

    def find_gates(self, task: int) -> frozenset[int]:
        """Return the outputs of our task that are gates, so that zeros leave others unsent."""
        outputs = ((task, port) for port in itertools.count())
        ports = itertools.takewhile(self.gates.__contains__, outputs)
        return frozenset().union(*(gates for port in ports for gates in self.gates[port].values()))


def get_sources(manifest: Manifest, task: int) -> tuple[PortId, ...]:
    """Return the producer (task or CLIENT, port) of every input of a task, in order."""
    names = {port.name: index for index, port in enumerate(manifest.inputs)}
    return tuple(
        (CLIENT, names[entry.source.input])
        if isinstance(entry.source, InputSource)
        else (entry.source.task, entry.source.port)
        for entry in manifest.tasks[task].inputs
    )


def compute_path_flops(manifest: Manifest) -> tuple[int, ...]:
    """Return, for every task, the FLOPs of the heaviest path from it to the end of the graph."""
    path = [max(1, task.flops) for task in manifest.tasks]
    for source, target in sorted(manifest.edges(), reverse=True):
        path[source] = max(path[source], max(1, manifest.tasks[source].flops) + path[target])
    return tuple(path)


def compute_routes(
    plan: Plan, manifest: Manifest, node: str, executors: Sequence[str] | None = None
) -> Routes:
    """Return what ``node`` runs, reads and sends. Raises PeerFault when plan and model differ.

    ``executors`` are the tasks' current nodes; by default the plan's.
    """
    executors = plan.executors() if executors is None else executors
    if len(executors) != len(manifest.tasks):
        raise PeerFault(
            f"plan of {plan.request.execution_id} assigns {len(executors)} tasks; "
            f"the model has {len(manifest.tasks)}"
        )
    path = compute_path_flops(manifest)
    routes = Routes(
        tasks=(),
        targets={},
        gates={},
        to_client=frozenset(),
        specs={},
        head_starts=tuple(tuning.QUEUE_HEAD_START * flops // max(path) for flops in path),
    )
    mine = [index for index, executor in enumerate(executors) if executor == node]
    routes = replace(routes, tasks=tuple(_make_task(routes, manifest, task) for task in mine))
    for task in mine:
        _read_task(routes, manifest, node, executors, task)
    return replace(routes, to_client=_find_results(manifest, executors, node))


def move_task(
    routes: Routes, manifest: Manifest, node: str, executors: Sequence[str], task: int
) -> Routes:
    """Return the routes of ``node`` after a task got another executor.

    Who reads what our tasks write is as before: ``read_port`` looks anew. Who takes thousands of
    tasks over, one after the other, does not have all of the graph looked through for each.
    """
    tasks = {local.index: local for local in routes.tasks}
    if (executors[task] == node) == (task in tasks):
        return routes
    if executors[task] == node:
        tasks[task] = _make_task(routes, manifest, task)
        _read_task(routes, manifest, node, executors, task)
    else:
        del tasks[task]
        for port in range(len(manifest.tasks[task].outputs)):
            del routes.targets[task, port], routes.gates[task, port]
        read = {port for local in tasks.values() for port in local.inputs}
        for source in set(get_sources(manifest, task)) - read:
            del routes.specs[source]
    return replace(
        routes,
        tasks=tuple(local for _, local in sorted(tasks.items())),
        to_client=_find_results(manifest, executors, node),
    )


def read_port(
    routes: Routes, manifest: Manifest, node: str, executors: Sequence[str], port: PortId
) -> None:
    """Look at who reads an output of ours."""
    readers = {executors[reader] for reader, _ in manifest.consumers(*port)}
    routes.targets[port] = tuple(sorted(readers - {node}))
    routes.gates[port] = _find_gates(manifest, executors, *port)


def _make_task(routes: Routes, manifest: Manifest, index: int) -> LocalTask:
    task, inputs = manifest.tasks[index], get_sources(manifest, index)
    gate = None if task.gate is None else inputs[task.gate]
    return LocalTask(index, inputs, len(task.outputs), routes.head_starts[index], gate)


def _read_task(
    routes: Routes, manifest: Manifest, node: str, executors: Sequence[str], index: int
) -> None:
    task = manifest.tasks[index]
    specs = (port.spec for port in task.inputs)
    routes.specs.update(zip(get_sources(manifest, index), specs, strict=True))
    for port in range(len(task.outputs)):
        read_port(routes, manifest, node, executors, (index, port))


def _find_results(manifest: Manifest, executors: Sequence[str], node: str) -> frozenset[PortId]:
    """Return our outputs that are the execution's outputs."""
    ports = ((output.task, output.port) for output in manifest.outputs)
    return frozenset(port for port in ports if executors[port[0]] == node)


def _find_gates(
    manifest: Manifest, executors: Sequence[str], index: int, port: int
) -> dict[str, frozenset[int]]:
    """Return, for nodes that need an output in some steps only, the outputs that gate it."""
    needed: set[str] = set()
    found: dict[str, set[int]] = {}
    for reader, position in manifest.consumers(index, port):
        task = manifest.tasks[reader]
        gated = None if task.gate is None else task.inputs[task.gate].source
        if not isinstance(gated, TaskSource) or gated.task != index or position == task.gate:
            needed.add(executors[reader])
        else:
            found.setdefault(executors[reader], set()).add(gated.port)
    return {node: frozenset(gates) for node, gates in found.items() if node not in needed}
