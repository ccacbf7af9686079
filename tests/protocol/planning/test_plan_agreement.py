"""One member's part in agreeing on a plan: shares and votes in, certificates out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitup.core import tuning
from splitup.core.errors import PeerFault
from splitup.messages.base import Message
from splitup.messages.plans import Request
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN, plan_alpha
from splitup.protocol.committee.commands import (
    AnnouncePlan,
    Command,
    Fault,
    FetchManifest,
    FetchSnapshot,
    Gossip,
    Persist,
    PushPlan,
    SubmitPlan,
)
from splitup.protocol.committee.context import MemberContext, SigningGuard
from splitup.protocol.committee.equivocation import (
    EquivocationDetector,
    compute_vote_hash,
    make_plan_slot,
)
from splitup.protocol.committee.peer_messages import (
    PlanCertificateMessage,
    PlanDelivered,
    PlanPartial,
    PlanRequest,
    PlanVote,
)
from splitup.protocol.planning.plan_agreement import PlanAgreement
from tests.builders import make_chain_manifest
from tests.protocol.machines import (
    CHEAP,
    EXECUTION,
    VERIFY_NONE,
    make_context,
    make_plan_context,
)

REQUEST: Request = make_plan_context().plan.request
ACCOUNTS = make_context().accounts()


def make_agreement(
    place: int = 0, *, contents: bool = True, signed: dict[str, str] | None = None
) -> PlanAgreement:
    entries = {slot: {"digest": root, "until_s": 2**40} for slot, root in (signed or {}).items()}
    context = replace(make_context(place), signing_guard=SigningGuard(entries))
    if contents:
        context.contents.add_snapshot(make_plan_context().snapshot)
        context.contents.add_manifest(make_plan_context().manifest)
    return PlanAgreement(context, EquivocationDetector(context), VERIFY_NONE)


def make_partial(place: int) -> PlanPartial:
    alpha = plan_alpha(REQUEST)
    partial = CHEAP.sign_partial(make_context(place).share, RANDOMNESS_DOMAIN, alpha)
    return PlanPartial(execution_id=EXECUTION, request_hash=REQUEST.hash(), partial=partial)


def sign_as(place: int, vote: PlanVote) -> PlanVote:
    context: MemberContext = make_context(place)
    unsigned = vote.model_copy(update={"member": context.account})
    signature = context.sign(compute_vote_hash(unsigned))
    return unsigned.model_copy(update={"signature": signature})


def get_messages(commands: list[Command]) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Gossip)]


def get_vote(commands: list[Command]) -> PlanVote:
    (vote,) = [message for message in get_messages(commands) if isinstance(message, PlanVote)]
    return vote


def find(commands: list[Command], kind: type[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def agree(agreement: PlanAgreement, now: float = 0.0) -> list[Command]:
    """Bring a request to its seed; return what the member says when it knows the plan."""
    agreement.process_request(REQUEST, now)
    agreement.process_gossip(ACCOUNTS[1], make_partial(1), now)
    return agreement.process_gossip(ACCOUNTS[2], make_partial(2), now)


def certify(agreement: PlanAgreement, now: float = 0.0) -> list[Command]:
    vote = get_vote(agree(agreement, now))
    agreement.process_gossip(ACCOUNTS[1], sign_as(1, vote), now)
    return agreement.process_gossip(ACCOUNTS[2], sign_as(2, vote), now)


def test_our_share_leaves_with_the_request() -> None:
    commands = make_agreement().process_request(REQUEST, 0.0)
    assert [type(command) for command in commands] == [Gossip]
    assert make_agreement().find_certificate(EXECUTION) is None


def test_2f_1_shares_give_the_plan_and_2f_1_votes_the_certificate() -> None:
    agreement = make_agreement()
    commands = agree(agreement)
    assert [type(command) for command in commands] == [Persist, Gossip]
    vote = get_vote(commands)
    assert agreement.process_gossip(ACCOUNTS[1], sign_as(1, vote), 0.0) == []
    commands = agreement.process_gossip(ACCOUNTS[2], sign_as(2, vote), 0.0)
    assert isinstance(commands[0], AnnouncePlan)
    certificate = agreement.find_certificate(EXECUTION)
    assert certificate is not None and certificate.plan.root() == vote.root


def test_messages_before_the_request_count_when_it_comes() -> None:
    agreement = make_agreement()
    for place in (1, 2):
        assert agreement.process_gossip(ACCOUNTS[place], make_partial(place), 0.0) == []
    assert get_vote(agreement.process_request(REQUEST, 0.0)).member == ACCOUNTS[0]


def test_missing_contents_are_fetched_and_the_plan_follows_when_they_are_here() -> None:
    agreement = make_agreement(contents=False)
    commands = agree(agreement)
    assert {type(command) for command in commands} == {FetchManifest, FetchSnapshot}
    store = agreement._context.contents
    store.add_snapshot(make_plan_context().snapshot)
    assert find(agreement.process_contents(0.5), Gossip) == []
    store.add_manifest(make_plan_context().manifest)
    assert get_vote(agreement.process_contents(0.6)).execution_id == EXECUTION


def test_s94_the_manifest_of_a_planned_execution_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_MANIFESTS", 4)
    agreement = make_agreement()
    agree(agreement)
    for count in range(20, 30):  # models of strangers, whom nobody asks
        agreement._context.contents.add_manifest(make_chain_manifest(count))
    assert agreement._context.contents.find_manifest(REQUEST.model_id) is not None


def test_share_and_vote_are_repeated_until_there_is_a_certificate() -> None:
    agreement = make_agreement()
    agree(agreement)
    assert agreement.process_tick(tuning.GOSSIP_RETRY_S / 2) == []
    kinds = [type(m) for m in get_messages(agreement.process_tick(tuning.GOSSIP_RETRY_S))]
    assert kinds == [PlanPartial, PlanVote]


def test_a_false_share_and_a_vote_for_another_plan_are_blamed_on_their_senders() -> None:
    agreement = make_agreement()
    agreement.process_request(REQUEST, 0.0)
    false = make_partial(1).model_copy(update={"partial": "0x01" + "66" * 47})
    agreement.process_gossip(ACCOUNTS[1], false, 0.0)
    commands = agreement.process_gossip(ACCOUNTS[2], make_partial(2), 0.0)
    assert [fault.peer for fault in commands if isinstance(fault, Fault)] == [ACCOUNTS[1]]
    vote = get_vote(agreement.process_gossip(ACCOUNTS[3], make_partial(3), 0.0))
    other = sign_as(3, vote.model_copy(update={"root": "0x" + "66" * 32}))
    commands = agreement.process_gossip(ACCOUNTS[3], other, 0.0)
    assert [fault.peer for fault in commands if isinstance(fault, Fault)] == [ACCOUNTS[3]]
    assert get_messages(commands) == [other], "whoever holds its other vote has evidence"


def test_the_first_member_delivers_and_submits_the_plan_and_the_others_in_their_turn() -> None:
    seed = None
    acted = []
    for place in range(4):
        agreement = make_agreement(place)
        agreement._context.heard = dict.fromkeys(ACCOUNTS, 0.0)
        agreement.process_request(REQUEST, 0.0)
        others = [other for other in range(4) if other != place]
        votes = []
        for other in others[:2]:
            commands = agreement.process_gossip(ACCOUNTS[other], make_partial(other), 0.0)
            votes += [m for m in get_messages(commands) if isinstance(m, PlanVote)]
        for other in others[:2]:
            commands = agreement.process_gossip(ACCOUNTS[other], sign_as(other, votes[0]), 0.0)
        certificate = agreement.find_certificate(EXECUTION)
        assert certificate is not None and seed in (None, certificate.plan.seed)
        seed = certificate.plan.seed
        rank = agreement._context.get_place(seed, 0.0)
        assert bool(find(commands, PushPlan)) == (rank == 0) == bool(find(commands, SubmitPlan))
        if rank:
            assert not find(agreement.process_tick(rank * tuning.PLAN_PUSH_STAGE_S / 2), PushPlan)
            due = rank * tuning.PLAN_SUBMIT_STAGE_S
            commands = agreement.process_tick(due)
            assert find(commands, PushPlan) and find(commands, SubmitPlan)
        acted.append(rank)
    assert sorted(acted) == [0, 1, 2, 3]


def test_nothing_is_submitted_that_the_chain_holds_nor_pushed_that_was_delivered() -> None:
    agreement = make_agreement()
    certify(agreement)
    certificate = agreement.find_certificate(EXECUTION)
    assert certificate is not None
    assert agreement.process_accepted(EXECUTION, certificate.plan.root()) == []
    agreement.process_gossip(ACCOUNTS[1], PlanDelivered(execution_id=EXECUTION), 0.0)
    assert agreement.process_tick(100.0) == []
    agreement.process_reverted_plan(EXECUTION, 100.0)
    assert find(agreement.process_tick(110.0), SubmitPlan), "its block is gone"


def test_nodes_that_did_not_answer_are_tried_again_a_few_times() -> None:
    agreement = make_agreement()
    commands, now, pushed = certify(agreement), 0.0, []
    lost = make_plan_context().plan.nodes[0].node
    while now < 200:
        for push in [command for command in commands if isinstance(command, PushPlan)]:
            pushed.append([node.node for node in push.nodes])
            told = get_messages(agreement.process_pushed(EXECUTION, [lost], now))
            assert told == [PlanDelivered(execution_id=EXECUTION, unreached=(lost,))]
        now += 0.5
        commands = agreement.process_tick(now)
    assert len(pushed) == tuning.PLAN_PUSHES
    assert lost in pushed[0] and len(pushed[0]) > 1
    assert pushed[1:] == [[lost]] * (tuning.PLAN_PUSHES - 1)


def test_a_member_that_is_behind_gets_the_certificate() -> None:
    agreement = make_agreement()
    certify(agreement)
    assert agreement.process_gossip(ACCOUNTS[3], make_partial(3), 0.1) == [], "it only crossed"
    (answer,) = get_messages(agreement.process_gossip(ACCOUNTS[3], make_partial(3), 5.0))
    assert isinstance(answer, PlanCertificateMessage)
    wanted = PlanRequest(execution_id=EXECUTION)
    assert get_messages(agreement.process_gossip(ACCOUNTS[3], wanted, 5.0)) == [answer]
    behind = make_agreement(3)
    behind.process_request(REQUEST, 0.0)
    behind.process_gossip(ACCOUNTS[0], answer, 5.0)
    assert behind.find_certificate(EXECUTION) == answer.certificate


def test_a_certificate_for_other_words_than_the_requests_is_refused() -> None:
    """Also when 2f+1 members signed it: what the chain holds for this id says something else."""
    agreement, behind = make_agreement(), make_agreement(3)
    certify(agreement)
    certificate = agreement.find_certificate(EXECUTION)
    assert certificate is not None
    behind.process_request(REQUEST.model_copy(update={"max_price_micro_usdc": 10**6 + 1}), 0.0)
    with pytest.raises(PeerFault, match="states another request"):
        behind.process_gossip(ACCOUNTS[0], PlanCertificateMessage(certificate=certificate), 5.0)
    assert behind.find_certificate(EXECUTION) is None


def test_who_signed_another_plan_before_signs_nothing_new() -> None:
    slot = make_plan_slot(REQUEST, 1)
    agreement = make_agreement(signed={slot: "0x" + "00" * 32})
    commands = agree(agreement)
    assert not get_messages(commands) and "another plan" in agreement.find_refusal(EXECUTION)


def test_s03_a_plan_is_signed_before_the_deadline_or_only_again() -> None:
    """A member that forgot a request whose deadline has passed has no reason to sign for it."""
    for signed, votes in (({}, 0), ({make_plan_slot(REQUEST, 1): make_root()}, 1)):
        agreement = make_agreement(signed=signed)
        agreement._context.timestamp_s = REQUEST.deadline + 1
        messages = get_messages(agree(agreement))
        assert sum(isinstance(message, PlanVote) for message in messages) == votes
        assert agreement.find_refusal(EXECUTION) == "", "it waits for the certificate"


def make_root() -> str:
    return get_vote(agree(make_agreement())).root


def test_s01_a_request_below_the_models_price_gets_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price that the chain took is not believed: executors and verification must be covered."""
    monkeypatch.setattr(tuning, "MAX_MANIFESTS", 4)
    manifest = make_plan_context().manifest
    price = 2 * manifest.cost_micro_usdc(REQUEST.steps)
    for offered, is_planned in ((price - 1, False), (price, True)):
        request = REQUEST.model_copy(update={"max_price_micro_usdc": offered})
        agreement = make_agreement()
        agreement.process_request(request, 0.0)
        commands: list[Command] = []
        for place in (1, 2):
            alpha = plan_alpha(request)
            partial = CHEAP.sign_partial(make_context(place).share, RANDOMNESS_DOMAIN, alpha)
            message = PlanPartial(
                execution_id=EXECUTION, request_hash=request.hash(), partial=partial
            )
            commands += agreement.process_gossip(ACCOUNTS[place], message, 0.1)
        votes = [c for c in commands if isinstance(c, Gossip) and isinstance(c.message, PlanVote)]
        assert bool(votes) == is_planned
        assert (agreement.find_refusal(EXECUTION) or "").count("cost at least") == (not is_planned)
        contents = agreement._context.contents
        for count in range(20, 30):  # S94: what is not planned pays for no place of its manifest
            contents.add_manifest(make_chain_manifest(count))
        assert (contents.find_manifest(REQUEST.model_id) is not None) == is_planned
