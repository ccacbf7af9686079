"""Which fields the roots of snapshots and plans bind, and which they do not."""

from __future__ import annotations

import pytest

from splitup.messages.plans import Plan
from splitup.messages.snapshots import (
    Snapshot,
    TaskClasses,
    compute_classes,
    compute_reference,
    make_held_leaves,
)
from splitup.protocol.planning.selection import compute_plan
from tests.builders import (
    address,
    make_chain_manifest,
    make_request,
    make_snapshot,
    task_id,
)

SEED = "0x" + "5e" * 32


def make_plan(snapshot: Snapshot) -> Plan:
    return compute_plan(make_request(), SEED, snapshot, make_chain_manifest(2))


@pytest.mark.parametrize(
    "change",
    [
        {"node": address(9)},
        {"operator": address(9)},
        {"signing_key": "0x" + "99" * 32},
        {"endpoint": "http://elsewhere"},
        {"stake_micro_usdc": 1},
        {"rtt_ms": 11},
        {"queue_ms": 11},
        {"speed_mflops": 11},
        {"bandwidth_kbps": 11},
        {"vram_free_bytes": 11},
        {"credit_milli": -11},
        {"determinism": "CUDA"},
        {"resident": (task_id(0),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a15_a_snapshots_root_binds_every_field_of_every_entry(change: dict[str, object]) -> None:
    snapshot = make_snapshot(5, 2)
    for row in range(5):
        entries = list(snapshot.entries)
        entries[row] = entries[row].model_copy(update=change)
        other = snapshot.model_copy(update={"entries": tuple(entries)})
        assert other.root() != snapshot.root()


def test_a15_a_snapshots_root_binds_its_slot_and_order() -> None:
    snapshot = make_snapshot(3, 1)
    changes: list[dict[str, object]] = [
        *({name: 2} for name in ("configuration", "sequence", "epoch")),
        {"entries": snapshot.entries[:2]},
        {"entries": snapshot.entries[::-1]},
        {"entries": ()},
    ]
    roots = {snapshot.model_copy(update=change).root() for change in changes}
    assert len(roots | {snapshot.root()}) == 1 + len(changes)


def test_a15_a_plans_root_binds_everything_but_the_requests_block() -> None:
    plan = make_plan(make_snapshot(4, 2))
    terms = plan.terms[0].model_copy(update={"ready_ms": 1})
    tolerant = plan.terms[0].model_copy(update={"crosses_classes": True})
    changes: list[dict[str, object]] = [
        {"seed": "0x" + "5f" * 32},
        {"tasks": (plan.tasks[0][::-1], plan.tasks[1])},
        {"tasks": plan.tasks[::-1]},
        {"nodes": plan.nodes[:3]},
        {"terms": (terms, plan.terms[1])},
        {"terms": (tolerant, plan.terms[1])},
        {"terms": ()},
        {"unverifiable": (1,)},
        {"request": plan.request.model_copy(update={"deadline": 1})},
        {"request": plan.request.model_copy(update={"snapshot_root": SEED})},
    ]
    roots = {plan.model_copy(update=change).root() for change in changes}
    assert len(roots | {plan.root()}) == 1 + len(changes)
    moved = plan.request.model_copy(update={"block_hash": "0x" + "ab" * 32})
    assert plan.model_copy(update={"request": moved}).root() == plan.root()


def test_the_reference_is_the_median_of_what_was_measured() -> None:
    figures = {1: {"speed_mflops": 5}, 2: {"speed_mflops": 9}, 3: {"speed_mflops": 7}}
    entries = make_snapshot(4, 0, rtts={1: 100, 2: 30}, figures=figures).entries
    found = compute_reference(entries)
    assert (found.rtt_ms, found.speed_mflops, found.bandwidth_kbps) == (10, 7, 0)
    empty = compute_reference(())
    assert (empty.rtt_ms, empty.speed_mflops) == (0, 0)


def test_a_class_counts_by_its_operators() -> None:
    operators = {1: 50, 2: 50}
    classes = {1: "a", 2: "a", 3: "a", 4: "b", 5: "b", 6: "b", 7: "?c", 8: "?c", 9: "?c"}
    snapshot = make_snapshot(9, 1, operators=operators, classes=classes)
    assert compute_classes(snapshot.entries) == {task_id(0): TaskClasses(("b",), ("?c",))}
    fewer = make_snapshot(8, 1, operators=operators, classes=classes)
    assert compute_classes(fewer.entries) == {task_id(0): TaskClasses(("b",), ())}
    moved = {task_id(0): TaskClasses((), ("b",))}
    assert make_held_leaves(moved) != make_held_leaves(compute_classes(fewer.entries))
