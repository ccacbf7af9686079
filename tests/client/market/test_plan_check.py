from __future__ import annotations

import pytest

from splitup.chain.event_stream import ChainEvent
from splitup.chain.market import compute_locks
from splitup.client.market.plan_check import PassedOver, check_choices, find_unexplained
from splitup.core.errors import InvalidModel
from splitup.crypto.quorum import pack_word
from splitup.messages.plans import Plan, PlanCertificate
from splitup.messages.snapshots import UNRULED, Snapshot
from splitup.protocol.planning.exposure import Economics, add_exposures, compute_exposure
from splitup.protocol.planning.selection import compute_plan
from tests.builders import (
    FOREIGN_CLASS,
    make_chain_manifest,
    make_request,
    make_snapshot,
    make_tolerant,
)

MANIFEST = make_chain_manifest(3)
ECONOMICS = Economics(sampling_bps=800, reward_milli=1_200, slash_milli=100_000)
SEED = "0x" + "5e" * 32


def make_plan() -> tuple[Plan, Snapshot]:
    snapshot = make_snapshot(5, 3)
    request = make_request().model_copy(
        update={"snapshot_root": snapshot.root(), "model_id": MANIFEST.model_id}
    )
    plan = compute_plan(request, SEED, snapshot, MANIFEST)
    return add_exposures(plan, MANIFEST, snapshot, ECONOMICS), snapshot


def certify(plan: Plan) -> PlanCertificate:
    return PlanCertificate(plan=plan, seed_signature="0x", signatures=())


def test_a_right_plan_is_right() -> None:
    plan, snapshot = make_plan()
    checked = check_choices(certify(plan), snapshot, MANIFEST, ECONOMICS)
    assert (checked.difference, checked.challenge) == ("", None)


def test_a_wrong_choice_is_named_and_proved() -> None:
    plan, snapshot = make_plan()
    first, second, *rest = plan.tasks[1]
    tasks = (plan.tasks[0], (second, first, *rest), plan.tasks[2])
    forged = plan.model_copy(update={"tasks": tasks})
    checked = check_choices(certify(forged), snapshot, MANIFEST, ECONOMICS)
    assert checked.difference == f"task 1 is given to {second}, but {first} comes first"
    assert checked.challenge is not None and checked.challenge.function == "reportSelection"


def test_a_list_that_ends_early_is_wrong_and_not_for_the_chain_to_judge() -> None:
    plan, snapshot = make_plan()
    forged = plan.model_copy(update={"tasks": (plan.tasks[0][:1], *plan.tasks[1:])})
    checked = check_choices(certify(forged), snapshot, MANIFEST, ECONOMICS)
    assert checked.difference == "the fallbacks of task 0 are not the nodes that come next"
    assert checked.challenge is None


@pytest.mark.parametrize("is_tolerant", [True, False])
def test_a_plan_with_a_false_word_on_tolerances_is_wrong(is_tolerant: bool) -> None:
    """The false word would shut GPUs out, or let nodes run what members cannot verify."""
    manifest = make_tolerant(MANIFEST) if is_tolerant else MANIFEST
    liar = MANIFEST if is_tolerant else make_tolerant(MANIFEST)
    snapshot = make_snapshot(6, 3, classes=dict.fromkeys((4, 5, 6), UNRULED + FOREIGN_CLASS))
    request = make_request().model_copy(
        update={"snapshot_root": snapshot.root(), "model_id": manifest.model_id}
    )
    right, forged = (
        add_exposures(compute_plan(request, SEED, snapshot, m), m, snapshot, ECONOMICS)
        for m in (manifest, liar)
    )
    assert forged.root() != right.root()
    assert check_choices(certify(right), snapshot, manifest, ECONOMICS).difference == ""
    checked = check_choices(certify(forged), snapshot, manifest, ECONOMICS)
    assert checked.difference == "its task figures differ from the model's"
    honest_terms = forged.model_copy(update={"terms": right.terms})
    checked = check_choices(certify(honest_terms), snapshot, manifest, ECONOMICS)
    assert checked.challenge is not None and checked.challenge.function == "reportSelection"


