"""A settlement's phases: every legal transition, and the refusal of all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest

from splitup.core.errors import PeerFault
from splitup.messages.completions import SignedTakeover, Takeover
from splitup.messages.verification import (
    Attestation,
    Draw,
    SignedAttestation,
    ValidatorCommitment,
)
from splitup.protocol.committee.events import ExecutionCommitted
from splitup.protocol.settlement import settlement_transitions as transitions
from splitup.protocol.settlement.chain_commitments import (
    AgreedCommitments,
    DrawBasis,
    compute_commitments_root,
)
from splitup.protocol.settlement.settlement_state import (
    Committing,
    Drawing,
    Phase,
    Planned,
    Proposing,
    Requested,
    SettlementState,
    Verifying,
)
from splitup.protocol.settlement.verification_state import PlanContext
from tests.protocol.machines import (
    EXECUTION,
    EXECUTORS,
    VERIFY_ALL,
    commit_on_chain,
    make_committing,
    make_completion,
    make_context,
    make_drawing,
    make_end,
    make_plan_context,
    make_state,
)

CONTEXT = make_plan_context(10_000)
DONE_AT = 50.0
Event = Callable[[SettlementState], None]
EVENTS: dict[str, Event] = {
    "certify_plan": lambda state: transitions.certify_plan(state, CONTEXT.certificate),
    "add_contents": lambda state: transitions.add_contents(state, CONTEXT),
    "complete_commitments": lambda state: transitions.complete_commitments(state, find_basis()),
    "take_draw": lambda state: draw(state),
    "complete_evidence": lambda state: transitions.complete_evidence(state, DONE_AT),
    "revert_commitments": transitions.revert_commitments,
}
LEGAL: dict[tuple[type[Phase], str], type[Phase]] = {
    (Requested, "certify_plan"): Planned,
    (Planned, "add_contents"): Committing,
    (Committing, "complete_commitments"): Drawing,
    (Committing, "take_draw"): Verifying,
    (Drawing, "take_draw"): Verifying,
    (Verifying, "complete_evidence"): Proposing,
    (Requested, "revert_commitments"): Requested,
    (Planned, "revert_commitments"): Planned,
    (Committing, "revert_commitments"): Committing,
    (Drawing, "revert_commitments"): Committing,
    (Verifying, "revert_commitments"): Committing,
    (Proposing, "revert_commitments"): Committing,
}


def find_basis() -> DrawBasis:
    phase = make_drawing(VERIFY_ALL).phase
    assert isinstance(phase, Drawing)
    return phase.basis


def draw(state: SettlementState) -> None:
    transitions.take_draw(state, make_draw(make_drawing(VERIFY_ALL)), place=2, now=10.0)


def make_draw(state: SettlementState) -> Draw:
    basis = state.find_basis()
    assert basis is not None
    return Draw(
        execution_id=EXECUTION,
        block_hash=basis.block_hash,
        commitments=basis.commitments,
        executors=basis.executors,
        steps=basis.steps,
        signature="0x" + "01" * 48,
        seed="0x" + "02" * 32,
    )


def make_in(phase: type[Phase]) -> SettlementState:
    """Return an execution in a phase, with commitments of all executors on its chain."""
    if phase is Requested:
        return make_state(VERIFY_ALL)
    if phase is Planned:
        state = make_state(VERIFY_ALL)
        EVENTS["certify_plan"](state)
        return state
    if phase is Committing:
        state = make_committing(VERIFY_ALL)
        commit_on_chain(state)
        return state
    state = make_drawing(VERIFY_ALL)
    if phase is not Drawing:
        draw(state)
    if phase is Proposing:
        transitions.complete_evidence(state, DONE_AT)
    return state


@pytest.mark.parametrize(("phase", "event"), list(product(get_args(Phase), EVENTS)))
def test_a_legal_transition_leads_to_its_phase_and_any_other_is_refused(
    phase: type[Phase], event: str
) -> None:
    state = make_in(phase)
    before = state.phase
    assert type(before) is phase
    if (target := LEGAL.get((phase, event))) is not None:
        EVENTS[event](state)
        assert type(state.phase) is target
        return
    with pytest.raises(RuntimeError, match=f"no transition from {phase.__name__}"):
        EVENTS[event](state)
    assert state.phase is before


def test_shares_that_came_early_are_in_the_collector() -> None:
    state = make_committing()
    commit_on_chain(state)
    state.early.draw_partials[2] = "0x" + "03" * 48
    basis = state.find_basis()
    assert basis is not None
    transitions.complete_commitments(state, basis)
    assert isinstance(state.phase, Drawing)
    assert state.phase.collector.partials == {2: "0x" + "03" * 48}
    assert state.phase.basis == basis and not state.phase.partial


def test_the_draw_fixes_tasks_executors_and_our_place() -> None:
    state = make_in(Verifying)
    verification = state.verification
    assert verification is not None
    assert verification.executors == make_plan_context().plan.executors()
    assert sorted(verification.checks) == [0, 1], "with a rate of 100 % every task is drawn"
    assert verification.place == 2
    for task, check in verification.checks.items():
        assert verification.executors[task] not in check.validators
    transitions.complete_evidence(state, DONE_AT)
    assert isinstance(state.phase, Proposing) and state.phase.verification is verification
    assert state.phase.propose_at > DONE_AT, "two others propose before us"


@pytest.mark.parametrize("phase", [Verifying, Proposing])
def test_a_reverted_draw_leaves_completions_and_drops_statements(phase: type[Phase]) -> None:
    state = make_in(phase)
    verification = state.verification
    assert verification is not None
    node = EXECUTORS[0]
    verification.completions[node] = make_completion(node)
    attestation = Attestation(
        execution_id=EXECUTION,
        member=make_context().account,
        steps=verification.draw.steps,
        due=True,
        held=(),
        silent=(),
        rulings=(),
    )
    signed = SignedAttestation(attestation=attestation, signature="0x" + "00" * 64)
    state.attestations.add(signed)
    state.collected.submit_at, state.rounds = 3.0, 1
    transitions.revert_commitments(state)
    assert state.verification is None and isinstance(state.phase, Committing)
    assert state.early.completions == {node: make_completion(node)}
    assert list(state.attestations.get_all()) == [] and not state.proposals
    assert state.collected.submit_at == math.inf
    assert state.rounds == 1, "a round that was signed is not used again"


def test_a_result_counts_under_its_validators_key_alone() -> None:
    state = make_committing()
    first, second = make_plan_context().snapshot.entries[:2]
    commitment = ValidatorCommitment(
        execution_id=EXECUTION, task=0, validator=first.node, root="0x" + "11" * 32
    )
    state.check_validator(commitment, first.signing_key)
    with pytest.raises(PeerFault, match="not signed by that node's key"):
        state.check_validator(commitment, second.signing_key)


def test_a_node_that_was_replaced_in_one_of_its_tasks_commits_for_the_others() -> None:
    """Its own commitment came first and locks what these can cost: its successor's completes it."""
    context = make_plan_context()
    first, second = context.plan.tasks[0][:2]
    plan = context.plan.model_copy(update={"tasks": ((first, second), (first, second))})
    state = make_state()
    certificate = context.certificate.model_copy(update={"plan": plan})
    transitions.certify_plan(state, certificate)
    contents = PlanContext(certificate, context.snapshot, context.manifest)
    transitions.add_contents(state, contents)
    takeover = Takeover(execution_id=EXECUTION, task=0, candidate=1, first_step=0)
    state.collected.takeovers[0, 1] = SignedTakeover(takeover=takeover, signature="0x" + "0" * 128)
    state.collected.finals[4] = make_end(4)
    rows = tuple(sorted((node, "0x" + "11" * 32) for node in (first, second)))
    agreement = AgreedCommitments(rows, (second, first), 4)
    root = compute_commitments_root(EXECUTION, agreement)
    exposures = tuple(sorted(state.get_exposures((second, first))))
    state.chain.agreed = ExecutionCommitted(EXECUTION, root, "0x" + "0b" * 32, exposures)
    assert state.find_basis() is None and state.chain.bind(agreement)
    basis = state.find_basis()
    assert basis is not None and basis.executors == (second, first)
