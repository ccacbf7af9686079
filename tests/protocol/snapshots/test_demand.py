"""What nodes are told about the network's needs."""

from __future__ import annotations

import pytest

from splitup.core import limits
from splitup.messages.snapshots import Heartbeat
from splitup.protocol.snapshots.demand import Holdings, compute_demand
from tests.builders import address, make_chain_manifest, make_snapshot, task_id


def beat(number: int, *tasks: int) -> Heartbeat:
    return Heartbeat(
        node=address(number),
        boot_id="ab" * 32,
        sequence=1,
        sent_at_ms=1,
        block_hash="0x" + "01" * 32,
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
        "price_nano_usdc": 10_000,
        "holders": 0,
        "operators": 0,
        "used": False,
    }


def test_a22_a_tasks_operators_are_counted_in_one_class() -> None:
    live = [beat(number, 0) for number in range(1, 5)]
    manifest = make_chain_manifest(1)

    def show(operators: dict[str, str]) -> tuple[int, int]:
        row = compute_demand([manifest], live, operators)[0]
        return row["holders"], row["operators"]

    assert show({}) == (4, 4)
    assert show(dict.fromkeys(map(address, (1, 2, 3)), address(9))) == (4, 2)
    live[0] = live[0].model_copy(update={"determinism": "CUDA"})
    live[1] = live[1].model_copy(update={"determinism": "CUDA"})
    assert show({}) == (4, 2), "nodes of two classes cannot check each other"


def test_s95_false_words_about_a_task_hide_no_others() -> None:
    honest = make_chain_manifest(3)
    tasks = [task.model_copy(update={"vram_bytes": 2**50}) for task in honest.tasks]
    false = honest.model_copy(update={"tasks": tuple(tasks)})
    rows = compute_demand([false, honest], [])
    assert {(row["model_id"], row["vram_bytes"]) for row in rows} == {
        (false.model_id, 2**50),
        (honest.model_id, 1000),
    }


def test_a_models_task_is_listed_once_and_the_list_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = make_chain_manifest(3)
    manifests = [manifest.model_copy(update={"tasks": manifest.tasks * 2}), make_chain_manifest(5)]
    assert len(compute_demand(manifests, [])) == 8
    monkeypatch.setattr(limits, "MAX_DEMAND_TASKS", 2)
    assert len(compute_demand(manifests, [])) == 2


def test_s101_models_in_use_are_listed_whatever_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else thousands of tasks that nobody holds would push all others off the list."""
    monkeypatch.setattr(limits, "MAX_DEMAND_TASKS", 6)
    used, others = make_chain_manifest(2), [make_chain_manifest(count) for count in range(3, 9)]
    live = [beat(number, 0, 1) for number in range(5)]
    rows = compute_demand([*others, used], live, used={used.model_id})
    listed = [(row["model_id"] == used.model_id, row["task"], row["used"]) for row in rows]
    assert listed[:2] == [(True, 0, True), (True, 1, True)] and len(rows) == 6
    assert not any(row["used"] for row in rows[2:])


def test_a_retired_model_is_not_in_demand() -> None:
    first, second = make_chain_manifest(3), make_chain_manifest(5)
    assert compute_demand([second], [], retired=(second.model_id,)) == []
    rows = compute_demand([first, second], [], retired=(second.model_id,))
    assert {row["model_id"] for row in rows} == {first.model_id} and len(rows) == 3


def test_holders_are_those_of_the_snapshot_and_heartbeats_tell_the_next_ones() -> None:
    manifest = make_chain_manifest(3)
    beats = [beat(1, 0, 2), beat(2, 77)]
    beats[1] = beats[1].model_copy(update={"loading": True, "vram_free_bytes": 1000})
    holdings = Holdings.collect(beats)
    found = holdings.describe(manifest.model_id, manifest, make_snapshot(1, 3, resident={1: [2]}))
    assert (found.tasks, found.held, found.reported) == (3, 1, 2)
    assert (found.loading, found.able, found.live) == (1, 1, 2)
    unknown = holdings.describe(manifest.model_id, None, None)
    assert (unknown.tasks, unknown.held, unknown.reported, unknown.loading) == (0, 0, 0, 1)
