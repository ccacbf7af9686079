"""Where tensors go: what a plan and a manifest mean for one node. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitup import limits
from splitup.errors import PeerFault
from splitup.graph.manifest import InputSource, Manifest
from splitup.protocol.queue import LocalTask, PortId
from splitup.tensors import TensorSpec
from splitup.wire import CLIENT, Plan, PlanNode


@dataclass(frozen=True, slots=True)
class Routes:
    """One node's part in an execution."""

    tasks: tuple[LocalTask, ...]
    targets: dict[PortId, tuple[str, ...]]  # other nodes that read an output of ours
    to_client: frozenset[PortId]  # our outputs that are the execution's outputs
    successors: dict[str, PlanNode]  # the nodes in ``targets``, by address
    specs: dict[PortId, TensorSpec]  # what our tasks read


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

    ``executors`` are the tasks' nodes of now; by default the plan's first candidates.
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
    tasks = []
    for index in mine:
        task = manifest.tasks[index]
        inputs = get_sources(manifest, index)
        specs.update(zip(inputs, (port.spec for port in task.inputs), strict=True))
        head_start = limits.QUEUE_HEAD_START * path[index] // longest
        tasks.append(LocalTask(index, inputs, len(task.outputs), head_start))
        for port in range(len(task.outputs)):
            readers = {executors[reader] for reader, _ in manifest.consumers(index, port)}
            targets[index, port] = tuple(sorted(readers - {node}))
    named = sorted({target for readers in targets.values() for target in readers})
    return Routes(
        tasks=tuple(tasks),
        targets=targets,
        to_client=frozenset(
            (output.task, output.port) for output in manifest.outputs if output.task in mine
        ),
        successors={target: plan.node_of(target) for target in named},
        specs=specs,
    )
