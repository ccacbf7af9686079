"""Requests that their client only signed: planned before they are on chain, one at a time."""

from __future__ import annotations

from itertools import combinations

import pytest

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto.quorum import compute_execution_id
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import SignedRequest
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import compute_plan_hash
from splitup.protocol.committee.context import SIGNED
from splitup.protocol.committee.peer_messages import PlanPartial
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.signed_requests import SIGNED_REQUEST, check_signed, sign_request
from tests.protocol.committees import CHAIN_ID, make_identity
from tests.protocol.simulated_chain import MARKET
from tests.protocol.simulator import (
    CLIENT_IDENTITY,
    GRACE_S,
    VERIFY_ALL,
    VERIFY_NONE,
    Simulation,
    settle,
    start,
)

CLIENT = CLIENT_IDENTITY.address


def start_frozen(seed: int = 1, balance: int = 10**6, **options: object) -> Simulation:
    simulation = start(seed, **options)
    simulation.chain.balances[CLIENT] = balance
    simulation.chain.frozen_until = 2**40
    return simulation


def get_id(signed: SignedRequest) -> str:
    return signed.request.execution_id


def list_kept(simulation: Simulation) -> list[str]:
    return [
        account
        for account, journal in simulation.journals.items()
        if (SIGNED_REQUEST, f"1/{CLIENT}") in journal
    ]


def test_a_signed_request_is_planned_before_it_is_on_chain_and_settled() -> None:
    simulation = start_frozen(economics=VERIFY_ALL)
    simulation.run(0.3)  # away from the block
    signed = simulation.sign_request(1)
    asked = simulation.now
    simulation.tell_signed(signed)
    execution_id = get_id(signed)
    assert simulation.run(1, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    assert simulation.now - asked < 0.1, "it waited for a block"
    assert execution_id not in simulation.chain.plans
    assert len(list_kept(simulation)) == 4
    settle(simulation, execution_id)
    assert simulation.chain.balances[CLIENT] == 0
    assert not list_kept(simulation), "its client has a free hand again"
    assert simulation.chain.rejected == {} and simulation.faults == []


@pytest.mark.parametrize("first", [*combinations(range(4), 2), *combinations(range(4), 3)])
def test_f08_a_balance_is_promised_once_across_all_partitions(first: tuple[int, ...]) -> None:
    """The client signs two requests over one balance and shows them to different members."""
    simulation = start_frozen(seed=len(first), balance=10**6)
    accounts = [identity.address for identity in simulation.identities]
    some = [accounts[place] for place in first]
    one, two = simulation.sign_request(1, deadline_s=30), simulation.sign_request(2, deadline_s=30)
    simulation.tell_signed(one, some)
    simulation.tell_signed(two, [account for account in accounts if account not in some])
    simulation.run(0.5)  # no block so far
    for signed in (one, two):  # and now to everybody
        simulation.tell_signed(signed)
    simulation.run(0.3)
    certified = [signed for signed in (one, two) if get_id(signed) in simulation.certificates]
    assert certified == ([one] if len(first) == 3 else []), "2f + 1 support it, or nobody does"
    simulation.run(20)
    assert simulation.chain.rejected["BalanceTooSmall"] == 0
    assert simulation.chain.balances[CLIENT] == (0 if certified else 10**6)
    simulation.run(20)  # both deadlines have passed
    assert not list_kept(simulation)


def test_a_member_supports_the_next_one_when_the_first_is_on_chain() -> None:
    simulation = start_frozen(balance=2 * 10**6)
    one, two = simulation.sign_request(1), simulation.sign_request(2)
    member = simulation.members[simulation.identities[0].address]
    event = ev.SignedRequestReceived(two, 2 * 10**6, 2**40)
    simulation.tell_signed(one)
    simulation.run(0.05)
    with pytest.raises(Unavailable, match="has another signed request"):
        member.handle(event, simulation.now)
    settle(simulation, get_id(one))
    simulation.tell_signed(two)
    settle(simulation, get_id(two))
    assert simulation.chain.balances[CLIENT] == 0


def test_f03_a_member_that_starts_again_still_supports_the_same() -> None:
    simulation = start_frozen()
    simulation.down.add(simulation.identities[3].address)  # so that every signature is needed
    one, two = simulation.sign_request(1), simulation.sign_request(2)
    simulation.tell_signed(one, [simulation.identities[0].address])
    simulation.run(0.05)
    simulation.start_member(0)
    member = simulation.members[simulation.identities[0].address]
    with pytest.raises(Unavailable, match="has another signed request"):
        member.handle(ev.SignedRequestReceived(two, 10**6, 2**40), simulation.now)
    assert get_id(one) in member.plans
    simulation.tell_signed(one)
    settle(simulation, get_id(one))


def test_f14_an_opening_whose_block_is_gone_is_brought_to_the_chain_again() -> None:
    simulation = start_frozen()
    signed = simulation.sign_request(1)
    simulation.tell_signed(signed)
    execution_id = get_id(signed)
    assert simulation.run(5, lambda: execution_id in simulation.chain.plans)
    simulation.run(0.01)
    assert not list_kept(simulation)
    reverted = simulation.chain.log[-2:]
    assert isinstance(reverted[0], ev.RequestSeen) and isinstance(reverted[1], ev.PlanAccepted)
    del simulation.chain.plans[execution_id], simulation.chain.log[-2:]
    simulation.chain.balances[CLIENT] += 10**6
    for account in simulation.members:
        for event in reversed(reverted):
            simulation.feed(account, ev.EventReverted(event))
    assert len(list_kept(simulation)) == 4, "until it is there again nothing else is supported"
    settle(simulation, execution_id)
    assert simulation.chain.balances[CLIENT] == 0


def sign_as_stranger(simulation: Simulation, number: int) -> SignedRequest:
    """Return a request of an account of its own, which has the money."""
    identity = make_identity(100 + number)
    client = identity.address
    simulation.chain.balances[client] = 10**6
    execution_id = compute_execution_id(CHAIN_ID, MARKET, client, 1)
    request = simulation._make_request(execution_id, client, 4, 300, ZERO_BYTES32)
    return sign_request(identity, request.model_copy(update={"nonce": 1}))


def fill_places(simulation: Simulation) -> list[SignedRequest]:
    """Have strangers take both places of each member, by requests that get no seed."""
    accounts = [identity.address for identity in simulation.identities]
    signed = [sign_as_stranger(simulation, number) for number in range(4)]
    for number, one in enumerate(signed):
        simulation.tell_signed(one, accounts[:2] if number % 2 else accounts[2:])
    simulation.run(0.1)
    return signed


def test_s99_signed_requests_that_get_no_plan_keep_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "MAX_OPEN_EXECUTIONS", 2)
    simulation = start_frozen()
    strangers = fill_places(simulation)
    signed = simulation.sign_request(1)
    simulation.tell_signed(signed)
    settle(simulation, get_id(signed))
    assert simulation.chain.balances[CLIENT] == 0
    kept = [
        {k for k in journal if k[0] == SIGNED_REQUEST} for journal in simulation.journals.values()
    ]
    assert kept == [
        {(SIGNED_REQUEST, f"1/{strangers[place].request.client}")} for place in (3, 3, 2, 2)
    ]


