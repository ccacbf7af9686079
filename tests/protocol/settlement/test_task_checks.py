"""Whom to ask next, whose answer counts, and when everybody was heard."""

from __future__ import annotations

from splitup.core import limits, tuning
from splitup.messages.completions import EMPTY_DIGEST, TaskCommitment
from splitup.messages.verification import (
    Attestation,
    Held,
    SignedAttestation,
    Silence,
    VerificationResult,
)
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.task_checks import TaskCheck, ValidatorAnswer
from tests.builders import address

IN, GOOD, BAD = "1" * 64, "2" * 64, "3" * 64
TASK, STEPS = 2, 4
VALIDATORS = tuple(address(n) for n in range(11, 17))
MEMBERS = tuple(address(n) for n in range(1, 5))
SILENCE_S = limits.VERIFICATION_SILENCE_S + STEPS * limits.VERIFICATION_STEP_S
UNTIL_S = 1_000.0  # more than these few steps need


def commit(outputs: str = GOOD) -> TaskCommitment:
    return TaskCommitment(task=TASK, inputs=(IN,), outputs=(outputs,), state=EMPTY_DIGEST)


def answer(
    place: int, outputs: str = GOOD, *, inputs: str = IN, error: str = ""
) -> ValidatorAnswer:
    result = VerificationResult(
        execution_id="0x" + "ee" * 32,
        task=TASK,
        validator=VALIDATORS[place],
        inputs=(inputs,),
        outputs=(outputs,),
        state=EMPTY_DIGEST,
        salt="0x" + "5" * 64,
        error=error,
    )
    return ValidatorAnswer(result, "token")


def attest(
    attestations: Attestations,
    *answers: ValidatorAnswer,
    members: int = 3,
    silent: tuple[Silence, ...] = (),
) -> None:
    """Let members hold the commitments of these answers."""
    for member in MEMBERS[:members]:
        attestation = Attestation(
            execution_id="0x" + "ee" * 32,
            member=member,
            steps=1,
            due=False,
            held=tuple(
                Held(task=TASK, validator=a.result.validator, root=a.result.root()) for a in answers
            ),
            silent=silent,
            rulings=(),
        )
        attestations.add(SignedAttestation(attestation=attestation, signature="0x" + "0" * 128))


def start() -> tuple[TaskCheck, Attestations]:
    check, attestations = TaskCheck(TASK, VALIDATORS, STEPS), Attestations(quorum=3)
    check.advance(attestations, None, None, UNTIL_S, 0.0)
    return check, attestations


def asked(check: TaskCheck) -> tuple[str, ...]:
    return tuple(check.asked_at)


def test_one_is_asked_and_its_confirmation_is_enough() -> None:
    check, attestations = start()
    assert asked(check) == VALIDATORS[:1]
    assert not check.is_covered(attestations)
    attest(attestations, answer(0))
    assert check.is_covered(attestations)
    assert not check.is_heard(attestations, commit())
    assert check.add(answer(0), attestations)
    check.advance(attestations, commit(), 1.0, UNTIL_S, 1.0)
    assert check.is_heard(attestations, commit())
    assert asked(check) == VALIDATORS[:1]


def test_after_a_mismatch_a_third_node_is_heard_and_then_five() -> None:
    check, attestations = start()
    wanted = [answer(0, BAD), answer(1), answer(2), answer(3, BAD)]
    attest(attestations, *wanted)
    for place, count in ((0, 2), (1, 4), (2, 4)):
        check.add(wanted[place], attestations)
        check.advance(attestations, commit(), 1.0, UNTIL_S, 1.0)
        assert asked(check) == VALIDATORS[:count]
        assert not check.is_heard(attestations, commit())
    check.add(wanted[3], attestations)
    check.advance(attestations, commit(), 1.0, UNTIL_S, 1.0)
    assert check.is_heard(attestations, commit())
    assert len(check.get_usable(attestations, commit())) == 4


