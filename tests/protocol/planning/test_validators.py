"""Who may recompute a task, as an order shows it: two entries instead of a snapshot."""

from __future__ import annotations

import pytest

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.plans import Plan
from splitup.messages.snapshots import OpenedSnapshot, Snapshot
from splitup.protocol.planning.selection import compute_plan, rank_validators
from splitup.protocol.planning.validators import check_validators, open_snapshot
from tests.builders import make_chain_manifest, make_request, make_snapshot

SEED = "0x" + "5e" * 32
MANIFEST = make_chain_manifest(2)
TASK = MANIFEST.tasks[0].task_id


def make_plan(snapshot: Snapshot) -> tuple[Plan, str]:
    """A plan with this snapshot, and who runs its first task."""
    request = make_request().model_copy(update={"snapshot_root": snapshot.root()})
    plan = compute_plan(request, SEED, snapshot, MANIFEST)
    return plan, plan.executors()[0]


def test_whoever_is_ranked_is_shown_to_be_a_validator_and_nobody_else() -> None:
    entries = list(make_snapshot(12, 2).entries)
    for row, change in enumerate(
        (
            {"determinism": "another"},
            {"resident": (MANIFEST.tasks[1].task_id,)},
            {"operator": entries[2].node},
            {"operator": entries[2].node},
        )
    ):
        entries[row] = entries[row].model_copy(update=change)
    snapshot = make_snapshot(12, 2).model_copy(update={"entries": tuple(entries)})
    plan, _ = make_plan(snapshot)
    for executor in (entries[2].node, entries[7].node):
        executors = (executor, plan.executors()[1])
        ranked = rank_validators(SEED, 0, plan, snapshot, MANIFEST, executors)
        able = {
            entry.node
            for entry in entries
            if check_validators(
                open_snapshot(snapshot, (executor, entry.node)), plan, executor, TASK
            )
        }
        assert set(ranked) <= able
        operators = {entry.node: entry.operator or entry.node for entry in entries}
        assert {operators[node] for node in able} == {operators[node] for node in ranked}
        assert executor not in able


def test_a15_entries_are_those_of_the_plans_snapshot() -> None:
    snapshot = make_snapshot(9, 2)
    plan, executor = make_plan(snapshot)
    other = next(e.node for e in snapshot.entries if e.node != executor)
    shown = open_snapshot(snapshot, (executor, other))
    assert check_validators(shown, plan, executor, TASK) == (other,)
    later = snapshot.model_copy(update={"epoch": snapshot.epoch + 1})
    first, second = shown.entries

    def forge(**change: object) -> OpenedSnapshot:
        return shown.model_copy(update={"entries": (first, second.model_copy(update=change))})

    entry = second.entry.model_copy(update={"signing_key": "0x" + "77" * 32})
    wrong = {
        "header is not that of": open_snapshot(later, (executor, other)),
        f"the executor {executor} is not shown": open_snapshot(snapshot, (other,)),
        "does not lead to the root": forge(entry=entry),
        "a proof of leaf": forge(proof=second.proof[:-1]),
        "proof of leaf 9 of 9": forge(row=9),
    }
    for problem, bad in wrong.items():
        with pytest.raises(PeerFault, match=problem):
            check_validators(bad, plan, executor, TASK)


def test_an_order_does_not_grow_with_the_network() -> None:
    snapshot = make_snapshot(2_000, 2)
    nodes = (snapshot.entries[0].node, snapshot.entries[-1].node)
    shown = open_snapshot(snapshot, nodes)
    assert len(snapshot.canonical_bytes()) > 100 * len(shown.canonical_bytes())
    assert OpenedSnapshot.parse(shown.canonical_bytes()) == shown
    assert (limits.MAX_NODES - 1).bit_length() == limits.MAX_NODES_DEPTH