def test_another_models_manifest_is_refused() -> None:
    plan, snapshot = make_plan()
    with pytest.raises(InvalidModel, match="not of model"):
        check_choices(certify(plan), snapshot, make_chain_manifest(2), ECONOMICS)


def test_a_node_without_free_stake_is_passed_over_and_another_is_not() -> None:
    plan, snapshot = make_plan()
    first, second = plan.tasks[0][:2]
    needed = compute_exposure((0,), MANIFEST, plan.request.steps, ECONOMICS)
    entries = tuple(
        entry.model_copy(update={"locked_micro_usdc": entry.stake_micro_usdc})
        if entry.node == first
        else entry
        for entry in snapshot.entries
    )
    full = snapshot.model_copy(update={"entries": entries})
    request = plan.request.model_copy(update={"snapshot_root": full.root()})
    listed = compute_plan(request, SEED, full, MANIFEST)
    right = add_exposures(listed, MANIFEST, full, ECONOMICS)
    assert right.places[0] == 1
    checked = check_choices(certify(right), full, MANIFEST, ECONOMICS)
    assert checked.difference == ""
    stake = next(e.stake_micro_usdc for e in entries if e.node == first)
    assert checked.passed_over[0] == PassedOver(0, first, needed, stake, stake)

    unfair = add_exposures(listed, MANIFEST, snapshot, ECONOMICS)  # as if it had stake left
    checked = check_choices(certify(unfair), full, MANIFEST, ECONOMICS)
    expected = f"task 0 is run by {first}, but {second} is the first with stake for it"
    assert checked.difference == expected
    cheap = right.nodes[0].model_copy(update={"exposure_micro_usdc": 10**9})
    forged = right.model_copy(update={"nodes": (cheap, *right.nodes[1:])})
    checked = check_choices(certify(forged), full, MANIFEST, ECONOMICS)
    assert checked.difference in (
        "its exposures differ from those of its tasks",
        "its node list differs from the snapshot's",
    )


def test_what_a_snapshot_says_to_be_locked_is_in_the_chains_events() -> None:
    node, other = "0x" + "01" * 20, "0x" + "02" * 20

    def tell(block: int, name: str, number: int, **args: object) -> ChainEvent:
        args["executionId"] = f"0x{number:064x}"
        return ChainEvent(name, args, block, "0x", 0, "0x", "market")

    words = tuple("0x" + pack_word(*pair).hex() for pair in ((node, 7), (other, 5)))
    events = [
        tell(1, "PlanAccepted", 1),
        tell(2, "ExecutionCommitted", 1, exposures=words),
        tell(3, "PlanAccepted", 2),
        tell(4, "ExecutionCommitted", 2, exposures=("0x" + pack_word(node, 2).hex(),)),
        tell(5, "Settled", 1),
        tell(6, "Distributed", 1, remaining=3),
        tell(7, "Distributed", 1, remaining=0),  # released before
        tell(8, "Refunded", 2),
        tell(9, "Distributed", 2, remaining=0),
    ]
    assert compute_locks(events, 0, 1) == ({}, {f"0x{1:064x}"})
    assert compute_locks(events, 2, 2) == ({node: 7, other: 5}, {f"0x{1:064x}"})
    assert compute_locks(events, 3, 5) == ({node: 9, other: 5}, {f"0x{2:064x}"})
    assert compute_locks(events, 7, 7)[0] == {node: 2, other: 0}
    assert compute_locks(events, 10, 20) == ({node: 0, other: 0}, set())
    passed = PassedOver(task=0, node=node, needed=5, stake=10, locked=9)
    assert find_unexplained([passed], {node: 9}, set()) == ()
    assert find_unexplained([passed], {node: 7}, set()) == (passed,)
    assert find_unexplained([passed], {node: 7}, {"planned"}) == ()  # members reserve for it
