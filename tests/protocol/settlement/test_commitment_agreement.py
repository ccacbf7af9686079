"""One member's part in agreeing on the executors' commitments, by a virtual clock."""

from __future__ import annotations

import pytest

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto import quorum
from splitup.messages.base import Message
from splitup.messages.completions import Takeover
from splitup.protocol.committee.commands import Command, Gossip, SubmitCommitments
from splitup.protocol.committee.events import ExecutionCommitted
from splitup.protocol.committee.peer_messages import CommitmentsShared, CommitmentsVote
from splitup.protocol.execution.takeovers import sign_takeover
from splitup.protocol.settlement.chain_commitments import compute_commitments_root
from splitup.protocol.settlement.collected_commitments import check_extent
from splitup.protocol.settlement.commitments import CommitmentAgreement
from splitup.protocol.settlement.settlement_state import SettlementState
from tests.protocol.committees import make_identity
from tests.protocol.machines import (
    BLOCK,
    CLIENT,
    EXECUTION,
    EXECUTORS,
    STEPS,
    make_commitment,
    make_committing,
    make_context,
    make_end,
    make_plan_context,
    make_state,
)
from tests.protocol.simulator import make_signed_end

CONTEXT = make_plan_context()
TOKEN = "token"
ANSWER_S = 3.0
KEYS = {entry.node: entry.signing_key for entry in CONTEXT.plan.nodes}


def make_full() -> tuple[CommitmentAgreement, SettlementState]:
    """Return an execution of which every executor's commitment is here."""
    agreement, state = CommitmentAgreement(make_context(), lambda: ANSWER_S), make_committing()
    for node in EXECUTORS:
        agreement.process_commitment(state, make_commitment(node), KEYS[node], TOKEN)
    return agreement, state


def sign_vote(place: int, vote: CommitmentsVote) -> CommitmentsVote:
    struct_hash = quorum.commitments_struct_hash(EXECUTION, vote.root, vote.exposures_hash)
    return vote.model_copy(update={"signature": make_context(place).sign(struct_hash)})


def get_messages(commands: list[Command]) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Gossip)]


def get_vote(commands: list[Command]) -> CommitmentsVote:
    (message,) = get_messages(commands)
    assert isinstance(message, CommitmentsVote)
    return message


def test_a_commitment_needs_a_plan_its_nodes_key_and_no_more_steps_than_paid() -> None:
    agreement, node = CommitmentAgreement(make_context(), lambda: ANSWER_S), EXECUTORS[0]
    with pytest.raises(Unavailable):
        agreement.process_commitment(make_state(), make_commitment(node), KEYS[node], TOKEN)
    state = make_committing()
    with pytest.raises(BadSignature):
        agreement.process_commitment(state, make_commitment(node), "0x" + "00" * 32, TOKEN)
    many = make_commitment(node).model_copy(update={"end": make_end(STEPS + 1)})
    with pytest.raises(PeerFault, match="more steps than were paid for"):
        agreement.process_commitment(state, many, KEYS[node], TOKEN)
    assert not state.collected.by_node


def test_s02_no_executor_invents_an_end_of_the_client() -> None:
    state, stranger = make_committing(), make_identity(78)
    with pytest.raises(BadSignature):
        state.add_end(make_signed_end(EXECUTION, 1, stranger))
    assert state.find_steps() is None


def test_a_member_votes_once_all_executors_committed_and_repeats_the_vote() -> None:
    agreement, state = CommitmentAgreement(make_context(), lambda: ANSWER_S), make_committing()
    for node in EXECUTORS:
        assert agreement.advance(state, CONTEXT, 0.0) == []
        agreement.process_commitment(state, make_commitment(node), KEYS[node], TOKEN)
    vote = get_vote(agreement.advance(state, CONTEXT, 1.0))
    assert agreement.advance(state, CONTEXT, 1.0 + tuning.GOSSIP_RETRY_S / 2) == []
    *shared, again = get_messages(agreement.advance(state, CONTEXT, 1.0 + tuning.GOSSIP_RETRY_S))
    assert again == vote
    assert [type(message) for message in shared] == [CommitmentsShared] * 2
    assert get_vote(agreement.advance(state, CONTEXT, 1.0 + 2 * tuning.GOSSIP_RETRY_S)) == vote, (
        "the others got what there is"
    )


def test_a_member_shares_nothing_while_enough_of_them_vote_as_it_does() -> None:
    agreement, state = make_full()
    vote = get_vote(agreement.advance(state, CONTEXT, 0.0))
    for place in (1, 2):
        sender = make_context().accounts()[place]
        agreement.process_vote(state, sender, sign_vote(place, vote))
    assert get_vote(agreement.advance(state, CONTEXT, 2 * tuning.GOSSIP_RETRY_S)) == vote


def test_what_is_shared_is_divided_among_messages_that_members_accept() -> None:
    agreement, state = CommitmentAgreement(make_context(), lambda: ANSWER_S), make_committing()
    token = "x" * limits.MAX_COMMITMENT_BYTES
    for node in EXECUTORS:
        agreement.process_commitment(state, make_commitment(node), KEYS[node], token)
        for steps in range(1, STEPS):
            earlier = make_commitment(node).model_copy(update={"end": make_end(steps)})
            agreement.process_commitment(state, earlier, KEYS[node], token)
    with pytest.raises(PeerFault, match="larger than"):
        agreement.process_commitment(
            state, make_commitment(EXECUTORS[0]), KEYS[EXECUTORS[0]], token + "x"
        )
    state.collected.finals.pop(1)  # a second one is only shared
    state.collected.finals = {STEPS: make_end(STEPS)}
    agreement.advance(state, CONTEXT, 0.0)
    messages = get_messages(agreement.advance(state, CONTEXT, 5.0))[:-1]
    assert all(isinstance(message, CommitmentsShared) for message in messages)
    sizes = [len(message.canonical_bytes()) for message in messages]
    assert max(sizes) < limits.MAX_MESSAGE_BYTES
    assert sum(sizes) > len(state.collected.list_tokens()) * 2**19


