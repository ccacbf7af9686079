"""One root over all executors' commitments (``simulator``)."""

from __future__ import annotations

import pytest

from splitup.core import limits
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto import quorum
from splitup.messages import api
from splitup.messages.base import Message
from splitup.messages.completions import ExecutorCommitment
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.peer_messages import (
    CommitmentsReply,
    CommitmentsVote,
    DrawMessage,
    DrawPartial,
)
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.settlement.chain_commitments import (
    AgreedCommitments,
    compute_commitments_root,
)
from splitup.protocol.settlement.settlement_state import Committing
from tests.parameters import some_of
from tests.protocol.simulator import (
    VERIFY_ALL,
    Network,
    Simulation,
    get_slashes,
    make_signed_end,
    settle,
    sign_token,
    start,
)


def test_all_executors_are_bound_by_one_transaction() -> None:
    simulation = start(economics=VERIFY_ALL, tasks=5)
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert list(simulation.chain.agreed) == [execution_id]
    assert simulation.chain.rejected == {} and simulation.faults == []
    kinds = [type(event) for event in simulation.chain.log]
    assert kinds.index(ev.PlanAccepted) < kinds.index(ev.ExecutionCommitted)
    draw = next(
        evidence.draw
        for member in simulation.members.values()
        if (evidence := member.settlements.find_evidence(execution_id))
    )
    assert {node for node, _ in draw.commitments} == set(
        simulation.find_plan(execution_id).executors()
    )


def find_second_executor(deadline_s: int) -> tuple[int, str]:
    """Return a seed, and who runs the second of two tasks then: another node than the first."""
    for seed in range(20):
        simulation = start(seed, economics=VERIFY_ALL, tasks=2)
        execution_id = simulation.request(deadline_s=deadline_s)
        simulation.run(5)
        first, second = simulation.find_plan(execution_id).executors()
        if first != second:
            return seed, second
    raise AssertionError("one node runs both tasks for every seed")


@pytest.mark.parametrize("trouble", ["silent", "two-faced"])
def test_who_does_not_commit_loses_its_own_pay_alone(trouble: str) -> None:
    """Also if it runs half of the tasks: near the deadline the others are settled without it."""
    seed, bad = find_second_executor(40)
    simulation = start(seed, economics=VERIFY_ALL, tasks=2)
    for node in simulation.nodes:
        node.withholds_commitment = trouble == "silent" and node.address == bad
        node.two_faced = trouble == "two-faced" and node.address == bad
    execution_id = simulation.request(deadline_s=40)
    settle(simulation, execution_id, within_s=100)
    payments = simulation.chain.settlements[execution_id].payments
    first = simulation.find_plan(execution_id).executors()[0]
    assert first in {p.account for p in payments} and not get_slashes(simulation, execution_id)
    assert simulation.find_outcomes(execution_id).keys() <= {0}


def test_members_that_vote_falsely_beyond_f_stop_the_commitments() -> None:
    simulation = start(economics=VERIFY_ALL, tasks=2)

    def lie(message: Message) -> Message:
        if isinstance(message, CommitmentsVote):
            return message.model_copy(update={"root": "0x" + "66" * 32})
        return message

    for identity in simulation.identities[:3]:
        simulation.tamper[identity.address] = lie
    simulation.request(deadline_s=40)
    simulation.run(60)
    assert not simulation.chain.agreed and not simulation.chain.settlements


