"""One member's part in a draw: shares in, shares and draws out, by a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitup.core import tuning
from splitup.core.errors import BadSignature
from splitup.messages.base import Message
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN, draw_alpha
from splitup.protocol.committee.commands import Command, Fault, Gossip, Log, Persist
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.committee.peer_messages import DrawMessage, DrawPartial
from splitup.protocol.settlement.draws import DrawAgreement
from splitup.protocol.settlement.settlement_state import (
    Committing,
    Drawing,
    SettlementState,
    Verifying,
)
from tests.protocol.machines import (
    CHEAP,
    EXECUTION,
    commit_on_chain,
    make_committing,
    make_context,
    make_state,
)


def make_draws(guard: SigningGuard | None = None) -> DrawAgreement:
    return DrawAgreement(replace(make_context(), signing_guard=guard or SigningGuard()))


def make_committed() -> SettlementState:
    state = make_committing()
    commit_on_chain(state)
    return state


def make_partial(place: int) -> DrawPartial:
    """The share of another member over the same commitments."""
    basis = make_committed().find_basis()
    assert basis is not None
    alpha = draw_alpha(EXECUTION, *basis)
    partial = CHEAP.sign_partial(make_context(place).share, RANDOMNESS_DOMAIN, alpha)
    return DrawPartial(execution_id=EXECUTION, partial=partial)


def give(draws: DrawAgreement, state: SettlementState, place: int, now: float) -> list[Command]:
    sender = make_context().accounts()[place]
    return draws.process_partial(state, sender, make_partial(place), now)


def get_messages(commands: list[Command]) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Gossip)]


def test_nothing_is_signed_before_commitments_cover_every_task() -> None:
    draws, state = make_draws(), make_committing()
    assert draws.make(state, 0.0) == [] and isinstance(state.phase, Committing)


def test_the_share_is_persisted_before_it_is_sent_and_repeated_until_there_is_a_draw() -> None:
    draws, state = make_draws(), make_committed()
    first = draws.make(state, 0.0)
    assert [type(command) for command in first] == [Persist, Gossip]
    assert isinstance(state.phase, Drawing)
    assert draws.make(state, tuning.GOSSIP_RETRY_S / 2) == []
    assert get_messages(draws.make(state, tuning.GOSSIP_RETRY_S)) == get_messages(first)


def test_2f_1_shares_make_the_draw_whenever_they_come() -> None:
    draws, state = make_draws(), make_committed()
    assert give(draws, state, 1, 0.0) == []  # before we are ready
    draws.make(state, 0.0)
    assert isinstance(state.phase, Drawing)
    give(draws, state, 2, 1.0)
    draws.make(state, 1.0)
    assert isinstance(state.phase, Verifying)
    assert not state.rests_on_chain(
        state.phase.verification.draw.model_copy(update={"block_hash": "0x" + "99" * 32})
    )
    assert state.rests_on_chain(state.phase.verification.draw)


def test_a_false_share_is_blamed_on_its_sender_and_the_next_one_counts() -> None:
    draws, state = make_draws(), make_committed()
    draws.make(state, 0.0)
    accounts = make_context().accounts()
    false = DrawPartial(execution_id=EXECUTION, partial="0x01" + "66" * 47)
    draws.process_partial(state, accounts[1], false, 0.0)
    give(draws, state, 2, 0.0)
    faults = [command for command in draws.make(state, 0.1) if isinstance(command, Fault)]
    assert [fault.peer for fault in faults] == [accounts[1]]
    assert isinstance(state.phase, Drawing)
    give(draws, state, 3, 0.0)
    draws.make(state, 0.2)
    assert isinstance(state.phase, Verifying)


def test_who_signed_over_other_commitments_before_does_not_sign_again() -> None:
    guard = SigningGuard({f"draw/{EXECUTION}": {"digest": "00" * 32, "until_s": 2**40}})
    draws, state = make_draws(guard), make_committed()
    commands = draws.make(state, 0.0)
    assert [type(command) for command in commands] == [Log]
    for place in (1, 2, 3):
        give(draws, state, place, 0.0)
    draws.make(state, 0.1)
    assert isinstance(state.phase, Verifying), "the others' shares are enough"


def test_a_draw_of_another_member_is_taken_if_it_rests_on_our_chain() -> None:
    draws, done = make_draws(), make_committed()
    draws.make(done, 0.0)
    for place in (1, 2):
        give(draws, done, place, 0.0)
    draws.make(done, 0.0)
    assert done.verification is not None
    draw = done.verification.draw
    behind = make_committing()
    draws.adopt(behind, draw, 5.0)
    assert behind.verification is None, "we see no commitments yet"
    requested = make_state()
    draws.adopt(requested, draw, 5.0)
    assert requested.verification is None, "we know no plan yet"
    commit_on_chain(behind)
    with pytest.raises(BadSignature):
        draws.adopt(behind, draw.model_copy(update={"seed": "0x" + "99" * 32}), 5.0)
    assert behind.verification is None
    draws.adopt(behind, draw, 5.0)
    assert isinstance(behind.phase, Verifying)


def test_a_late_share_is_answered_with_the_draw() -> None:
    draws, state = make_draws(), make_committed()
    draws.make(state, 0.0)
    for place in (1, 2):
        give(draws, state, place, 0.0)
    draws.make(state, 0.0)
    assert give(draws, state, 3, 0.1) == [], "it only crossed the draw"
    answer = get_messages(give(draws, state, 3, tuning.GOSSIP_RETRY_S))
    assert [type(message) for message in answer] == [DrawMessage]
