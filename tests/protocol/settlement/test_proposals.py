"""One member's part in agreeing on a settlement, by a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto import quorum
from splitup.protocol.committee.commands import (
    Command,
    Gossip,
    Log,
    Persist,
    SubmitSettlement,
)
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.committee.peer_messages import SettlementSignature
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.settlement.proposals import Proposals
from splitup.protocol.settlement.settlement_state import Proposing, SettlementState, Verifying
from splitup.protocol.settlement.settlement_transitions import take_draw
from tests.protocol.machines import (
    EXECUTION,
    EXECUTORS,
    VERIFY_NONE,
    make_completion,
    make_context,
    make_drawing,
)
from tests.protocol.settlement.test_settlement_transitions import make_draw


def make_proposals(place: int = 0) -> Proposals:
    return Proposals(make_context(place), VERIFY_NONE)


def make_verifying(rank: int = 0) -> SettlementState:
    """Return an execution of which no task was drawn and nothing was revealed yet."""
    state = make_drawing()
    take_draw(state, make_draw(state), place=rank, now=0.0)
    return state


def make_complete(rank: int = 0) -> SettlementState:
    state = make_verifying(rank)
    assert state.verification is not None
    for node in EXECUTORS:
        state.verification.completions[node] = make_completion(node)
    return state


def get_proposal(commands: list[Command]) -> SettlementProposal:
    (found,) = [
        command.message
        for command in commands
        if isinstance(command, Gossip) and isinstance(command.message, SettlementProposal)
    ]
    return found


def sign(place: int, proposal: SettlementProposal) -> SettlementSignature:
    struct_hash = quorum.settlement_struct_hash(EXECUTION, proposal.settlement_hash)
    return SettlementSignature(
        execution_id=EXECUTION,
        round=proposal.round,
        settlement_hash=proposal.settlement_hash,
        signature=make_context(place).sign(struct_hash),
    )


def test_nothing_is_proposed_before_every_executor_revealed() -> None:
    proposals, state = make_proposals(), make_verifying()
    assert state.verification is not None
    for node in EXECUTORS:
        assert proposals.advance(state, 0.0) == [] and isinstance(state.phase, Verifying)
        state.verification.completions[node] = make_completion(node)
    commands = proposals.advance(state, 0.0)
    assert isinstance(state.phase, Proposing)
    assert [type(command) for command in commands] == [Persist, Gossip], "signed, then proposed"
    assert {c.node for c in get_proposal(commands).completions} == set(EXECUTORS)


def test_members_propose_in_the_order_of_their_ranks_and_again_when_unanswered() -> None:
    proposals, state = make_proposals(), make_complete(rank=2)
    turn = 2 * tuning.SETTLEMENT_STAGE_S
    assert proposals.advance(state, 0.0) == []
    assert proposals.advance(state, turn - 0.1) == []
    first = get_proposal(proposals.advance(state, turn))
    again = turn + 4 * tuning.SETTLEMENT_STAGE_S
    assert proposals.advance(state, again - 0.1) == []
    assert get_proposal(proposals.advance(state, again)) == first, "the same round"


def test_2f_1_signatures_are_submitted_and_again_while_the_chain_lacks_them() -> None:
    proposals, state = make_proposals(), make_complete()
    accounts = make_context().accounts()
    proposal = get_proposal(proposals.advance(state, 0.0))
    assert proposals.process_signature(state, accounts[1], sign(1, proposal)) == []
    assert proposals.process_signature(state, accounts[1], sign(1, proposal)) == []
    (submission,) = proposals.process_signature(state, accounts[2], sign(2, proposal))
    assert isinstance(submission, SubmitSettlement)
    assert quorum.settlement_hash(submission.settlement) == proposal.settlement_hash
    assert proposals.process_signature(state, accounts[3], sign(3, proposal)) == []
    later = proposals.advance(state, 4 * tuning.SETTLEMENT_STAGE_S)
    assert [type(command) for command in later] == [Gossip, SubmitSettlement]


def test_signatures_of_another_settlement_member_or_round_do_not_count() -> None:
    proposals, state = make_proposals(), make_complete()
    accounts = make_context().accounts()
    assert proposals.process_signature(state, accounts[1], sign(1, PROPOSAL)) == [], "no proposal"
    proposal = get_proposal(proposals.advance(state, 0.0))
    other = sign(1, proposal.model_copy(update={"settlement_hash": "0x" + "66" * 32}))
    with pytest.raises(PeerFault, match="another settlement"):
        proposals.process_signature(state, accounts[1], other)
    with pytest.raises(BadSignature):
        proposals.process_signature(state, accounts[1], sign(2, proposal))
    late = sign(1, proposal).model_copy(update={"round": 1})
    assert proposals.process_signature(state, accounts[1], late) == []
    assert isinstance(state.phase, Proposing) and state.phase.own is not None
    assert state.phase.own.signatures.keys() == {make_context().account}


def test_a_proposal_is_signed_if_the_same_settlement_follows_from_our_evidence() -> None:
    proposals, state = make_proposals(1), make_complete(rank=3)
    proposer, other = make_context().accounts()[0], make_context().accounts()[2]
    false = PROPOSAL.model_copy(update={"settlement_hash": "0x" + "66" * 32})
    state.proposals = {proposer: PROPOSAL, other: false}
    persist, gossip = proposals.advance(state, 0.0)
    assert isinstance(persist, Persist) and isinstance(gossip, Gossip)
    assert gossip.to == proposer
    assert isinstance(gossip.message, SettlementSignature)
    assert gossip.message.settlement_hash == PROPOSAL.settlement_hash
    assert state.proposals == {other: false}, "our evidence may grow to the same settlement"


def test_a_proposal_may_lack_what_came_later_and_nothing_else() -> None:
    proposals, state = make_proposals(1), make_complete(rank=3)
    proposer, other = make_context().accounts()[0], make_context().accounts()[2]
    assert proposals.advance(state, 0.0) == []
    phase = state.phase
    assert isinstance(phase, Proposing)
    phase.verification.completions.pop(EXECUTORS[0])  # stands for any other evidence of ours
    false = PROPOSAL.model_copy(update={"settlement_hash": "0x" + "66" * 32})
    state.proposals = {proposer: PROPOSAL, other: false}
    assert proposals.advance(state, 0.0) == [], "it does not follow from all that we have now"
    assert proposals.judge(state, phase, other, phase.basis) == []
    persist, gossip = proposals.judge(state, phase, proposer, phase.basis)
    assert isinstance(persist, Persist) and isinstance(gossip, Gossip)
    assert state.proposals == {other: false}
    assert len(phase.evidence) == 1, "it is shown to who asks what the settlement rests on"


def test_one_settlement_is_signed_per_proposer_and_round() -> None:
    """A proposer whose evidence grew has to use the next round, also towards one who restarted."""
    proposer = make_context().accounts()[0]
    slot = f"settlement/{EXECUTION}/{proposer}/0"
    guard = SigningGuard({slot: {"digest": "0x" + "66" * 32, "until_s": 2**40}})
    proposals, state = (
        Proposals(replace(make_context(1), signing_guard=guard), VERIFY_NONE),
        make_complete(rank=3),
    )
    state.proposals = {proposer: PROPOSAL}
    (command,) = proposals.advance(state, 0.0)
    assert isinstance(command, Log)
    assert isinstance(state.phase, Proposing)
    assert state.phase.evidence == {}, "a liar that proposes again and again fills no memory"
    state.proposals = {proposer: PROPOSAL.model_copy(update={"round": 1})}
    assert [type(command) for command in proposals.advance(state, 0.0)] == [Persist, Gossip]


def test_rounds_are_bounded() -> None:
    proposals, state = make_proposals(), make_complete()
    state.rounds = limits.MAX_SETTLEMENT_ROUNDS
    assert proposals.advance(state, 0.0) == []


PROPOSAL = get_proposal(make_proposals().advance(make_complete(), 0.0))
