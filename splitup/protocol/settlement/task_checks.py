"""The check of one sampled task: which validators to ask, and which of their answers count.

Validators are asked in the order that the draw gives them, only as many as are needed. Each first
commits to its answer. The answer counts if 2f+1 members held the commitment before anything was
revealed to the validator. When a validator is late the next one is asked, too, and all of them
together have no more time than the settlement leaves. A late one is passed over when another has
answered or nobody is left who could.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from splitup.core import limits, tuning
from splitup.messages.completions import TaskCommitment
from splitup.messages.verification import VerificationResult
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.proof_of_sampling import count_needed, find_usable


@dataclass(slots=True)
class ValidatorAnswer:
    result: VerificationResult
    token: str  # as the validator signed it
    root: str = field(init=False)  # that the validator's commitment has to name

    def __post_init__(self) -> None:
        self.root = self.result.root()


@dataclass(slots=True)
class TaskCheck:
    """The state of one sampled task."""

    task: int
    validators: tuple[str, ...]  # in order
    steps: int
    needs_outsider: bool = False  # a member recomputes it, too
    outsider_at: float | None = None  # when the validators' answers were here
    outsider_s: float = 0.0  # from then on, until each next member looks, too
    asked_at: dict[str, float] = field(default_factory=dict)  # of the first ``validators``
    late_at: dict[str, float] = field(default_factory=dict)  # then another is asked, too
    order_at: dict[str, float] = field(default_factory=dict)  # validator -> when to send its order
    held: dict[str, str] = field(default_factory=dict)  # validator -> root
    fixed_at: dict[str, float] = field(default_factory=dict)
    answers: dict[str, ValidatorAnswer] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    closed_at: float | None = None  # when we first said that reveals are due
    disputed_claims: int = 0  # the most that members were asked to rule on together
    disputed_at: float | None = None  # since when they are asked that
    is_recomputing: bool = False  # here, at the moment
    recompute_at: float = 0.0  # the earliest time to do it again
    slow_tries: int = 0  # that took too long here

    def fork(self) -> TaskCheck:
        """Return a check that goes on by itself from here."""
        return replace(
            self,
            asked_at=dict(self.asked_at),
            late_at=dict(self.late_at),
            order_at=dict(self.order_at),
            held=dict(self.held),
            fixed_at=dict(self.fixed_at),
            answers=dict(self.answers),
            given_up=set(self.given_up),
        )

    # ---- answers of validators --------------------------------------------------------------

    def hold(self, validator: str, root: str) -> None:
        """Keep a validator's first commitment."""
        if validator in self.validators:
            self.held.setdefault(validator, root)

    def add(self, answer: ValidatorAnswer, attestations: Attestations) -> bool:
        """Keep a validator's latest answer until it is the fixed one; return whether it was kept.

        A validator may tell members different things. Those that hold what it did not commit to
        take the right answer from another member's proposal.
        """
        validator = answer.result.validator
        if validator not in self.validators:
            return False
        known = self.answers.get(validator)
        fixed = attestations.find_fixed(self.task, validator)
        if known is not None and (fixed == known.root or known.result == answer.result):
            return False
        self.answers[validator] = answer
        return True

    def get_attested(self) -> list[tuple[str, str]]:
        """Return (validator, root) of the validators that were asked and committed in time."""
        return [
            (validator, self.held[validator])
            for validator in self.asked_at
            if validator in self.held and validator not in self.given_up
        ]

    # ---- time -------------------------------------------------------------------------------

    def advance(
        self,
        attestations: Attestations,
        commitment: TaskCommitment | None,
        due_at: float | None,
        until: float,
        now: float,
    ) -> None:
        """Ask as many other validators as are needed when some are late, and pass over the silent.

        ``commitment`` is the executor's, once revealed; reveals are due since ``due_at``. All who
        may still be asked have equal shares of the time ``until`` which validators are heard. From
        ``closed_at`` on who was asked before and is late is passed over: it might copy what the
        others reveal.
        """
        open_ = [v for v in self.asked_at if self._get_answer(attestations, v) is None]
        fixed = {v for v in open_ if attestations.find_fixed(self.task, v) is not None}
        for validator in fixed:
            fixed_at = self.fixed_at.setdefault(validator, now)
            if due_at is not None and now - max(due_at, fixed_at) >= limits.VALIDATOR_REVEAL_S:
                self.given_up.add(validator)
        late = {v for v in open_ if v not in fixed and now >= self.late_at[v]}
        if len(self.asked_at) == len(self.validators) and late.issuperset(set(open_) - fixed):
            self.given_up |= late
        elif self.closed_at is not None:
            self.given_up |= {v for v in late if self.asked_at[v] < self.closed_at}
        wanted = 1
        if commitment is not None:
            wanted = count_needed(commitment, self.get_usable(attestations, commitment))
        counting = {v for v in self.asked_at if self._may_count(attestations, v, commitment)}
        missing = wanted - len(counting - late)
        for validator in self.validators[len(self.asked_at) :][: max(0, missing)]:
            share_s = max(0.0, until - now) / (len(self.validators) - len(self.asked_at))
            self.asked_at[validator] = now
            self.late_at[validator] = now + min(share_s, self._compute_usual_s())

    def _compute_usual_s(self) -> float:
        """Return after how long another validator is asked, where time is plenty."""
        return limits.VERIFICATION_SILENCE_S + limits.VERIFICATION_STEP_S * self.steps

    def find_orders(
        self, attestations: Attestations, now: float, place: int, members: int
    ) -> list[str]:
        """Return the validators to send the order to now; ``members`` take turns by ``place``.

        The order is repeated until a commitment comes: the validator may have been down.
        """

        def get_turn(validator: str, asked_at: float) -> float:
            """Few members take half of the time after which another validator is asked."""
            share_s = (self.late_at[validator] - asked_at) / 2 / members
            return asked_at + place * max(share_s, tuning.VERIFICATION_STAGE_S)

        due = [
            validator
            for validator, asked_at in self.asked_at.items()
            if validator not in self.answers
            and validator not in self.given_up
            and now >= self.order_at.get(validator, get_turn(validator, asked_at))
            and attestations.find_fixed(self.task, validator) is None
        ]
        self.order_at.update(dict.fromkeys(due, now + tuning.VERIFICATION_REPEAT_S))
        return due

    # ---- state of the check ----------------------------------------------------------------

    def is_covered(self, attestations: Attestations) -> bool:
        """Return whether a commitment is fixed, or no validator is left that could make one."""
        if any(attestations.find_fixed(self.task, v) is not None for v in self.asked_at):
            return True
        waiting = any(self._may_count(attestations, v, None) for v in self.asked_at)
        return not waiting and len(self.asked_at) == len(self.validators)

    def is_heard(self, attestations: Attestations, commitment: TaskCommitment) -> bool:
        """Return whether no answer has to be waited for any more."""
        usable = self.get_usable(attestations, commitment)
        enough = len(usable) >= count_needed(commitment, usable)
        for validator in self.asked_at:
            if validator in self.given_up or self._get_answer(attestations, validator) is not None:
                continue
            fixed = attestations.find_fixed(self.task, validator) is not None
            if fixed or (not enough and self._may_count(attestations, validator, commitment)):
                return False
        return enough or len(self.asked_at) == len(self.validators)

    def get_heard(self, attestations: Attestations) -> list[VerificationResult]:
        """Return the answers that count, in the order of the validators."""
        found = (self._get_answer(attestations, validator) for validator in self.asked_at)
        return [result for result in found if result is not None and not result.error]

    def get_usable(
        self, attestations: Attestations, commitment: TaskCommitment
    ) -> list[VerificationResult]:
        """Return the answers that are about the executor's committed inputs."""
        return find_usable(commitment, self.get_heard(attestations))

    def get_withheld(self, attestations: Attestations) -> tuple[str, ...]:
        """Return the validators that committed and that 2f+1 members attest as silent."""
        return tuple(
            validator
            for validator in self.validators
            if self._get_answer(attestations, validator) is None
            and attestations.is_silent(validator, self.task)
        )

    def is_overdue(self, attestations: Attestations, validator: str) -> bool:
        """Return whether a validator committed and did not reveal in time."""
        return (
            validator in self.given_up
            and attestations.find_fixed(self.task, validator) is not None
            and self._get_answer(attestations, validator) is None
        )

    def _get_answer(self, attestations: Attestations, validator: str) -> VerificationResult | None:
        """Return an answer that its validator committed to, or its error if it never committed."""
        answer = self.answers.get(validator)
        if answer is None:
            return None
        fixed = attestations.find_fixed(self.task, validator)
        if answer.result.error:  # after a commitment an error does not count
            return answer.result if fixed is None else None
        return answer.result if fixed == answer.root else None

    def _may_count(
        self, attestations: Attestations, validator: str, commitment: TaskCommitment | None
    ) -> bool:
        """Return whether the validator's answer is usable, or may still become so."""
        result = self._get_answer(attestations, validator)
        if result is None:
            return validator not in self.given_up
        return not result.error and (commitment is None or bool(find_usable(commitment, [result])))
