"""What the network lacks: for every task of every registered model, how many live nodes hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from splitup import limits
from splitup.graph.manifest import Manifest
from splitup.wire import Heartbeat


def compute_demand(
    manifests: Sequence[Manifest], live: Iterable[Heartbeat]
) -> list[dict[str, Any]]:
    """Return one row per distinct task, the least held first, at most ``MAX_DEMAND_TASKS``.

    Everything a node needs to choose: model, place, sizes, price per step, holders.
    """
    holders = Counter(task for heartbeat in live for task in heartbeat.resident)
    rows: dict[str, dict[str, Any]] = {}
    for manifest in manifests:
        model_id = manifest.model_id
        for index, task in enumerate(manifest.tasks):
            rows.setdefault(
                task.task_id,
                {
                    "model_id": model_id,
                    "task": index,
                    "task_id": task.task_id,
                    "vram_bytes": task.vram_bytes,
                    "weights_bytes": task.weights_bytes,
                    "price_micro_usdc": task.price_micro_usdc,
                    "holders": holders[task.task_id],
                },
            )
    ranked = sorted(rows.values(), key=lambda row: (row["holders"], row["model_id"], row["task"]))
    return ranked[: limits.MAX_DEMAND_TASKS]