def test_an_answer_without_a_commitment_that_a_quorum_held_does_not_count() -> None:
    check, attestations = start()
    attest(attestations, answer(0), members=2)
    check.add(answer(0), attestations)
    assert check.get_heard(attestations) == []
    check.advance(attestations, commit(), 0.0, UNTIL_S, SILENCE_S)
    assert asked(check) == VALIDATORS[:2], "the next one is asked"
    attest(attestations, answer(0))
    assert check.get_heard(attestations) == [answer(0).result]


def test_an_answer_that_is_not_what_was_committed_to_is_silence() -> None:
    check, attestations = start()
    attest(attestations, answer(0, BAD))
    check.add(answer(0, GOOD), attestations)
    check.advance(attestations, commit(), 0.0, UNTIL_S, 0.0)
    assert check.get_heard(attestations) == []
    check.advance(attestations, commit(), 0.0, UNTIL_S, limits.VALIDATOR_REVEAL_S)
    assert check.is_overdue(attestations, VALIDATORS[0])
    assert asked(check) == VALIDATORS[:2]
    attest(attestations, silent=(Silence(node=VALIDATORS[0], task=TASK),))
    assert check.get_withheld(attestations) == VALIDATORS[:1]


def test_who_has_committed_may_not_back_out_with_an_excuse() -> None:
    check, attestations = start()
    attest(attestations, answer(0))
    check.add(answer(0, error="oops"), attestations)
    check.advance(attestations, commit(), 0.0, UNTIL_S, 0.0)
    check.advance(attestations, commit(), 0.0, UNTIL_S, limits.VALIDATOR_REVEAL_S)
    assert check.is_overdue(attestations, VALIDATORS[0])


def test_an_excuse_passes_the_turn_at_once_and_costs_nothing() -> None:
    check, attestations = start()
    check.add(answer(0, error="the object was gone"), attestations)
    check.advance(attestations, None, None, UNTIL_S, 0.1)
    assert asked(check) == VALIDATORS[:2]
    assert check.get_withheld(attestations) == ()


def test_other_inputs_pass_the_turn() -> None:
    check, attestations = start()
    attest(attestations, answer(0, inputs="9" * 64))
    check.add(answer(0, inputs="9" * 64), attestations)
    check.advance(attestations, commit(), 1.0, UNTIL_S, 1.0)
    assert asked(check) == VALIDATORS[:2]


def test_a_late_commitment_is_not_attested_once_we_said_that_reveals_are_due() -> None:
    """Else who was late could wait for what the others reveal."""
    check, attestations = start()
    check.advance(attestations, None, None, UNTIL_S, SILENCE_S)
    assert asked(check) == VALIDATORS[:2]
    roots = [(VALIDATORS[place], answer(place).result.root()) for place in (0, 1)]
    for validator, root in roots:
        check.hold(validator, root)
    assert check.get_attested() == roots, "it may still be the first that is heard"
    check.closed_at = SILENCE_S + 1.0
    check.advance(attestations, None, None, UNTIL_S, SILENCE_S + 1.0)
    assert check.get_attested() == roots[1:]


def test_who_is_asked_after_a_mismatch_has_as_long_as_anybody_is_left() -> None:
    check, attestations = start()
    attest(attestations, answer(0, BAD))
    check.add(answer(0, BAD), attestations)
    check.closed_at = 1.0
    for place in range(1, 6):
        check.advance(attestations, commit(), 1.0, UNTIL_S, 2.0 + (place - 1) * SILENCE_S)
        assert asked(check) == VALIDATORS[: place + 1]
        assert not check.given_up
    check.advance(attestations, commit(), 1.0, UNTIL_S, 2.0 + 5 * SILENCE_S)
    assert check.given_up == set(VALIDATORS[1:])


def test_a_volunteer_is_not_heard_before_its_turn() -> None:
    check, attestations = start()
    check.hold(VALIDATORS[2], answer(2).result.root())
    assert check.get_attested() == []
    attest(attestations, answer(2))
    check.add(answer(2), attestations)
    assert check.get_heard(attestations) == []


