"""Verification of a drawn execution: commit, attest, reveal, and judge.

Validators commit first. When members hold a commitment for every drawn task, they attest that
reveals are due. Executors and validators reveal after 2f+1 such attestations, so no single member
can make them reveal early. Members also attest which reveals are due and missing, and, after a
mismatch, what each of them got when it recomputed the task itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from splitup.core import limits, tuning
from splitup.messages.base import Message
from splitup.messages.completions import TaskCommitment
from splitup.messages.snapshots import UNRULED
from splitup.messages.verification import (
    Attestation,
    Held,
    Ruling,
    Silence,
    VerificationOrder,
    VerificationResult,
)
from splitup.protocol.committee.commands import (
    Command,
    Gossip,
    Log,
    PushVerification,
    RecomputeTask,
)
from splitup.protocol.committee.context import MemberContext, compute_member_order
from splitup.protocol.committee.peer_messages import Attested
from splitup.protocol.planning.validators import open_snapshot
from splitup.protocol.settlement.attestations import sign_attestation
from splitup.protocol.settlement.proof_of_sampling import (
    Outcome,
    Verdict,
    agrees,
    compute_ruling_s,
    is_disputed,
    judge,
)
from splitup.protocol.settlement.settlement_state import SettlementState
from splitup.protocol.settlement.task_checks import TaskCheck
from splitup.protocol.settlement.verification_state import Verification

S = TypeVar("S", bound=Message)


class VerificationRounds:
    """One member's part in verifying drawn tasks."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._ruled_at = -math.inf  # when we last learned a ruling, in whatever execution

    def advance(
        self, state: SettlementState, verification: Verification, now: float
    ) -> list[Command]:
        """Bring every drawn task as far as it gets: ask validators, attest, judge."""
        execution_id, checks = state.request.execution_id, verification.checks
        commands: list[Command] = []
        until = verification.ask_until
        if until is None:
            until = verification.ask_until = now + self._get_left_s(verification) / 2
        for _ in range(2):  # our own attestation may be the one that was missing
            if verification.due_at is None and verification.attestations.is_due():
                verification.due_at = now
                # of what is left now half is for validators that decide after a mismatch
                until = verification.ask_until = now + self._get_left_s(verification) / 2
            due_at = verification.due_at
            for task, check in checks.items():
                commitment = verification.find_commitment(task)
                check.advance(verification.attestations, commitment, due_at, until, now)
            said = verification.attested
            commands += self._attest(execution_id, verification, now)
            for check in checks.values() if verification.has_closed() else ():
                check.closed_at = now if check.closed_at is None else check.closed_at
            if verification.attested is said:
                break
        heard = _count_rulings(verification)
        if heard > verification.heard_rulings:
            verification.heard_rulings = heard
            self._ruled_at = now
        for task, check in checks.items():
            commands += self._judge(execution_id, verification, check, now)
            if task not in verification.verdicts:
                commands += _order(verification, check, now, len(self._context.accounts()))
        return commands

    def process_rulings(
        self, verification: Verification, rulings: Sequence[Ruling], now: float
    ) -> None:
        """Keep what we recomputed ourselves; it is attested at the next step.

        Whoever was too slow tries again after a pause, each time with more time, and says in the
        end that it cannot recompute the task.
        """
        for ruling in rulings:
            check = verification.checks.get(ruling.task)
            if check is None:
                continue
            check.is_recomputing = False
            if ruling.slow:
                check.recompute_at = now + tuning.RULING_RETRY_S * 2**check.slow_tries
                check.slow_tries += 1
                if check.slow_tries >= tuning.SLOW_TRIES:
                    error = f"too slow here, after {check.slow_tries} tries"
                    ruling = ruling.model_copy(update={"slow": False, "error": error})
            known = verification.rulings.get(ruling.claim)
            if known is None or known.missing or known.slow:
                verification.rulings[ruling.claim] = ruling

    # ---- attestations -----------------------------------------------------------------------

    def _attest(self, execution_id: str, verification: Verification, now: float) -> list[Command]:
        """Send all members what we know when it changed, and repeat it while it did not.

        As long as drawn tasks lack a commitment here, nobody waits for the others: they are
        gathered. Nodes that ask are told at once.
        """
        attestation = self._make_attestation(execution_id, verification, now)
        signed = verification.attested
        if signed is None or signed.attestation != attestation:
            signed = sign_attestation(self._context.identity, attestation)
            verification.attested = signed
            verification.attestations.add(signed)
            is_waited_for = attestation.due or (
                len({held.task for held in attestation.held}) == len(verification.checks)
            )
            send_at = now if is_waited_for else now + tuning.ATTESTATION_GATHER_S
            verification.attest_at = min(verification.attest_at, send_at)
        if now < verification.attest_at:
            return []
        verification.attest_at = now + tuning.GOSSIP_RETRY_S
        return [Gossip(None, Attested(attestation=signed))]

    def _make_attestation(
        self, execution_id: str, verification: Verification, now: float
    ) -> Attestation:
        attestations, due_at = verification.attestations, verification.due_at
        checks = sorted(verification.checks.items())
        said = verification.attested.attestation if verification.attested else None
        silent: list[Silence] = []
        if due_at is not None:
            silent += [
                Silence(node=node, task=None)
                for node in sorted(verification.list_missing())
                if now - due_at >= limits.EXECUTOR_REVEAL_S
            ]
            silent += [
                Silence(node=validator, task=task)
                for task, check in checks
                for validator in check.asked_at
                if check.is_overdue(attestations, validator)
            ]
        known = {(one.task, one.validator) for one in said.held} if said else set()
        held = (  # a validator's first commitment is kept, so what was said of one stays true
            Held(task=task, validator=validator, root=root)
            for task, check in checks
            for validator, root in check.get_attested()
            if (task, validator) not in known
        )
        rulings = (ruling for _, ruling in sorted(verification.rulings.items()))
        return Attestation(
            execution_id=execution_id,
            member=self._context.account,
            steps=verification.draw.steps,
            due=due_at is not None or all(check.is_covered(attestations) for _, check in checks),
            # nothing is taken back: what others counted of us our next words prove as well
            held=_unite(said.held if said else (), held),
            silent=_unite(said.silent if said else (), silent),
            rulings=_unite([r for r in said.rulings if not r.slow] if said else (), rulings),
        )

    # ---- verdicts ---------------------------------------------------------------------------

    def _judge(
        self, execution_id: str, verification: Verification, check: TaskCheck, now: float
    ) -> list[Command]:
        """Set the verdict on one task, if there is one; late answers may still change it."""
        executor = verification.executors[check.task]
        commitment = verification.find_commitment(check.task)
        attestations = verification.attestations
        commands: list[Command] = []
        if commitment is None:
            if verification.is_disowned(check.task):
                outcome = Outcome.CONTRADICTED
            elif executor in verification.list_withheld():
                outcome = Outcome.WITHHELD
            else:
                return []
            heard = check.get_heard(attestations)
            verdict = Verdict(check.task, outcome, tuple(r.validator for r in heard[:1]), ())
        else:
            if not check.is_heard(attestations, commitment):
                return []
            usable = check.get_usable(attestations, commitment)
            ruling, compared, in_time = None, {}, True
            task = verification.context.manifest.tasks[check.task]
            is_judged = check.validators or task.crosses_classes
            disputed = is_disputed(commitment, usable) or bool(is_judged and not usable)
            if not disputed and check.needs_outsider:
                doubts, is_our_turn = self._ask_outsider(verification, check, commitment, now)
                if is_our_turn:
                    return self._ask_for_ruling(execution_id, verification, check, commitment, now)
                if doubts is None:
                    return commands
                disputed = doubts
            if disputed:
                commands += self._ask_for_ruling(
                    execution_id, verification, check, commitment, now, usable
                )
                ruling = attestations.find_ruling(check.task)
                if ruling is not None and ruling.compared:
                    compared = {
                        result.validator: attestations.find_ruling(check.task, result.validator)
                        for result in usable
                    }
                is_open = ruling is None or None in compared.values()
                if is_open:
                    in_time = self._is_impossible(verification, check)
                    if not in_time and not self._is_too_late(verification, check, now):
                        return commands
            verdict = judge(commitment, executor, usable, ruling, compared, in_time=in_time)
        if withheld := check.get_withheld(attestations):
            verdict = replace(verdict, silent=withheld)
        if verification.verdicts.get(check.task) != verdict:
            verification.verdicts[check.task] = verdict
            commands.append(_describe(execution_id, verdict))
        return commands

    def _ask_outsider(
        self, verification: Verification, check: TaskCheck, claim: TaskCommitment, now: float
    ) -> tuple[bool | None, bool]:
        """Return whether a member contradicts the validators, and whether it is our turn to look.

        The first is None while that is open. Members are asked one after the other; when one is
        silent for its share of half of the time that is left, or cannot recompute the task, the
        next looks, too. If one contradicts, or another looked out of its turn, somebody may tell
        members different things: then all look, until more than f say the same, so an honest one.
        If all were silent who could have told, they have to rule: else who checks each other would
        only need a task that takes the members long.
        """
        order = compute_member_order(verification.draw.seed, self._context.accounts())
        first = check.task % len(order)  # the tasks of one execution are shared out
        order = sorted(
            order[first:] + order[:first], key=lambda member: self._context.is_silent(member, now)
        )
        said = [verification.attestations.find_statement(check.task, member) for member in order]
        doubts = [found is not None and _contradicts(found, claim) for found in said]
        if check.outsider_at is None:
            check.outsider_at = now
            share_s = self._get_left_s(verification) / 2 / len(order)
            check.outsider_s = min(share_s, _compute_patience_s(verification, check))
        late = len(order)
        if now < check.outsider_at + late * check.outsider_s:
            late = int((now - check.outsider_at) / check.outsider_s)
        is_over = late == len(order) or None not in said
        stated = sum(found is not None and not found.error for found in said)
        is_divided = any(doubts) or stated > 1
        if is_divided and not is_over and said[order.index(self._context.account)] is None:
            return None, True  # also if we know enough: others may have been told something else
        if max(sum(doubts), stated - sum(doubts)) > self._context.tolerated:
            return sum(doubts) > self._context.tolerated, False
        if is_divided and not is_over:
            return None, False
        if any(doubts):
            return True, False
        for member, found in zip(order, said, strict=True):
            if found is not None and not found.error:
                return False, False
            if found is None and member == self._context.account and not is_over:
                return None, True
            late -= found is None
            if late < 0:
                return None, False
        return not self._is_impossible(verification, check), False

    def _ask_for_ruling(
        self,
        execution_id: str,
        verification: Verification,
        check: TaskCheck,
        claim: TaskCommitment,
        now: float,
        results: Sequence[VerificationResult] = (),
    ) -> list[Command]:
        """Recompute the task here; again after a while if inputs were missing or it took too long.

        A party that stores the inputs only after some members looked must not make the members'
        rulings differ for ever. Validators' claims are ruled on only where numbers are compared.
        """
        own = verification.rulings.get((check.task, ""))
        claims = {(check.task, "")}
        if own is not None and own.compared:
            claims |= {(check.task, result.validator) for result in results}
        rulings = [verification.rulings.get(key) for key in claims]
        is_open = any(ruling is None or ruling.missing or ruling.slow for ruling in rulings)
        if check.is_recomputing or not is_open or now < check.recompute_at:
            return []
        if len(claims) > check.disputed_claims:
            check.disputed_claims, check.disputed_at = len(claims), now
        check.is_recomputing = True
        check.recompute_at = max(check.recompute_at, now + tuning.RULING_RETRY_S)
        order = _make_order(verification, check)
        entry = order.snapshot.find(order.executors[check.task])
        determinism = entry.determinism.removeprefix(UNRULED) if entry else ""
        return [
            Log(f"recomputing task {check.task} of {execution_id}"),
            RecomputeTask(order, determinism, claim, tuple(results), check.slow_tries),
        ]

    def _is_impossible(self, verification: Verification, check: TaskCheck) -> bool:
        """Return whether too few members can recompute the task."""
        members, quorum = len(self._context.view.members), self._context.view.quorum
        return verification.attestations.count_unable(check.task) > members - quorum

    def _get_left_s(self, verification: Verification) -> int:
        """Return how much time is left for verdicts: the rest is for agreeing about the payments.

        Each round may take half of it at most, so that however many parties are silent in one, the
        next has as much time again.
        """
        request = verification.context.plan.request
        grace_s = min(self._context.grace_s, limits.VERIFICATION_GRACE_S)
        last_s = request.deadline + grace_s * limits.RULING_GRACE_BPS // 10_000
        return max(0, last_s - self._context.timestamp_s)

    def _is_too_late(self, verification: Verification, check: TaskCheck, now: float) -> bool:
        """Return whether members took too long to recompute the task.

        Each recomputes one task at a time, so a liar might keep them busy with others; and how fast
        their machines are is no party's fault. They have time as long as rulings come, on any task,
        or enough of them say that they try again, and the others of the execution can still be paid
        before it ends.
        """
        if self._get_left_s(verification) == 0:
            return True
        if check.disputed_at is None or verification.attestations.is_delayed(check.task):
            return False
        patience_s = _compute_patience_s(verification, check)
        return now - max(check.disputed_at, self._ruled_at) >= patience_s


