"""How a cut model would run: the time of every task, the critical path, and parallel tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitup.graph.manifest import Manifest, Task, TaskSource
from splitup_deploy.cutting.timing import predict_compute_ps, predict_transfer_ps

_BYTES_PER_FLOP = 4  # what a step reads takes part in an operation, and has at most 4 bytes


@dataclass(frozen=True, slots=True)
class Edge:
    """The bytes that task ``source`` sends to task ``target`` in every step."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Predicted times per step, in picoseconds, and the shape of the DAG.

    ``levels``: tasks of one level read only from lower levels and run in parallel. ``critical`` is
    the critical path, and ``latency_ps`` the time of its tasks and of the transfers between them.
    ``classes_bytes`` holds for every task the smallest of the target sizes that it fits, or None.
    """

    manifest: Manifest
    times_ps: tuple[int, ...]
    edges: tuple[Edge, ...]
    levels: tuple[int, ...]
    critical: tuple[int, ...]
    latency_ps: int
    targets_bytes: tuple[int, ...]
    classes_bytes: tuple[int | None, ...]

    @property
    def imbalance(self) -> float:
        """Return how much longer the longest task takes than the mean one: 0.1 is 10 %."""
        return max(self.times_ps) * len(self.times_ps) / max(sum(self.times_ps), 1) - 1

    @property
    def class_counts(self) -> dict[int | None, int]:
        """Return the number of tasks per class, every class of the given ones included."""
        counts: Counter[int | None] = Counter(self.classes_bytes)
        rows: dict[int | None, int] = {target: counts[target] for target in self.targets_bytes}
        return rows | ({None: counts[None]} if counts[None] else {})


def compute_profile(
    manifest: Manifest, times_ps: Sequence[int] | None = None, targets_bytes: Sequence[int] = ()
) -> Profile:
    """Return the profile; without times from the compiler they are estimated from the manifest."""
    times = tuple(map(_estimate_ps, manifest.tasks)) if times_ps is None else tuple(times_ps)
    edges = list_edges(manifest)
    levels = [0] * len(times)
    ends = list(times)
    before: list[int | None] = [None] * len(times)
    for edge in edges:  # by target, so that every source is finished
        levels[edge.target] = max(levels[edge.target], levels[edge.source] + 1)
        end = ends[edge.source] + predict_transfer_ps(edge.nbytes) + times[edge.target]
        if end > ends[edge.target]:
            ends[edge.target], before[edge.target] = end, edge.source
    last: int | None = max(range(len(ends)), key=ends.__getitem__)
    critical: list[int] = []
    while last is not None:
        critical.append(last)
        last = before[last]
    targets = tuple(sorted(targets_bytes))
    return Profile(
        manifest=manifest,
        times_ps=times,
        edges=edges,
        levels=tuple(levels),
        critical=tuple(reversed(critical)),
        latency_ps=max(ends),
        targets_bytes=targets,
        classes_bytes=tuple(
            next((target for target in targets if task.vram_bytes <= target), None)
            for task in manifest.tasks
        ),
    )


def list_edges(manifest: Manifest) -> tuple[Edge, ...]:
    """Return the edges of the task graph, sorted by target and source."""
    sizes: Counter[tuple[int, int]] = Counter()
    for target, task in enumerate(manifest.tasks):
        for port in task.inputs:
            if isinstance(port.source, TaskSource):
                sizes[target, port.source.task] += port.nbytes
    return tuple(Edge(source, target, n) for (target, source), n in sorted(sizes.items()))


def _estimate_ps(task: Task) -> int:
    """Estimate a task's time from its weights and state, or its operations if it reads less."""
    nbytes = min(task.weights_bytes + task.state_bytes, _BYTES_PER_FLOP * task.flops)
    return predict_compute_ps(nbytes, task.flops)
