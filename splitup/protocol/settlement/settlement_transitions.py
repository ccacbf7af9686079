"""How a settlement goes from phase to phase: one function for each event, and no other way.

    certify_plan           Requested → Planned
    add_contents           Planned → Committing
    complete_commitments   Committing → Drawing
    take_draw              Committing, Drawing → Verifying; another member may have made the draw
    complete_evidence      Verifying → Proposing
    revert_commitments     Drawing, Verifying, Proposing → Committing; the others stay: a
                           reorganisation removed commitments from the chain

In any other phase they raise RuntimeError and change nothing. In every phase the request itself may
be reverted, or the execution end: then the whole state is dropped (``settlement_agreement``).
"""

from __future__ import annotations

import math

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
    Planned,
    Proposing,
    Requested,
    SettlementState,
    Verifying,
)
from splitup.protocol.settlement.task_checks import TaskCheck
from splitup.protocol.settlement.verification_state import PlanContext, Verification


def certify_plan(state: SettlementState, certificate: PlanCertificate) -> None:
    """Take a plan that 2f+1 members signed."""
    if not isinstance(state.phase, Requested):
        raise _refuse(state, "a plan")
    state.phase = Planned(certificate)


def add_contents(state: SettlementState, context: PlanContext) -> None:
    """Take the snapshot and the manifest that the plan names."""
    if not isinstance(state.phase, Planned):
        raise _refuse(state, "contents")
    state.phase = Committing(context)


def complete_commitments(state: SettlementState, basis: DrawBasis) -> None:
    """Start to collect shares of the draw, with those that other members sent before."""
    if not isinstance(state.phase, Committing):
        raise _refuse(state, "commitments")
    collector = ThresholdSignatureCollector(draw_alpha(state.request.execution_id, *basis))
    for index, partial in state.early.draw_partials.items():
        collector.add(index, partial)
    state.phase = Drawing(state.phase.context, basis, collector)


def take_draw(state: SettlementState, draw: Draw, place: int, now: float) -> None:
    """Open a check per drawn task. ``place`` is our rank as proposer."""
    if not isinstance(state.phase, Committing | Drawing):
        raise _refuse(state, "a draw")
    context = state.phase.context
    executors = draw.executors or context.plan.executors()
    verification = Verification(
        context,
        draw,
        executors,
        place,
        late_from=now + tuning.GOSSIP_RETRY_S / 2,
        attestations=state.attestations,
        checks=_make_checks(context, draw, executors, state.economics),
    )
    state.phase = Verifying(verification)


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


def complete_evidence(state: SettlementState, now: float) -> None:
    """Propose in the order that the draw gives the members.

    Every drawn task has a verdict, and every executor revealed or is attested as silent.
    """
    if not isinstance(state.phase, Verifying):
        raise _refuse(state, "evidence")
    verification = state.phase.verification
    propose_at = now + verification.place * tuning.SETTLEMENT_STAGE_S
    state.phase = Proposing(verification, propose_at, verification.fork())


def revert_commitments(state: SettlementState) -> None:
    """Drop a draw over commitments that the chain no longer holds, and all that is said about it.

    Completions are checked again against the next one.
    """
    phase = state.phase
    if isinstance(phase, Drawing):
        state.phase = Committing(phase.context)
    elif isinstance(phase, Verifying | Proposing):
        state.early.completions |= phase.verification.completions
        state.phase = Committing(phase.verification.context)
    state.attestations = state.attestations.renew()
    state.proposals.clear()
    state.collected.submit_at = math.inf


def _refuse(state: SettlementState, event: str) -> RuntimeError:
    phase = type(state.phase).__name__
    return RuntimeError(
        f"settlement of {state.request.execution_id}: no transition from {phase} on {event}"
    )
