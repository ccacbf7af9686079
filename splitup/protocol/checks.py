"""One sampled task on its way to a verdict: whom to ask next, and what their answers amount to.

Validators are asked one after another in the order that the draw gives them. Each gets its chance
once; an answer counts when its validator had its chance, also when it comes late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitup import limits
from splitup.protocol.verification import Outcome, Verdict, judge
from splitup.wire import TaskCommitment, VerificationResult


@dataclass(slots=True)
class Answer:
    result: VerificationResult
    token: str  # as the validator signed it


@dataclass(slots=True)
class Check:
    """The state of one sampled task. ``turn`` is the place of the validator being asked."""

    task: int
    validators: tuple[str, ...]
    steps: int
    since: float
    turn: int = 0
    asked: bool = False
    answers: dict[str, Answer] = field(default_factory=dict)

    def add(self, answer: Answer) -> bool:
        """Keep a validator's first answer; return whether it is one of ours and new."""
        validator = answer.result.validator
        if validator not in self.validators or validator in self.answers:
            return False
        self.answers[validator] = answer
        return True

    def advance(self, commitment: TaskCommitment, executor: str, now: float) -> Verdict | None:
        """Move on past who answered or was silent too long; return the verdict if there is one."""
        silence_s = limits.VERIFICATION_SILENCE_S + limits.VERIFICATION_STEP_S * self.steps
        while True:
            verdict = judge(commitment, executor, self._get_heard())
            if verdict is not None:
                return verdict
            if self.turn >= len(self.validators):
                return Verdict(self.task, Outcome.UNRESOLVED, (), ())
            answered = self.validators[self.turn] in self.answers
            if not answered and now - self.since < silence_s:
                return None
            self.turn += 1
            self.since, self.asked = now, False

    def find_next(self, now: float, place: int) -> str | None:
        """Return the validator to send the order to now, at most once per turn and member."""
        if self.asked or self.turn >= len(self.validators):
            return None
        if now - self.since < place * limits.VERIFICATION_STAGE_S:
            return None
        self.asked = True
        return self.validators[self.turn]

    def _get_heard(self) -> list[VerificationResult]:
        chances = self.validators[: self.turn]
        return [self.answers[v].result for v in chances if v in self.answers]