def test_s102_members_repeat_less_and_less_about_signed_requests_without_a_plan() -> None:
    """Thousands of these, which cost nothing, would each be told to all members every second."""
    simulation = start_frozen()
    member = simulation.members[simulation.identities[0].address]
    signed = sign_as_stranger(simulation, 1)
    member.handle(ev.SignedRequestReceived(signed, 10**6, 2**40), simulation.now)
    told = []
    for second in range(120):
        commands = member.handle(ev.Tick(), simulation.now + second)
        said = [one.message for one in commands if isinstance(one, cmd.Gossip)]
        told += [second for message in said if isinstance(message, PlanPartial)]
    assert told[:3] == [1, 2, 3] and 8 <= len(told) <= 12


def test_s99_requests_on_the_chain_do_not_wait_for_signed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has paid for a request on the chain gets the place of one that cost nothing."""
    monkeypatch.setattr(tuning, "MAX_OPEN_EXECUTIONS", 2)
    simulation = start_frozen()
    fill_places(simulation)
    execution_id = simulation.request(1)
    assert simulation.run(3, lambda: execution_id in simulation.chain.plans)
    settle(simulation, execution_id)


def test_s99_what_a_member_has_signed_a_plan_of_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its client could have two plans for one balance."""
    monkeypatch.setattr(tuning, "MAX_OPEN_EXECUTIONS", 1)
    simulation = start_frozen()
    simulation.run(0.3)  # away from the block
    signed, other = simulation.sign_request(1), simulation.sign_request(2)
    simulation.tell_signed(signed)
    simulation.run(0.1)
    member = simulation.members[simulation.identities[0].address]
    stranger = ev.SignedRequestReceived(sign_as_stranger(simulation, 1), 10**6, 2**40)
    with pytest.raises(Unavailable, match="too many signed requests"):
        member.handle(stranger, simulation.now)
    assert not member._drop_unplanned(signed.request)[1:], "it only makes room"
    with pytest.raises(Unavailable, match="has another signed request"):
        member.handle(ev.SignedRequestReceived(other, 10**6, 2**40), simulation.now)
    settle(simulation, get_id(signed))
    assert get_id(signed) not in member.plans


