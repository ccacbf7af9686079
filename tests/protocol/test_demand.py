"""What nodes are told about the network's needs."""

from __future__ import annotations

import pytest

from splitup import limits
from splitup.protocol.demand import compute_demand
from splitup.wire import Heartbeat
from tests.builders import address, make_chain_manifest, task_id


def beat(number: int, *tasks: int) -> Heartbeat:
    return Heartbeat(
        node=address(number),
        boot_id="ab" * 32,
        sequence=1,
        sent_at_ms=1,
        block_number=0,
        queue_ms=0,
        resident=tuple(sorted(map(task_id, tasks))),
        vram_free_bytes=0,
        determinism="CPU",
    )


def test_the_least_held_task_comes_first() -> None:
    manifest = make_chain_manifest(3)
    rows = compute_demand([manifest], [beat(1, 0, 2), beat(2, 0, 77)])
    assert [(row["task"], row["holders"]) for row in rows] == [(1, 0), (2, 1), (0, 2)]
    assert rows[0] == {
        "model_id": manifest.model_id,
        "task": 1,
        "task_id": task_id(1),
        "vram_bytes": 1000,
        "weights_bytes": 0,
        "price_micro_usdc": 10,
        "holders": 0,
    }


def test_a_task_of_two_models_is_listed_once_and_the_list_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = [make_chain_manifest(3), make_chain_manifest(5)]
    assert len(compute_demand(manifests, [])) == 5
    monkeypatch.setattr(limits, "MAX_DEMAND_TASKS", 2)
    assert len(compute_demand(manifests, [])) == 2
