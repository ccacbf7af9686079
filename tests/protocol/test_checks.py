"""Whom to ask next, and when there is a verdict."""

from __future__ import annotations

from splitup import limits
from splitup.protocol.checks import Answer, Check
from splitup.protocol.verification import Outcome, Verdict
from splitup.wire import TaskCommitment, VerificationResult
from tests.builders import address

IN, GOOD, BAD = "1" * 64, "2" * 64, "3" * 64
EXECUTOR = address(1)
VALIDATORS = tuple(address(n) for n in (11, 12, 13))
SILENCE_S = limits.VERIFICATION_SILENCE_S + 4 * limits.VERIFICATION_STEP_S


def commit(outputs: str = GOOD) -> TaskCommitment:
    return TaskCommitment(task=2, task_id="a" * 64, inputs=(IN,), outputs=(outputs,))


def answer(place: int, outputs: str = GOOD, *, inputs: str = IN, error: str = "") -> Answer:
    result = VerificationResult(
        execution_id="0x" + "ee" * 32,
        task=2,
        validator=VALIDATORS[place],
        inputs=(inputs,),
        outputs=(outputs,),
        error=error,
    )
    return Answer(result, "token")


def make_check() -> Check:
    return Check(2, VALIDATORS, 4, 0.0)


def test_one_confirmation_clears() -> None:
    check = make_check()
    assert check.advance(commit(), EXECUTOR, 0.0) is None
    assert check.add(answer(0))
    verdict = check.advance(commit(), EXECUTOR, 0.1)
    assert verdict == Verdict(2, Outcome.HONEST, (VALIDATORS[0],), ())


def test_two_that_agree_convict() -> None:
    check = make_check()
    check.add(answer(0))
    assert check.advance(commit(BAD), EXECUTOR, 0.1) is None
    assert check.turn == 1
    check.add(answer(1))
    verdict = check.advance(commit(BAD), EXECUTOR, 0.2)
    assert verdict == Verdict(2, Outcome.LIED, VALIDATORS[:2], (EXECUTOR,))


def test_a_volunteer_is_not_heard_before_its_turn() -> None:
    check = make_check()
    check.add(answer(2))
    assert check.advance(commit(), EXECUTOR, 0.1) is None
    assert check.advance(commit(), EXECUTOR, SILENCE_S + 0.1) is None
    verdict = check.advance(commit(), EXECUTOR, 2 * SILENCE_S + 0.2)
    assert verdict == Verdict(2, Outcome.HONEST, (VALIDATORS[2],), ())


def test_unusable_answers_pass_the_turn() -> None:
    check = make_check()
    check.add(answer(0, error="the object was gone"))
    check.add(answer(1, inputs="9" * 64))
    assert check.advance(commit(), EXECUTOR, 0.1) is None
    assert check.turn == 2


def test_when_nobody_can_tell_nobody_is_punished() -> None:
    check = make_check()
    for step in range(1, 4):
        verdict = check.advance(commit(), EXECUTOR, step * (SILENCE_S + 0.1))
    assert verdict == Verdict(2, Outcome.UNRESOLVED, (), ())
    alone = Check(2, (), 4, 0.0)
    assert alone.advance(commit(), EXECUTOR, 0.0) == Verdict(2, Outcome.UNRESOLVED, (), ())


def test_strangers_and_second_answers_do_not_count() -> None:
    check = Check(2, VALIDATORS[:1], 4, 0.0)
    assert not check.add(answer(1))
    assert check.add(answer(0, BAD))
    assert not check.add(answer(0, GOOD))


def test_orders_are_staged_and_sent_once_per_turn() -> None:
    check = make_check()
    assert check.find_next(0.0, 1) is None
    assert check.find_next(limits.VERIFICATION_STAGE_S, 1) == VALIDATORS[0]
    assert check.find_next(limits.VERIFICATION_STAGE_S, 1) is None
    check.add(answer(0, BAD))
    check.advance(commit(), EXECUTOR, 3.0)
    assert check.find_next(3.0, 0) == VALIDATORS[1]