def test_s19_a_node_without_free_stake_costs_nobody_else_the_pay() -> None:
    """It fills its stake after the plan, by executions of its own; the chain leaves it out."""
    seed, bad = find_second_executor(60)
    simulation = start(seed, economics=VERIFY_ALL, tasks=2)
    execution_id = simulation.request(deadline_s=60)
    assert simulation.run(5, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    simulation.chain.locked[bad] = simulation.by_node[bad].stake_micro_usdc
    simulation.run(20)
    assert simulation.chain.rejected["ExposureTooHigh"] and not simulation.chain.agreed
    settle(simulation, execution_id, within_s=60)
    first = simulation.find_plan(execution_id).executors()[0]
    payments = simulation.chain.settlements[execution_id].payments
    assert first in {p.account for p in payments if not p.from_slash}
    assert not get_slashes(simulation, execution_id)
    assert simulation.find_outcomes(execution_id) == {0: "honest"}
    assert simulation.chain.locked[bad] == simulation.by_node[bad].stake_micro_usdc


def test_nobody_draws_before_the_root_is_on_chain() -> None:
    """f members that cannot wait say their shares at once; it takes f + 1 honest ones more."""
    simulation = start(economics=VERIFY_ALL, tasks=3)
    execution_id = simulation.request()
    assert simulation.run(5, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    held = simulation._execute
    waiting: list[cmd.Command] = []

    def hold(command: cmd.Command) -> None:
        if isinstance(command, cmd.SubmitCommitments):
            waiting.append(command)
        else:
            held(command)

    simulation._execute = hold  # type: ignore[method-assign]  # the chain takes no commitments
    simulation.run(4)
    assert waiting and not simulation.chain.agreed
    for member in simulation.members.values():
        phase = member.settlements._states[execution_id].phase
        assert isinstance(phase, Committing)
    simulation._execute = held  # type: ignore[method-assign]
    held(waiting[0])
    settle(simulation, execution_id)


@pytest.mark.parametrize("seed", some_of(range(3), 0))
def test_f10_commitments_and_votes_may_be_lost(seed: int) -> None:
    network = Network(loss=0.3, repeat=0.2, delay_ms=(1, 900))
    simulation = Simulation(seed, network=network, economics=VERIFY_ALL)
    assert simulation.run(600, lambda: simulation.chain.sequence >= 1)
    ids = [simulation.request(number) for number in range(1, 5)]
    settle(simulation, *ids, within_s=200)
    assert simulation.faults == []


def test_f03_a_member_that_forgot_the_commitments_asks_for_them() -> None:
    simulation = start(economics=VERIFY_ALL, tasks=3)
    execution_id = simulation.request()
    assert simulation.run(20, lambda: execution_id in simulation.chain.agreed)
    simulation.start_member(1)
    account = simulation.identities[1].address
    state = simulation.members[account].settlements._states[execution_id]
    assert not state.collected.by_node and not state.chain.bound
    assert simulation.run(10, lambda: bool(state.chain.bound))
    settle(simulation, execution_id)


def test_a15_commitments_and_roots_count_for_their_node_and_execution_alone() -> None:
    simulation = start(economics=Economics(0, 1_200, 100_000))
    execution_id = simulation.request(steps=4)
    for node in simulation.nodes:
        node.plans[execution_id] = None  # type: ignore[assignment]  # the test plays them
    assert simulation.run(5, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    plan = simulation.find_plan(execution_id)
    account = simulation.identities[0].address
    member, node = simulation.members[account], simulation.by_node[plan.executors()[0]]
    key = node.identity.signing_key_hex
    commitment = ExecutorCommitment(
        execution_id=execution_id,
        node=node.address,
        root="0x" + "01" * 32,
        end=make_signed_end(execution_id, 4),
    )

    def give(changed: ExecutorCommitment, signing_key: str = key) -> None:
        token = sign_token(node.identity, api.EXECUTOR_COMMITMENT, changed)
        member.handle(ev.ReportReceived(changed, signing_key, token), simulation.now)

    with pytest.raises(BadSignature):
        give(commitment, "0x" + "00" * 32)
    with pytest.raises(PeerFault, match="more steps than were paid for"):
        give(commitment.model_copy(update={"end": make_signed_end(execution_id, 5)}))
    with pytest.raises(PeerFault, match="ended without steps"):
        give(commitment.model_copy(update={"end": make_signed_end(execution_id, 0)}))
    with pytest.raises(BadSignature):
        forged = make_signed_end(execution_id, 3, node.identity)
        give(commitment.model_copy(update={"end": forged}))
    with pytest.raises(PeerFault, match="not in the plan"):
        give(commitment.model_copy(update={"node": "0x" + "99" * 20}))
    with pytest.raises(Unavailable):
        give(commitment.model_copy(update={"execution_id": "0x" + "99" * 32}))
    give(commitment)
    give(commitment)
    state = member.settlements._states[execution_id]
    assert state.collected.list_commitments(4) == {node.address: commitment.root}
    give(commitment.model_copy(update={"root": "0x" + "02" * 32}))
    give(commitment)
    assert state.collected.list_commitments(4) == {}, "two count as none"

    sender = simulation.identities[1]
    exposures_hash = quorum.hash_exposures(state.get_exposures(plan.executors()))
    other = quorum.commitments_struct_hash("0x" + "99" * 32, commitment.root, exposures_hash)
    signature = quorum.sign_quorum(sender.private_key, simulation.view.domain, other)
    vote = CommitmentsVote(
        execution_id=execution_id,
        root=commitment.root,
        exposures_hash=exposures_hash,
        signature="0x" + signature.hex(),
    )
    with pytest.raises(BadSignature):
        member.handle(ev.GossipReceived(sender.address, vote), simulation.now)

    rows = ((node.address, commitment.root),)
    agreed = ev.ExecutionCommitted(
        execution_id,
        compute_commitments_root(execution_id, AgreedCommitments(rows, (), 4)),
        "0x" + "07" * 32,
        ((node.address, limits.EXPOSURE_FLOOR_MICRO_USDC),),
    )
    member.handle(agreed, simulation.now)
    for steps, is_taken in ((3, False), (4, True)):
        told = CommitmentsReply(
            execution_id=execution_id, commitments=rows, executors=(), steps=steps
        )
        member.handle(ev.GossipReceived(sender.address, told), simulation.now)
        assert bool(state.chain.bound) is is_taken


def test_f14_commitments_outlive_a_request_that_moves_to_another_block() -> None:
    """Nodes say them once; the request comes back with the same snapshot, hence the same nodes."""
    simulation = start(economics=VERIFY_ALL, tasks=3)
    execution_id = simulation.request()
    states = [member.settlements._states for member in simulation.members.values()]
    assert simulation.run(
        5,
        lambda: all(execution_id in c and c[execution_id].find_agreement(0, 99.0) for c in states),
    )
    (seen,) = [e for e in simulation.chain.log if isinstance(e, ev.RequestSeen)]
    moved = ev.RequestSeen(seen.request.model_copy(update={"block_hash": "0x" + "0b" * 32}))
    simulation.chain.log.remove(seen)
    simulation.chain.plans.clear()  # undone with its request
    for account in simulation.members:
        simulation.feed(account, ev.EventReverted(seen))
    assert not any(execution_id in c for c in states)
    simulation.emit(moved)
    settle(simulation, execution_id)
    assert execution_id in simulation.chain.agreed


def test_f14_an_agreed_root_that_is_reverted_takes_its_draw_with_it() -> None:
    simulation = start(economics=VERIFY_ALL, tasks=2)
    execution_id = simulation.request()
    account = simulation.identities[0].address
    member = simulation.members[account]
    state = None

    def has_draw() -> bool:
        nonlocal state
        state = member.settlements._states.get(execution_id)
        return state is not None and state.verification is not None

    assert simulation.run(20, has_draw)
    assert state is not None and state.chain.agreed is not None
    agreed = state.chain.agreed
    member.handle(ev.EventReverted(agreed), simulation.now)
    assert isinstance(state.phase, Committing) and not state.chain.bound
    commands = member.handle(agreed, simulation.now)  # the same block after all
    said = [c.message for c in commands if isinstance(c, cmd.Gossip)]
    assert any(isinstance(message, DrawPartial | DrawMessage) for message in said)
    settle(simulation, execution_id)