def test_all_fixed_answers_are_waited_for() -> None:
    """A copy that came late must not end what another validator is about to contradict."""
    check, attestations = start()
    check.advance(attestations, None, None, UNTIL_S, SILENCE_S)
    attest(attestations, answer(0), answer(1, BAD))
    check.add(answer(0), attestations)
    check.advance(attestations, commit(), 20.0, UNTIL_S, 20.0)
    assert not check.is_heard(attestations, commit())
    check.advance(attestations, commit(), 20.0, UNTIL_S, 20.0 + limits.VALIDATOR_REVEAL_S)
    assert check.is_heard(attestations, commit())


def test_when_nobody_is_left_there_is_nothing_to_wait_for() -> None:
    check, attestations = start()
    for place in range(len(VALIDATORS)):
        check.advance(attestations, None, None, UNTIL_S, (place + 1) * (SILENCE_S + 0.1))
    assert check.is_covered(attestations)
    assert check.is_heard(attestations, commit())
    alone = TaskCheck(TASK, (), STEPS)
    alone.advance(attestations, None, None, UNTIL_S, 0.0)
    assert alone.is_covered(attestations) and alone.is_heard(attestations, commit())


def test_strangers_and_what_is_not_held_first_do_not_count() -> None:
    check, attestations = TaskCheck(TASK, VALIDATORS[:1], STEPS), Attestations(quorum=3)
    assert not check.add(answer(1), attestations)
    check.hold(VALIDATORS[0], "0x" + "1" * 64)
    check.hold(VALIDATORS[0], "0x" + "2" * 64)
    check.hold(VALIDATORS[1], "0x" + "2" * 64)
    assert check.held == {VALIDATORS[0]: "0x" + "1" * 64}


def test_the_answer_that_was_committed_to_replaces_another_and_is_not_replaced() -> None:
    """A validator that tells members different things cannot make them differ for ever."""
    check, attestations = start()
    assert check.add(answer(0, BAD), attestations)
    assert not check.add(answer(0, BAD), attestations)
    attest(attestations, answer(0))
    assert check.get_heard(attestations) == []
    assert check.add(answer(0), attestations)
    assert check.get_heard(attestations) == [answer(0).result]
    assert not check.add(answer(0, BAD), attestations)
    assert check.get_heard(attestations) == [answer(0).result]


def test_orders_are_staged_and_sent_again_to_who_is_silent() -> None:
    check, attestations = start()
    staged, again = SILENCE_S / 8, tuning.VERIFICATION_REPEAT_S  # half of it for all four members
    assert check.find_orders(attestations, 0.0, 1, 4) == []
    assert check.find_orders(attestations, staged, 1, 4) == [VALIDATORS[0]]
    assert check.find_orders(attestations, staged, 1, 4) == []
    assert check.find_orders(attestations, staged + again - 0.1, 1, 4) == []
    assert check.find_orders(attestations, staged + again, 1, 4) == [VALIDATORS[0]]
    fresh, nothing = start()
    assert fresh.find_orders(nothing, tuning.VERIFICATION_STAGE_S, 1, 31) == [VALIDATORS[0]]
    attest(attestations, answer(0, BAD))  # committed to: it has the order
    assert check.find_orders(attestations, staged + 2 * again, 1, 4) == []
    check.add(answer(0, BAD), attestations)
    check.advance(attestations, commit(), 2.0, UNTIL_S, 3.0)
    assert check.find_orders(attestations, 3.0, 0, 4) == [VALIDATORS[1]]


def test_who_was_passed_over_gets_no_order() -> None:
    check, attestations = start()
    late = SILENCE_S + 0.1
    check.advance(attestations, None, None, UNTIL_S, late)
    assert check.find_orders(attestations, late, 0, 4) == list(VALIDATORS[:2])
    check.closed_at = late + 0.1
    later = late + tuning.VERIFICATION_REPEAT_S + 0.1
    check.advance(attestations, None, None, UNTIL_S, later)
    assert check.find_orders(attestations, later, 0, 4) == [VALIDATORS[1]]
