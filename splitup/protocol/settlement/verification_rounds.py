"""Verification of a drawn execution: commit, attest, reveal, and judge.

Validators commit first. When 2f+1 members hold a commitment for every drawn task they attest that
reveals are due; executors and validators wait for that many attestations, so that no member alone
can make them show anything early. What is due and does not come is attested, too, and after a
mismatch what the member got when it recomputed the task itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitup.core import limits, tuning
from splitup.graph.manifest import Manifest
from splitup.messages.completions import TaskCommitment
from splitup.messages.plans import PlanCertificate
from splitup.messages.snapshots import UNRULED, Snapshot
from splitup.messages.verification import (
    Attestation,
    Draw,
    Held,
    Ruling,
    Silence,
    VerificationOrder,
)
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.events import Command, Gossip, Log, PushVerification, RecomputeTask
from splitup.protocol.committee.peer_messages import Attested
from splitup.protocol.planning.selection import rank_validators
from splitup.protocol.planning.validators import open_snapshot
from splitup.protocol.settlement.attestations import sign_attestation
from splitup.protocol.settlement.proof_of_sampling import (
    Economics,
    Outcome,
    Verdict,
    get_sampled_tasks,
    is_disputed,
    judge,
)
from splitup.protocol.settlement.settlement_state import SettlementState
from splitup.protocol.settlement.task_checks import TaskCheck


@dataclass(frozen=True, slots=True)
class _Orders:
    """What the orders of one execution are made of, when one is needed: proofs cost hashing."""

    certificate: PlanCertificate
    draw: Draw
    snapshot: Snapshot

    def make(self, check: TaskCheck, *validators: str) -> VerificationOrder:
        """Return the order of a drawn task; without a validator it is for a member."""
        executors = self.draw.executors or self.certificate.plan.executors()
        return VerificationOrder(
            certificate=self.certificate,
            draw=self.draw,
            snapshot=open_snapshot(self.snapshot, (executors[check.task], *validators)),
            task=check.task,
            steps=check.steps,
        )


class VerificationRounds:
    """One member's part in verifying drawn tasks."""

    def __init__(self, context: MemberContext, economics: Economics) -> None:
        self._context = context
        self._economics = economics

    def advance(
        self,
        state: SettlementState,
        certificate: PlanCertificate,
        draw: Draw,
        snapshot: Snapshot,
        manifest: Manifest,
        now: float,
    ) -> list[Command]:
        """Bring every drawn task as far as it gets: ask, attest, judge."""
        if state.checks is None:
            state.open_checks(self._make_checks(state, certificate, draw, snapshot, manifest))
        checks = state.checks or {}
        commands: list[Command] = []
        for _ in range(2):  # our own attestation may be the one that was missing
            if state.due_at is None and state.attestations.is_due():
                state.due_at = now
            for task, check in checks.items():
                check.advance(state.attestations, state.find_commitment(task), state.due_at, now)
            commands += self._attest(state, checks, now)
        orders = _Orders(certificate, draw, snapshot)
        for task, check in checks.items():
            commands += self._judge(state, check, orders, manifest, now)
            if task not in state.verdicts:
                entries = {entry.node: entry for entry in snapshot.entries}
                for validator in check.find_orders(state.attestations, now, state.place):
                    entry = entries[validator]
                    order = orders.make(check, validator)
                    commands.append(PushVerification(entry.node, entry.endpoint, order))
        return commands

    def process_ruling(self, state: SettlementState, ruling: Ruling) -> None:
        """Keep what we recomputed ourselves; it is attested at the next step."""
        check = (state.checks or {}).get(ruling.task)
        if check is None:
            return
        check.is_recomputing = False
        known = state.rulings.get(ruling.task)
        if known is None or known.missing:
            state.rulings[ruling.task] = ruling

    def _make_checks(
        self,
        state: SettlementState,
        certificate: PlanCertificate,
        draw: Draw,
        snapshot: Snapshot,
        manifest: Manifest,
    ) -> dict[int, TaskCheck]:
        plan, executors = certificate.plan, state.get_executors()
        commitments = state.get_commitments()
        sampled = get_sampled_tasks(draw, len(manifest.tasks), self._economics.sampling_bps)
        checks = {}
        for task in sampled:
            ranked = rank_validators(draw.seed, task, plan, snapshot, manifest, executors)
            asked = tuple(ranked[: limits.MAX_ASKED])
            checks[task] = TaskCheck(task, asked, commitments[executors[task]].steps)
        return checks

    # ---- what we say ------------------------------------------------------------------------

    def _attest(
        self, state: SettlementState, checks: dict[int, TaskCheck], now: float
    ) -> list[Command]:
        """Say what we know when it is news, and again while the execution is open."""
        attestation = self._make_attestation(state, checks, now)
        signed = state.attested
        if signed is None or signed.attestation != attestation:
            signed = state.attested = sign_attestation(self._context.identity, attestation)
            state.attestations.add(signed)
        elif now < state.attest_at:
            return []
        state.attest_at = now + tuning.GOSSIP_RETRY_S
        return [Gossip(None, Attested(attestation=signed))]

    def _make_attestation(
        self, state: SettlementState, checks: dict[int, TaskCheck], now: float
    ) -> Attestation:
        covered = all(check.is_covered(state.attestations) for check in checks.values())
        silent: list[Silence] = []
        if state.due_at is not None:
            silent += [
                Silence(node=node, task=None)
                for node in sorted(set(state.get_executors()) - state.completions.keys())
                if now - state.due_at >= limits.EXECUTOR_REVEAL_S
            ]
            silent += [
                Silence(node=validator, task=task)
                for task, check in sorted(checks.items())
                for validator in check.asked_at
                if check.is_overdue(state.attestations, validator)
            ]
        return Attestation(
            execution_id=state.request.execution_id,
            member=self._context.account,
            due=covered or state.due_at is not None,
            held=tuple(
                Held(task=task, validator=validator, root=root)
                for task, check in sorted(checks.items())
                for validator, root in check.get_attested()
            ),
            silent=tuple(silent),
            rulings=tuple(ruling for _, ruling in sorted(state.rulings.items())),
        )

    # ---- what follows -----------------------------------------------------------------------

    def _judge(
        self,
        state: SettlementState,
        check: TaskCheck,
        orders: _Orders,
        manifest: Manifest,
        now: float,
    ) -> list[Command]:
        """Set the verdict on one task, if there is one; late answers may still change it."""
        executor = state.get_executors()[check.task]
        commitment = state.find_commitment(check.task)
        commands: list[Command] = []
        if commitment is None:
            if executor not in state.list_withheld():
                return []
            heard = check.get_heard(state.attestations)
            verdict = Verdict(
                check.task, Outcome.WITHHELD, tuple(r.validator for r in heard[:1]), ()
            )
        else:
            if not check.is_heard(state.attestations, commitment):
                return []
            usable = check.get_usable(state.attestations, commitment)
            ruling = None
            is_judged = check.validators or manifest.tasks[check.task].crosses_classes
            if is_disputed(commitment, usable) or (is_judged and not usable):
                commands += self._ask_for_ruling(state, check, orders, commitment, now)
                ruling = state.attestations.find_ruling(check.task)
                if ruling is None and not self._is_undecidable(state, check, now):
                    return commands
            verdict = judge(commitment, executor, usable, ruling)
        withheld = check.get_withheld(state.attestations)
        verdict = Verdict(
            verdict.task, verdict.outcome, verdict.validators, verdict.liars, withheld
        )
        if state.verdicts.get(check.task) != verdict:
            state.verdicts[check.task] = verdict
            commands.append(_describe(state.request.execution_id, verdict))
        return commands

    def _ask_for_ruling(
        self,
        state: SettlementState,
        check: TaskCheck,
        orders: _Orders,
        claim: TaskCommitment,
        now: float,
    ) -> list[Command]:
        """Recompute the task here; again after a while when its inputs were not in the store.

        Whoever stores them only when others have looked in vain must not split the members.
        """
        own = state.rulings.get(check.task)
        if (
            check.is_recomputing
            or (own is not None and not own.missing)
            or now < check.recompute_at
        ):
            return []
        if check.disputed_at is None:
            check.disputed_at = now
        check.is_recomputing = True
        check.recompute_at = now + tuning.RULING_RETRY_S
        order = orders.make(check)
        entry = order.snapshot.find(order.executors[check.task])
        determinism = entry.determinism.removeprefix(UNRULED) if entry else ""
        return [
            Log(f"task {check.task} of {state.request.execution_id} is disputed; recomputing it"),
            RecomputeTask(order, determinism, claim),
        ]

    def _is_undecidable(self, state: SettlementState, check: TaskCheck, now: float) -> bool:
        """Return whether too few members can recompute the task, or they took too long."""
        members = len(self._context.view.members)
        if state.attestations.count_unable(check.task) > members - self._context.view.quorum:
            return True
        patience_s = limits.RULING_S + limits.RULING_STEP_S * check.steps
        return check.disputed_at is not None and now - check.disputed_at >= patience_s


def _describe(execution_id: str, verdict: Verdict) -> Log:
    liars = f", liars: {', '.join(verdict.liars)}" if verdict.liars else ""
    return Log(
        f"task {verdict.task} of {execution_id} was verified: {verdict.outcome.value}{liars}"
    )
