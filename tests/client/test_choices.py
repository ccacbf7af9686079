from __future__ import annotations

import pytest

from splitup.client.choices import check_choices
from splitup.errors import InvalidModel
from splitup.protocol.selection import compute_plan
from splitup.wire import Plan, PlanCertificate, Snapshot
from tests.builders import make_chain_manifest, make_request, make_snapshot

MANIFEST = make_chain_manifest(3)
SEED = "0x" + "5e" * 32


def make_plan() -> tuple[Plan, Snapshot]:
    snapshot = make_snapshot(5, 3)
    request = make_request().model_copy(
        update={"snapshot_root": snapshot.root(), "model_id": MANIFEST.model_id}
    )
    return compute_plan(request, SEED, snapshot, MANIFEST), snapshot


def certify(plan: Plan) -> PlanCertificate:
    return PlanCertificate(plan=plan, seed_signature="0x", signatures=())


def test_a_right_plan_is_right() -> None:
    plan, snapshot = make_plan()
    checked = check_choices(certify(plan), snapshot, MANIFEST)
    assert (checked.difference, checked.challenge) == ("", None)


def test_a_wrong_choice_is_named_and_proved() -> None:
    plan, snapshot = make_plan()
    first, second, *rest = plan.tasks[1]
    tasks = (plan.tasks[0], (second, first, *rest), plan.tasks[2])
    forged = plan.model_copy(update={"tasks": tasks})
    checked = check_choices(certify(forged), snapshot, MANIFEST)
    assert checked.difference == f"task 1 goes to {second}, where {first} comes first"
    assert checked.challenge is not None and checked.challenge.function == "reportSelection"


def test_a_list_that_ends_early_is_wrong_and_not_for_the_chain_to_judge() -> None:
    plan, snapshot = make_plan()
    forged = plan.model_copy(update={"tasks": (plan.tasks[0][:1], *plan.tasks[1:])})
    checked = check_choices(certify(forged), snapshot, MANIFEST)
    assert checked.difference == "the fallbacks of task 0 are not those that come next"
    assert checked.challenge is None


def test_another_models_manifest_is_refused() -> None:
    plan, snapshot = make_plan()
    with pytest.raises(InvalidModel, match="not of model"):
        check_choices(certify(plan), snapshot, make_chain_manifest(2))