def test_s118_a_commitment_holds_no_more_than_its_nodes_tasks_need() -> None:
    """Members keep and pass on what its node signed: it was filled with copies that nobody signed.

    Whose name was known was not checked again, so that each of 32 had 768 KiB.
    """
    plan = CONTEXT.plan
    task, place = next(
        (task, place)
        for task, candidates in enumerate(plan.tasks)
        for place in range(1, len(candidates))
        if candidates[place] in EXECUTORS
    )
    node = plan.tasks[task][place]
    takeover = Takeover(execution_id=EXECUTION, task=task, candidate=place, first_step=0)
    signed = sign_takeover(CLIENT, takeover)
    false = signed.model_copy(update={"signature": "0x" + "11" * 64})
    others = tuple(tuple(one for one in nodes if one != node) for nodes in plan.tasks)

    def take(node: str, **fields: object) -> None:
        commitment = make_commitment(node).model_copy(update=fields)
        agreement.process_commitment(state, commitment, KEYS[node], TOKEN)

    agreement, state = CommitmentAgreement(make_context(), lambda: ANSWER_S), make_committing()
    state.add_takeovers([signed])
    for refused in (
        {"takeovers": (signed, signed)},
        {"order": "00"},
        {"earlier": ("0x" + "b" * 64,)},
    ):
        with pytest.raises(PeerFault, match="more than its own tasks need"):
            take(node, **refused)
    with pytest.raises(PeerFault, match="more than its own tasks need"):
        check_extent(
            make_commitment(node).model_copy(update={"takeovers": (signed,)}),
            plan.model_copy(update={"tasks": others}),
        )
    with pytest.raises(BadSignature):
        take(node, takeovers=(false,))
    assert not state.collected.list_tokens()
    take(node, takeovers=(signed,))
    assert state.collected.list_tokens() == [TOKEN]


def test_2f_1_equal_votes_are_submitted_by_rank_once_the_chain_holds_the_plan() -> None:
    agreement, state = make_full()
    vote = get_vote(agreement.advance(state, CONTEXT, 0.0))
    for place in (1, 2):
        sender = make_context().accounts()[place]
        agreement.process_vote(state, sender, sign_vote(place, vote))
    assert agreement.advance(state, CONTEXT, 0.1) == [], "the chain lacks the plan"
    state.chain.is_planned = True
    submitted = [
        (now, command)
        for now in range(1, 30)
        for command in agreement.advance(state, CONTEXT, float(now))
        if isinstance(command, SubmitCommitments)
    ]
    (first, command), (second, _), *_ = submitted
    assert command.root == vote.root and [node for node, _ in command.exposures] == list(EXECUTORS)
    place = make_context().get_place(CONTEXT.plan.seed, 1.0)
    assert 1 + place * tuning.COMMITMENTS_STAGE_S <= first < 3 + place * tuning.COMMITMENTS_STAGE_S
    assert second - first >= 4 * tuning.COMMITMENTS_STAGE_S, "the others try in between"


def test_votes_for_another_root_do_not_count_and_false_signatures_are_refused() -> None:
    agreement, state = make_full()
    state.chain.is_planned = True
    vote = get_vote(agreement.advance(state, CONTEXT, 0.0))
    accounts = make_context().accounts()
    with pytest.raises(BadSignature):
        agreement.process_vote(state, accounts[1], sign_vote(2, vote))
    other = vote.model_copy(update={"root": "0x" + "66" * 32})
    for place in (1, 2, 3):
        agreement.process_vote(state, accounts[place], sign_vote(place, other))
    commands = [c for now in range(1, 30) for c in agreement.advance(state, CONTEXT, float(now))]
    assert not [c for c in commands if isinstance(c, SubmitCommitments)]


def test_an_agreed_root_is_bound_to_what_we_hold_or_asked_for() -> None:
    agreement, state = make_full()
    found = state.find_agreement(0, 0.0)
    assert found is not None
    root, exposures = compute_commitments_root(EXECUTION, found), state.list_exposures(found)
    agreed = ExecutionCommitted(EXECUTION, root, BLOCK, exposures)
    state.chain.agreed = agreed
    assert agreement.advance(state, CONTEXT, 0.0) == []
    assert state.chain.bound.keys() == set(EXECUTORS) and state.find_basis() is not None
    (content,) = get_messages(
        agreement.process_content_request(state, make_context().accounts()[1])
    )

    behind = make_committing()
    assert agreement.process_content_request(behind, make_context().accounts()[1]) == []
    behind.chain.agreed = agreed
    assert len(get_messages(agreement.advance(behind, CONTEXT, 5.0))) == 1
    assert agreement.advance(behind, CONTEXT, 5.1) == [], "asked a moment ago"
    agreement.process_reply(behind, content)  # type: ignore[arg-type]
    assert behind.chain.bound == state.chain.bound
    assert agreement.advance(behind, CONTEXT, 9.0) == []