def test_what_does_not_hold_until_the_deadline_is_refused() -> None:
    simulation = start_frozen()
    member = simulation.members[simulation.identities[0].address]
    signed = simulation.sign_request(1)

    def give(signed: SignedRequest, balance: int = 10**6, frozen_until: int = 2**40) -> None:
        member.handle(ev.SignedRequestReceived(signed, balance, frozen_until), simulation.now)

    with pytest.raises(PeerFault, match="freeze it for longer"):
        give(signed, frozen_until=signed.request.deadline)
    with pytest.raises(PeerFault, match="deposit more"):
        give(signed, balance=10**6 - 1)
    with pytest.raises(PeerFault, match="has passed"):
        give(simulation.sign_request(1, deadline_s=-10))
    assert not list_kept(simulation)


def test_a15_a_signature_is_for_its_words_chain_and_market_only() -> None:
    simulation = start_frozen()
    signed = simulation.sign_request(1)
    check_signed(signed)
    request, signature = signed.request, signed.signature
    changes: dict[str, object] = {
        "steps": 5,
        "max_price_micro_usdc": 1,
        "deadline": request.deadline + 1,
        "model_id": "0x" + "66" * 32,
        "client_key": "0x" + "66" * 32,
        "inputs_digest": "0x" + "66" * 32,
        "snapshot_sequence": 99,
        "snapshot_root": "0x" + "66" * 32,
        "verify_bps": 10_000,
    }
    for name, value in changes.items():
        changed = request.model_copy(update={name: value})
        with pytest.raises(BadSignature):
            check_signed(SignedRequest(request=changed, signature=signature))
    for name, value in {
        "nonce": 2,
        "chain_id": 1,
        "market": CLIENT,
        "client": "0x" + "66" * 20,
    }.items():
        changed = request.model_copy(update={name: value})
        with pytest.raises(PeerFault, match="has the id of another"):
            check_signed(SignedRequest(request=changed, signature=signature))
    for name, value in {"chain_id": 1, "market": "0x" + "66" * 20}.items():
        other = simulation.sign_request(1).request.model_copy(update={name: value})
        with pytest.raises(PeerFault):
            check_signed(SignedRequest(request=other, signature=signature))
    with pytest.raises(PeerFault, match="block hash 0"):
        check_signed(
            SignedRequest(
                request=request.model_copy(update={"block_hash": "0x" + "01" * 32}),
                signature=signature,
            )
        )


# ---- one request in several wordings -------------------------------------------------------------

MIN_DEADLINE_S = 5  # the Market's default


class SlowChain(Simulation):
    """Blocks of 12 s, and the contract's own rule about the soonest deadline."""

    ticks = 0

    def _mine(self) -> None:
        self.ticks += 1
        if self.ticks % 12 == 0:
            super()._mine()

    def _execute(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.SubmitPlan) and command.client_signature:
            if command.request.deadline < self._timestamp() + MIN_DEADLINE_S:
                self.chain.rejected["DeadlineInvalid"] += 1
                return
        super()._execute(command)


def list_plan_slots(simulation: Simulation, account: str) -> list[str]:
    journal = simulation.journals[account]
    return [key for kind, key in journal if kind == SIGNED and key.startswith("plan/")]


