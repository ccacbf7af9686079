"""How a settlement goes from phase to phase: one table, phase × event → next phase and function.

    Requested → Planned → Committing → Drawing → Verifying → Proposing

A draw that another member made leads from Committing straight to Verifying. A reorganisation that
removes commitments from the chain leads back to Committing.

The request itself may be reverted, or the execution may end, in every phase: then the whole state
is dropped (``settlement_agreement``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import draw_alpha
from splitup.protocol.committee.context import ThresholdSignatureCollector
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.selection import is_pool_small, rank_validators
from splitup.protocol.settlement.chain_commitments import DrawBasis
from splitup.protocol.settlement.proof_of_sampling import get_sampled_tasks, is_for_outsider
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
from splitup.protocol.settlement.task_checks import TaskCheck
from splitup.protocol.settlement.verification_state import PlanContext, Verification

# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanCertified:
    """2f+1 members signed the plan."""

    certificate: PlanCertificate


@dataclass(frozen=True, slots=True)
class ContentsFetched:
    """The snapshot and the manifest that the plan names are here."""

    context: PlanContext


@dataclass(frozen=True, slots=True)
class CommitmentsCompleted:
    """Commitments on chain cover every task."""

    basis: DrawBasis


@dataclass(frozen=True, slots=True)
class DrawMade:
    """The draw was combined here, or another member sent it. ``place``: our rank as proposer."""

    draw: Draw
    place: int
    now: float


@dataclass(frozen=True, slots=True)
class EvidenceCompleted:
    """Every drawn task has a verdict, and every executor revealed or is attested as silent."""

    now: float


@dataclass(frozen=True, slots=True)
class CommitmentsReverted:
    """A reorganisation removed commitments that the draw rests on, or would rest on."""


PhaseEvent = (
    PlanCertified
    | ContentsFetched
    | CommitmentsCompleted
    | DrawMade
    | EvidenceCompleted
    | CommitmentsReverted
)

# ---- functions of the table --------------------------------------------------------------------


def _start_planned(state: SettlementState, phase: Requested, event: PlanCertified) -> Planned:
    return Planned(event.certificate)


def _start_committing(state: SettlementState, phase: Planned, event: ContentsFetched) -> Committing:
    return Committing(event.context)


def _start_drawing(
    state: SettlementState, phase: Committing, event: CommitmentsCompleted
) -> Drawing:
    """Start to collect shares, with those that other members sent before."""
    alpha = draw_alpha(state.request.execution_id, *event.basis)
    collector = ThresholdSignatureCollector(alpha)
    for index, partial in state.early.draw_partials.items():
        collector.add(index, partial)
    return Drawing(phase.context, event.basis, collector)


def _start_verifying(
    state: SettlementState, phase: Committing | Drawing, event: DrawMade
) -> Verifying:
    """Open a check per drawn task, with what validators sent before the draw was known."""
    context, draw = phase.context, event.draw
    executors = draw.executors or context.plan.executors()
    verification = Verification(
        context,
        draw,
        executors,
        event.place,
        late_from=event.now + tuning.GOSSIP_RETRY_S / 2,
        attestations=state.attestations,
        checks=_make_checks(context, draw, executors, state.economics),
    )
    for commitment in state.early.validator_commitments.values():
        verification.add_validator_commitment(commitment)
    for answer in state.early.answers.values():
        verification.add_answer(answer)
    state.early.validator_commitments.clear()
    state.early.answers.clear()
    return Verifying(verification)


def _make_checks(
    context: PlanContext, draw: Draw, executors: tuple[str, ...], economics: Economics
) -> dict[int, TaskCheck]:
    checks = {}
    tasks, share = len(context.manifest.tasks), context.plan.request.verify_bps
    committed = {node for node, _ in draw.commitments}
    for task in get_sampled_tasks(draw, tasks, share):
        if executors[task] not in committed:
            continue  # there is nothing to check, and nothing is paid
        ranked = rank_validators(
            draw.seed, task, context.plan, context.snapshot, context.manifest, executors
        )
        asked = tuple(ranked[: limits.MAX_ASKED])
        needs_outsider = is_for_outsider(draw.seed, task, economics, share) and is_pool_small(
            executors[task], context.manifest.tasks[task].task_id, context.snapshot
        )
        checks[task] = TaskCheck(task, asked, draw.steps, needs_outsider)
    return checks


def _start_proposing(
    state: SettlementState, phase: Verifying, event: EvidenceCompleted
) -> Proposing:
    """Propose in the order that the draw gives the members."""
    verification = phase.verification
    propose_at = event.now + verification.place * tuning.SETTLEMENT_STAGE_S
    return Proposing(verification, propose_at, verification.fork())


def _stay(
    state: SettlementState,
    phase: Requested | Planned | Committing,
    event: CommitmentsReverted,
) -> Phase:
    """Drop the attestations and proposals that came before the draw: they are about another one."""
    _drop_statements(state)
    return phase


def _stop_drawing(state: SettlementState, phase: Drawing, event: CommitmentsReverted) -> Committing:
    _drop_statements(state)
    return Committing(phase.context)


def _take_back_draw(
    state: SettlementState, phase: Verifying | Proposing, event: CommitmentsReverted
) -> Committing:
    """Drop the draw and what rests on it; completions are checked again against the next one."""
    state.early.completions |= phase.verification.completions
    _drop_statements(state)
    return Committing(phase.verification.context)


def _drop_statements(state: SettlementState) -> None:
    state.attestations = state.attestations.renew()
    state.proposals.clear()
    state.collected.submit_at = math.inf


# ---- the table ---------------------------------------------------------------------------------

# Each function takes exactly the phase and the event of its key.
_Transition = tuple[type[Phase], Callable[[SettlementState, Any, Any], Phase]]

TRANSITIONS: Final[dict[tuple[type[Phase], type[PhaseEvent]], _Transition]] = {
    (Requested, PlanCertified): (Planned, _start_planned),
    (Planned, ContentsFetched): (Committing, _start_committing),
    (Committing, CommitmentsCompleted): (Drawing, _start_drawing),
    (Committing, DrawMade): (Verifying, _start_verifying),
    (Drawing, DrawMade): (Verifying, _start_verifying),
    (Verifying, EvidenceCompleted): (Proposing, _start_proposing),
    # a reorganisation of the chain
    (Requested, CommitmentsReverted): (Requested, _stay),
    (Planned, CommitmentsReverted): (Planned, _stay),
    (Committing, CommitmentsReverted): (Committing, _stay),
    (Drawing, CommitmentsReverted): (Committing, _stop_drawing),
    (Verifying, CommitmentsReverted): (Committing, _take_back_draw),
    (Proposing, CommitmentsReverted): (Committing, _take_back_draw),
}


def move(state: SettlementState, event: PhaseEvent) -> None:
    """Change the phase of a settlement; RuntimeError when the table has no such transition."""
    phase = state.phase
    transition = TRANSITIONS.get((type(phase), type(event)))
    if transition is None:
        raise RuntimeError(
            f"settlement of {state.request.execution_id}: no transition from "
            f"{type(phase).__name__} on {type(event).__name__}"
        )
    target, change = transition
    state.phase = change(state, phase, event)
    assert isinstance(state.phase, target)
