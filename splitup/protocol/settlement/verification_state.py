"""What a member holds of one execution's verification, from the draw to the settlement."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.graph.manifest import Manifest
from splitup.messages.completions import Completion, TaskCommitment
from splitup.messages.plans import Plan, PlanCertificate
from splitup.messages.snapshots import Snapshot
from splitup.messages.verification import (
    Attestation,
    Draw,
    Ruling,
    SignedAttestation,
    ValidatorCommitment,
)
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.edge_faults import (
    find_edge_faults,
    find_input_faults,
    find_output_faults,
)
from splitup.protocol.settlement.proof_of_sampling import Outcome, Verdict
from splitup.protocol.settlement.task_checks import TaskCheck, ValidatorAnswer


@dataclass(frozen=True, slots=True)
class PlanContext:
    """A certified plan with the contents that it names by digest."""

    certificate: PlanCertificate
    snapshot: Snapshot
    manifest: Manifest

    @property
    def plan(self) -> Plan:
        return self.certificate.plan


@dataclass(slots=True)
class Verification:
    """The drawn tasks, what executors and validators revealed, and the verdicts so far."""

    context: PlanContext
    draw: Draw
    executors: tuple[str, ...]  # who answers for each task; the draw fixes it
    place: int  # our rank in the order of proposers
    late_from: float  # a draw partial that comes later shows that its sender lacks the draw
    attestations: Attestations
    checks: dict[int, TaskCheck]  # by drawn task
    completions: dict[str, Completion] = field(default_factory=dict)  # checked, by node
    due_at: float | None = None  # since when we know that reveals are due
    ask_until: float | None = None  # validators share the time until then; then others decide
    rulings: dict[tuple[int, str], Ruling] = field(default_factory=dict)  # our own, by claim
    heard_rulings: int = 0  # the most that all members had stated together
    attested: SignedAttestation | None = None  # our own, the latest
    attest_at: float = math.inf  # when to send it
    verdicts: dict[int, Verdict] = field(default_factory=dict)  # by drawn task

    def fork(self) -> Verification:
        """Return a verification that goes on by itself from here."""
        return replace(
            self,
            attestations=self.attestations.fork(),
            checks={task: check.fork() for task, check in self.checks.items()},
            completions=dict(self.completions),
            rulings=dict(self.rulings),
            verdicts=dict(self.verdicts),
        )

    def add_answer(self, answer: ValidatorAnswer) -> None:
        """Keep a validator's answer about a drawn task."""
        check = self.checks.get(answer.result.task)
        if check is not None:
            check.add(answer, self.attestations)

    def add_validator_commitment(self, commitment: ValidatorCommitment) -> None:
        """Keep a validator's first commitment about a drawn task."""
        check = self.checks.get(commitment.task)
        if check is not None:
            check.hold(commitment.validator, commitment.root)

    def check_attested(self, attestation: Attestation) -> None:
        """Raise PeerFault unless an attestation is about the draw and its tasks' parties alone.

        Of each party it says one thing; rulings on a claim change while inputs are missing.
        """
        held = {(one.task, one.validator) for one in attestation.held}
        silent = {(one.task, one.node) for one in attestation.silent}
        claims = Counter(ruling.claim for ruling in attestation.rulings)
        committed = {node for node, _ in self.draw.commitments}
        if (
            len(held) < len(attestation.held)
            or len(silent) < len(attestation.silent)
            or max(claims.values(), default=0) > limits.MAX_CONFLICTING
            or not all(self._is_validator(*one) for one in held)
            or not all(
                node in committed if task is None else self._is_validator(task, node)
                for task, node in silent
            )
            or not all(self._concerns(ruling) for ruling in attestation.rulings)
        ):
            raise PeerFault(
                f"an attestation about {attestation.execution_id} says more than the draw asks",
                peer=attestation.member,
            )

    def _is_validator(self, task: int, node: str) -> bool:
        return task in self.checks and node in self.checks[task].validators

    def _concerns(self, ruling: Ruling) -> bool:
        task, validator = ruling.claim
        if task not in self.checks or (validator and not self._is_validator(task, validator)):
            return False
        entry = self.context.manifest.tasks[task]
        most = len(entry.inputs), len(entry.outputs)
        return len(ruling.inputs) <= most[0] and len(ruling.outputs) <= most[1]

    def has_closed(self) -> bool:
        """Return whether we said that reveals are due."""
        return self.attested is not None and self.attested.attestation.due

    def list_answers(self) -> list[ValidatorAnswer]:
        """Return all answers, by task and rank."""
        return [
            check.answers[validator]
            for _, check in sorted(self.checks.items())
            for validator in check.validators
            if validator in check.answers
        ]

    def find_commitment(self, task: int) -> TaskCommitment | None:
        """Return what the executor of a task revealed that it had committed to."""
        completion = self.completions.get(self.executors[task])
        if completion is None:
            return None
        return next((entry for entry in completion.tasks if entry.task == task), None)

    def is_disowned(self, task: int) -> bool:
        """Return whether the client's word leaves nothing to compare of a task that was revealed.

        It gave the task to another node, which did not commit.
        """
        is_revealed = self.executors[task] in self.completions
        return is_revealed and self.find_commitment(task) is None

    def list_missing(self) -> set[str]:
        """Return the executors that committed and have not revealed."""
        committed = {node for node, _ in self.draw.commitments}
        return committed - self.completions.keys()

    def list_withheld(self) -> set[str]:
        """Return the executors that 2f+1 members say never revealed what they committed to."""
        return {node for node in self.list_missing() if self.attestations.is_silent(node, None)}

    def is_complete(self) -> bool:
        """Return whether every drawn task has a verdict and every executor revealed or withheld.

        Once true it stays true: completions, verdicts and attestations are only added.
        """
        if not self.checks.keys() <= self.verdicts.keys():
            return False
        return self.list_missing() <= self.list_withheld()

    def list_verdicts(self) -> list[Verdict]:
        """Return the verdicts on all drawn tasks, and on tasks that misled their readers."""
        verdicts = dict(self.verdicts)
        manifest, executors = self.context.manifest, self.executors
        planned = self.context.plan.executors()
        replaced = {task for task, node in enumerate(executors) if node != planned[task]}
        claims = {task: self.find_commitment(task) for task in range(len(executors))}
        rulings = {task: self.attestations.find_ruling(task) for task in self.checks}
        completions = self.completions.values()
        ends = [one.end.end for one in completions if not one.end.is_count]  # the client's words
        misled = dict.fromkeys(find_input_faults(manifest, claims, ends), Outcome.CONTRADICTED)
        misled |= find_edge_faults(manifest, claims, rulings, executors, replaced)
        disowned = filter(self.is_disowned, range(len(executors)))
        misled |= dict.fromkeys(disowned, Outcome.CONTRADICTED)
        committed = {node for node, _ in self.draw.commitments}
        for task, outcome in misled.items():
            if executors[task] not in committed:
                continue  # it is unpaid, and has nothing at stake
            known = verdicts.get(task, Verdict(task, outcome, (), ()))
            if known.outcome is not Outcome.LIED:
                verdicts[task] = replace(known, outcome=outcome)
        steps, plan = self.draw.steps, self.context.plan
        for task in find_output_faults(plan, claims, executors, ends, steps):
            known = verdicts.get(task, Verdict(task, Outcome.LIED, (), ()))
            liars = dict.fromkeys((executors[task], *known.liars))
            verdicts[task] = replace(known, outcome=Outcome.LIED, liars=tuple(liars))
        return [verdicts[task] for task in sorted(verdicts)]