def test_s03_a_number_used_again_with_other_words_convicts_nobody() -> None:
    """The first request has the shortest legal deadline, so that the chain cannot open it."""
    simulation = SlowChain(1)
    assert simulation.run(60, lambda: simulation.chain.sequence >= 1)
    simulation.chain.balances[CLIENT], simulation.chain.frozen_until = 10**6, 2**40
    while simulation.ticks % 12:
        simulation.run(0.1)
    simulation.run(0.2)
    said: dict[tuple[str, str, str], set[bytes]] = {}
    shortest_s = MIN_DEADLINE_S + limits.SIGNED_REQUEST_MARGIN_S
    for deadline_s, steps, wait_s in ((shortest_s, 4, 40), (200, 3, 30)):
        signed = simulation.sign_request(7, deadline_s=deadline_s, steps=steps)
        simulation.tell_signed(signed)
        simulation.run(2)
        certificates = simulation.certificates[get_id(signed)].values()
        assert {c.plan.request.steps for c in certificates} == {steps}, "certified"
        for certificate in certificates:
            request = certificate.plan.request
            for entry in certificate.signatures:
                slot = entry.member, request.execution_id, request.hash()
                said.setdefault(slot, set()).add(compute_plan_hash(certificate.plan, 1))
        simulation.run(wait_s)
    assert simulation.chain.rejected["DeadlineInvalid"] > 0, "the first was never opened"
    assert get_id(signed) in simulation.chain.plans, "the second was"
    assert len(said) > 4 and all(len(plans) == 1 for plans in said.values())
    assert simulation.evidence == [] and simulation.faults == []


def test_s03_two_wordings_at_once_blame_nobody() -> None:
    """Each half of the members is shown other words; shares and votes of the others do not fit."""
    simulation = start_frozen()
    accounts = [identity.address for identity in simulation.identities]
    simulation.run(0.3)
    one, two = simulation.sign_request(1), simulation.sign_request(1, steps=3)
    simulation.tell_signed(one, accounts[:3])
    simulation.tell_signed(two, accounts[3:])
    settle(simulation, get_id(one))
    assert simulation.evidence == [] and simulation.faults == []


def test_s03_what_was_signed_outlives_expiry_restart_and_settlement() -> None:
    simulation = start_frozen(economics=VERIFY_NONE)
    account = simulation.identities[0].address
    unopened = simulation.sign_request(1, deadline_s=20)
    simulation.chain.balances[CLIENT] = 0  # the chain refuses to open it
    event = ev.SignedRequestReceived(unopened, 10**6, 2**40)
    for member in simulation.members:
        simulation.feed(member, event)
    simulation.run(1)
    settled = simulation.request(2, deadline_s=60)
    settle(simulation, settled)
    simulation.run(25)
    assert not list_kept(simulation), "the first has expired"
    simulation.start_member(0)
    assert len(list_plan_slots(simulation, account)) == 2
    simulation.skip(60 + GRACE_S + tuning.SIGNED_MARGIN_S)
    simulation.run(3)
    assert list_plan_slots(simulation, account) == [], "the chain's time has closed both"


def test_s03_a_request_read_again_under_other_parameters_gets_no_other_plan() -> None:
    """A member that starts again reads ended executions again, too."""
    simulation = start(economics=VERIFY_NONE)
    execution_id = simulation.request(1)
    settle(simulation, execution_id)
    simulation.economics = Economics(sampling_bps=0, reward_milli=1_200, slash_milli=50_000)
    for place in range(4):
        simulation.start_member(place)
    simulation.run(3)
    assert simulation.evidence == []


def test_s03_an_opening_that_members_have_not_seen_yet_is_waited_for() -> None:
    """Members read ``confirmations`` blocks behind the head whose time passed the deadline."""
    simulation = start_frozen()
    account = simulation.identities[0].address
    member = simulation.members[account]
    member._signed_requests._confirmations = 6
    signed = simulation.sign_request(1)
    member.handle(ev.SignedRequestReceived(signed, 10**6, 2**40), simulation.now)
    deadline = signed.request.deadline
    for number in range(6):
        member.handle(ev.BlockSeen(100 + number, deadline + 1, f"0x{number:064x}"), simulation.now)
        assert get_id(signed) in member.plans
    member.handle(ev.BlockSeen(106, deadline + 9, "0x" + "77" * 32), simulation.now)
    assert get_id(signed) not in member.plans


def test_s03_requests_that_cost_no_gas_cannot_fill_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = start_frozen()
    member = simulation.members[simulation.identities[0].address]
    monkeypatch.setattr(tuning, "MAX_SIGNED", 2 * len(member.context.signing_guard))
    signed = simulation.sign_request(1)
    with pytest.raises(Unavailable, match="ask the chain"):
        member.handle(ev.SignedRequestReceived(signed, 10**6, 2**40), simulation.now)
