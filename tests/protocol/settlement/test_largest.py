"""Bounds that have to hold together for the largest execution that a request may ask for."""

from __future__ import annotations

from splitup.chain.deployment import MarketParameters
from splitup.core import limits
from splitup.messages.verification import Attestation, Held, Silence
from tests.builders import address


def test_a_member_can_attest_all_that_may_be_said_about_the_largest_execution() -> None:
    """Every task is drawn, all who may be asked commit and then withhold, and so do executors."""
    asked = [
        (task, address(1 + place))
        for task in range(limits.MAX_TASKS)
        for place in range(limits.MAX_ASKED)
    ]
    attestation = Attestation(
        execution_id="0x" + "ee" * 32,
        member=address(1),
        steps=limits.MAX_STEPS,
        due=True,
        held=tuple(Held(task=task, validator=node, root="0x" + "5" * 64) for task, node in asked),
        silent=(
            *(Silence(node=address(1 + n), task=None) for n in range(limits.MAX_TASKS)),
            *(Silence(node=node, task=task) for task, node in asked),
        ),
        rulings=(),
    )
    assert len(attestation.canonical_bytes()) <= limits.MAX_MESSAGE_BYTES


def test_who_may_still_be_waited_for_can_read_and_reveal() -> None:
    """Logs are granted and nodes reveal beyond the last verdict, whatever the market's grace."""
    last_s = limits.VERIFICATION_GRACE_S * limits.RULING_GRACE_BPS // 10_000
    assert last_s < limits.VERIFICATION_GRACE_S
    assert MarketParameters().settlement_grace_s <= limits.VERIFICATION_GRACE_S
    # Half of the least time, with a draw at the deadline, is for validators, half of the rest for
    # others after a mismatch: so much is left for reveals and rulings.
    assert last_s / 4 >= limits.VALIDATOR_REVEAL_S + limits.EXECUTOR_REVEAL_S + limits.RULING_S
