"""Routes: which tensors a node reads, computes and sends in an execution. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from splitup.core import tuning
from splitup.core.errors import PeerFault
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import InputSource, Manifest, TaskSource
from splitup.messages.base import CLIENT
from splitup.messages.plans import Plan, PlanNode
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
    successors: dict[str, PlanNode]  # the nodes in ``targets``, by address
    specs: dict[PortId, TensorSpec]  # what our tasks read

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
    mine = [index for index, executor in enumerate(executors) if executor == node]
    path = compute_path_flops(manifest)
    longest = max(path)
    specs: dict[PortId, TensorSpec] = {}
    targets: dict[PortId, tuple[str, ...]] = {}
    gates: dict[PortId, dict[str, frozenset[int]]] = {}
    tasks = []
    for index in mine:
        task = manifest.tasks[index]
        inputs = get_sources(manifest, index)
        specs.update(zip(inputs, (port.spec for port in task.inputs), strict=True))
        head_start = tuning.QUEUE_HEAD_START * path[index] // longest
        gate = None if task.gate is None else inputs[task.gate]
        tasks.append(LocalTask(index, inputs, len(task.outputs), head_start, gate))
        for port in range(len(task.outputs)):
            readers = {executors[reader] for reader, _ in manifest.consumers(index, port)}
            targets[index, port] = tuple(sorted(readers - {node}))
            gates[index, port] = _find_gates(manifest, executors, index, port)
    named = sorted({target for readers in targets.values() for target in readers})
    return Routes(
        tasks=tuple(tasks),
        targets=targets,
        gates=gates,
        to_client=frozenset(
            (output.task, output.port) for output in manifest.outputs if output.task in mine
        ),
        successors={target: plan.node_of(target) for target in named},
        specs=specs,
    )


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
