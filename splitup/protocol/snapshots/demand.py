"""Demand for nodes: how many hold each task of the registered models. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from splitup.core import limits
from splitup.graph.manifest import Manifest
from splitup.messages.snapshots import Heartbeat

_NOBODY: Final[Mapping[str, str]] = {}


def compute_demand(
    manifests: Sequence[Manifest],
    live: Iterable[Heartbeat],
    operators: Mapping[str, str] = _NOBODY,
) -> list[dict[str, Any]]:
    """Return one row per distinct task, the least held first, at most ``MAX_DEMAND_TASKS``.

    A row holds what a node needs to choose tasks: model, index, sizes, price per step, holders. A
    task is ``verifiable`` when ``MIN_OPERATORS`` operators hold it in one determinism class; the
    row's ``operators`` is their number in the class with the most. A node that the argument
    ``operators`` does not list is its own operator.
    """
    holders: dict[str, int] = defaultdict(int)
    classes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for heartbeat in live:
        operator = operators.get(heartbeat.node, heartbeat.node)
        for task_id in heartbeat.resident:
            holders[task_id] += 1
            classes[task_id][heartbeat.determinism].add(operator)
    rows: dict[str, dict[str, Any]] = {}
    for manifest in manifests:
        model_id = manifest.model_id
        for index, task in enumerate(manifest.tasks):
            if task.task_id in rows:
                continue
            most = max((len(who) for who in classes[task.task_id].values()), default=0)
            rows[task.task_id] = {
                "model_id": model_id,
                "task": index,
                "task_id": task.task_id,
                "vram_bytes": task.vram_bytes,
                "weights_bytes": task.weights_bytes,
                "price_micro_usdc": task.price_micro_usdc,
                "holders": holders[task.task_id],
                "operators": most,
                "verifiable": most >= limits.MIN_OPERATORS,
            }
    ranked = sorted(rows.values(), key=lambda row: (row["holders"], row["model_id"], row["task"]))
    return ranked[: limits.MAX_DEMAND_TASKS]
