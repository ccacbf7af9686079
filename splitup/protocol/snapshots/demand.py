"""How many nodes hold each task of the registered models, for nodes and for clients that wait.

Pure functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from splitup.core import limits
from splitup.graph.manifest import Manifest
from splitup.messages.snapshots import Heartbeat, ModelHolders, Snapshot

_NOBODY: Final[Mapping[str, str]] = {}


def compute_demand(
    manifests: Sequence[Manifest],
    live: Iterable[Heartbeat],
    operators: Mapping[str, str] = _NOBODY,
    retired: Collection[str] = (),
    used: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return a row for each distinct task of a model: of ``used`` ones first, then the least held.

    There are at most ``MAX_DEMAND_TASKS``. Models may share tasks: what each says of one is its
    developer's word, and may be false. ``retired`` models, by id, have no rows. ``used`` ones were
    paid for lately, which costs something: to register a model does not. A row holds
    what a node needs to choose tasks: model, index, sizes, price per step, holders. A row's
    ``operators`` is their number in the determinism class with the most: with fewer than
    ``MIN_OPERATORS`` the task is sold without verification. A node that the argument ``operators``
    does not list is its own operator.
    """
    holders: dict[str, int] = defaultdict(int)
    classes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for heartbeat in live:
        operator = operators.get(heartbeat.node, heartbeat.node)
        for task_id in heartbeat.resident:
            holders[task_id] += 1
            classes[task_id][heartbeat.determinism].add(operator)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for manifest in manifests:
        model_id = manifest.model_id
        if model_id in retired:
            continue
        for index, task in enumerate(manifest.tasks):
            if (model_id, task.task_id) in rows:
                continue
            most = max((len(who) for who in classes[task.task_id].values()), default=0)
            rows[model_id, task.task_id] = {
                "model_id": model_id,
                "task": index,
                "task_id": task.task_id,
                "vram_bytes": task.vram_bytes,
                "weights_bytes": task.weights_bytes,
                "price_nano_usdc": task.price_nano_usdc,
                "holders": holders[task.task_id],
                "operators": most,
                "used": model_id in used,
            }
    ranked = sorted(
        rows.values(),
        key=lambda row: (not row["used"], row["holders"], row["model_id"], row["task"]),
    )
    return ranked[: limits.MAX_DEMAND_TASKS]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the live nodes state in their heartbeats; made once for all clients that ask."""

    held: frozenset[str]  # tasks
    free_bytes: tuple[int, ...]  # of each node
    loading: int  # nodes

    @classmethod
    def collect(cls, live: Sequence[Heartbeat]) -> Holdings:
        """Return the holdings of these nodes."""
        return cls(
            frozenset(task_id for beat in live for task_id in beat.resident),
            tuple(beat.vram_free_bytes for beat in live),
            sum(beat.loading for beat in live),
        )

    def describe(
        self, model_id: str, manifest: Manifest | None, snapshot: Snapshot | None
    ) -> ModelHolders:
        """Return how far a model is loaded; ``snapshot`` is the latest one on chain.

        Without a manifest the model has no tasks.
        """
        listing = () if manifest is None else manifest.tasks
        tasks = {task.task_id: task.vram_bytes for task in listing}
        listed = frozenset[str]() if snapshot is None else snapshot.once(_list_held)
        missing = [size for task_id, size in tasks.items() if task_id not in self.held]
        least = min(missing, default=0)
        return ModelHolders(
            model_id=model_id,
            tasks=len(tasks),
            held=len(tasks.keys() & listed),
            reported=len(tasks.keys() & self.held),
            loading=self.loading,
            able=sum(free >= max(1, least) for free in self.free_bytes),
            live=len(self.free_bytes),
        )


def _list_held(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(task_id for entry in snapshot.entries for task_id in entry.resident)