def _unite(said: Sequence[S], more: Iterable[S]) -> tuple[S, ...]:
    if not (more := tuple(more)):
        return tuple(said)
    return tuple(dict.fromkeys((*said, *more)))[-limits.MAX_STATEMENTS :]


def _count_rulings(verification: Verification) -> int:
    """Return how many rulings members stated; each may state one on a claim that it was shown."""
    checks = verification.checks
    return len(
        {
            (signed.attestation.member, ruling.claim)
            for signed in verification.attestations.get_all()
            for ruling in signed.attestation.rulings
            if not ruling.slow
            and ruling.task in checks
            and ruling.validator in (None, *checks[ruling.task].validators)
        }
    )


def _compute_patience_s(verification: Verification, check: TaskCheck) -> float:
    task = verification.context.manifest.tasks[check.task]
    return compute_ruling_s(task.vram_bytes, check.steps)


def _contradicts(found: Ruling, claim: TaskCommitment) -> bool:
    return not found.error and (found.inputs != claim.inputs or not agrees(claim, found))


def _order(verification: Verification, check: TaskCheck, now: float, members: int) -> list[Command]:
    """Send the order to the validators that are due to get it."""
    validators = check.find_orders(verification.attestations, now, verification.place, members)
    if not validators:
        return []
    entries = {entry.node: entry for entry in verification.context.snapshot.entries}
    return [
        PushVerification(
            entries[validator].node,
            entries[validator].endpoint,
            _make_order(verification, check, validator),
        )
        for validator in validators
    ]


def _make_order(
    verification: Verification, check: TaskCheck, *validators: str
) -> VerificationOrder:
    """Return the order of a drawn task; without a validator it is for a member."""
    executors = verification.executors
    return VerificationOrder(
        certificate=verification.context.certificate,
        draw=verification.draw,
        snapshot=open_snapshot(verification.context.snapshot, (executors[check.task], *validators)),
        task=check.task,
    )


def _describe(execution_id: str, verdict: Verdict) -> Log:
    liars = f", liars: {', '.join(verdict.liars)}" if verdict.liars else ""
    return Log(
        f"task {verdict.task} of {execution_id} was verified: {verdict.outcome.value}{liars}"
    )
