"""A committee of machines through faults and attacks, in virtual time (``simulator``)."""

from __future__ import annotations

import pytest

from splitup.core import limits, tuning
from splitup.core.codec import encode_canonical
from splitup.core.errors import BadSignature, InvalidInput, PeerFault, Unavailable
from splitup.crypto import bls
from splitup.crypto.signature_scheme import REAL
from splitup.messages.base import Message
from splitup.messages.completions import EMPTY_DIGEST, Completion, TaskCommitment
from splitup.messages.verification import Draw
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.committee.observations import (
    OBSERVATION_DOMAIN,
    ObservationShare,
    SnapshotProposal,
)
from splitup.protocol.committee.peer_messages import (
    DrawPartial,
    PlanPartial,
    PlanVote,
    encode_gossip,
)
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.member import CommitteeMember
from splitup.protocol.settlement.chain_commitments import (
    AgreedCommitments,
    compute_commitments_root,
)
from splitup.protocol.settlement.settlement_transitions import take_draw
from tests.builders import make_chain_manifest, task_id
from tests.parameters import some_of
from tests.protocol.committees import make_committee, make_identity, make_keys
from tests.protocol.simulator import (
    GRACE_S,
    VERIFY_ALL,
    VERIFY_NONE,
    Network,
    Simulation,
    make_signed_end,
    read_token,
    settle,
    start,
)

ID = "0x" + "11" * 32


def test_an_execution_is_planned_settled_and_forgotten() -> None:
    simulation = start(economics=VERIFY_NONE)
    execution_id = simulation.request(steps=4)
    settle(simulation, execution_id)

    settlement = simulation.chain.settlements[execution_id]
    assert settlement.steps == 4
    assert sum(p.amount_micro_usdc for p in settlement.payments) == 3 * 4 * 10
    assert not settlement.slashes
    assert simulation.faults == []
    assert simulation.pushes[execution_id] == 1, "the stand-bys pushed too"
    assert simulation.chain.rejected == {}, "two members submitted the same thing"
    for account, member in simulation.members.items():
        assert member.get_status(simulation.now)["executions_open"] == 0
        assert member.contents.used == {simulation.manifest.model_id}, "it was paid for"
        assert member.plans.find_certificate(execution_id) is not None, (
            "late clients still ask for it"
        )
        slots = [key for kind, key in simulation.journals[account] if kind == "signed"]
        assert {slot.partition("/")[0] for slot in slots} == {
            "snapshot",
            "plan",
            "draw",
            "settlement",
        }
    simulation.skip(300 + GRACE_S + tuning.SIGNED_MARGIN_S)  # past the deadline's end, for long
    simulation.run(3)
    for account in simulation.members:
        slots = [key for kind, key in simulation.journals[account] if kind == "signed"]
        assert all(slot.startswith("snapshot/") for slot in slots)


def test_the_certificate_exists_one_round_trip_of_two_after_the_request() -> None:
    simulation = start(network=Network(delay_ms=(5, 5)))
    execution_id = simulation.request()
    simulation.run(5, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    seen = next(e for e in simulation.chain.log if isinstance(e, ev.RequestSeen))
    assert seen.request.execution_id == execution_id
    # seen 2 ms after its block, then one hop for the shares and one for the signatures
    assert round((simulation.now % 1) * 1000) == 2 + 5 + 5


@pytest.mark.parametrize("place", some_of(range(4), 0, 3))
def test_f06_one_member_down(place: int) -> None:
    simulation = start(seed=place, economics=VERIFY_ALL)
    simulation.down.add(simulation.identities[place].address)
    ids = [simulation.request(n) for n in range(1, 4)]
    settle(simulation, *ids)
    before = simulation.chain.sequence
    simulation.run(limits.SNAPSHOT_REFRESH_S + 10)
    assert simulation.chain.sequence > before, "snapshots went on without it"


def test_f07_two_members_down_stall_and_recover() -> None:
    simulation = start()
    downs = [identity.address for identity in simulation.identities[:2]]
    simulation.down.update(downs)
    execution_id = simulation.request()
    simulation.run(20)
    assert not simulation.certificates.get(execution_id)
    simulation.start_member(0)
    settle(simulation, execution_id)


def test_f03_f09_a_member_restarted_in_the_middle_signs_the_same_again() -> None:
    simulation = start(seed=5, economics=VERIFY_ALL)
    simulation.down.add(simulation.identities[3].address)  # so that every signature is needed
    execution_id = simulation.request()
    account = simulation.identities[2].address
    said: list[PlanVote] = []

    def record(message: Message) -> Message:
        if isinstance(message, PlanVote) and message.execution_id == execution_id:
            said.append(message)
            if len(said) == 1:
                simulation.network.loss = 1.0  # killed right after signing: nobody heard it
        return message

    simulation.tamper[account] = record
    assert simulation.run(5, lambda: bool(said))
    simulation.network.loss = 0.0
    simulation.start_member(2)
    settle(simulation, execution_id)
    assert len(said) >= 2
    assert len(set(said)) == 1


def test_a_member_that_missed_everything_catches_up_from_its_peers() -> None:
    simulation = start()
    account = simulation.identities[1].address
    simulation.down.add(account)
    execution_id = simulation.request(deadline_s=300)
    simulation.by_node[next(iter(simulation.by_node))].mute_validator = True
    assert simulation.run(10, lambda: len(simulation.certificates.get(execution_id, {})) == 3)
    simulation.start_member(1)
    simulation.run(
        5, lambda: simulation.members[account].plans.find_certificate(execution_id) is not None
    )
    assert account in simulation.certificates[execution_id]
    settle(simulation, execution_id)


@pytest.mark.parametrize("seed", some_of(range(4), 0))
def test_f09_duplicate_reordered_and_late_messages(seed: int) -> None:
    network = Network(repeat=0.5, delay_ms=(1, 700))
    simulation = start(seed=seed, network=network, economics=VERIFY_ALL)
    ids = [simulation.request(n) for n in range(1, 6)]
    settle(simulation, *ids)
    assert simulation.faults == []


@pytest.mark.parametrize("seed", some_of(range(4), 2))
def test_f10_a_third_of_the_messages_lost_and_two_seconds_of_delay(seed: int) -> None:
    network = Network(loss=0.3, repeat=0.1, delay_ms=(1, 2000))
    simulation = Simulation(seed, network=network, economics=VERIFY_ALL)
    assert simulation.run(600, lambda: simulation.chain.sequence >= 1)
    execution_id = simulation.request()
    settle(simulation, execution_id, within_s=150)
    assert simulation.faults == []


def test_a_lying_partial_is_attributed_and_dropped() -> None:
    simulation = start()
    liar = simulation.identities[0].address  # the lowest index: always among the first three

    def lie(message: Message) -> Message:
        if isinstance(message, PlanPartial | DrawPartial):
            false = bls.sign_partial(b"\1" * 32, RANDOMNESS_DOMAIN, b"something else")
            return message.model_copy(update={"partial": false})
        return message

    simulation.tamper[liar] = lie
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert {fault.peer for fault in simulation.faults} == {liar}
    assert any("false share of the seed" in fault.message for fault in simulation.faults)
    assert any("false share of the draw" in fault.message for fault in simulation.faults)


def test_a20_a_member_that_signs_other_plans_makes_no_certificate() -> None:
    simulation = start()
    liar = simulation.identities[3].address

    def lie(message: Message) -> Message:
        if isinstance(message, PlanVote):
            return message.model_copy(update={"root": "0x" + "66" * 32})
        return message

    simulation.tamper[liar] = lie
    execution_id = simulation.request()
    settle(simulation, execution_id)
    for certificate in simulation.certificates[execution_id].values():
        signers = {entry.member for entry in certificate.signatures}
        assert liar not in signers or certificate is simulation.certificates[execution_id][liar]
    assert {fault.peer for fault in simulation.faults} <= {liar}


def test_a18_withholding_a_share_changes_nothing() -> None:
    """Whoever combines which shares, the seed is the same."""
    seeds = set()
    for place in range(4):
        simulation = start(seed=9)
        simulation.down.add(simulation.identities[place].address)
        execution_id = simulation.request()
        simulation.run(10, lambda s=simulation, e=execution_id: bool(s.certificates.get(e)))
        seeds.add(simulation.find_plan(execution_id).seed)
    assert len(seeds) == 1


def test_a_request_that_cannot_be_planned_says_why() -> None:
    simulation = start(nodes=2)
    simulation.manifest = make_chain_manifest(4)  # the snapshot's nodes hold three of its tasks
    for account in simulation.members:
        simulation.feed(account, ev.ManifestFetched(simulation.manifest))
    execution_id = simulation.request()
    simulation.run(1.5)
    for member in simulation.members.values():
        assert "no live node serves task 3" in member.plans.find_refusal(execution_id)
        assert member.plans.find_certificate(execution_id) is None


def test_a_task_that_nobody_holds_goes_to_a_node_with_the_memory_to_load_it() -> None:
    simulation = Simulation(1, nodes=3, economics=VERIFY_NONE, tasks=4, held=3)
    able = simulation.nodes[1]
    able.vram_free_bytes = simulation.manifest.tasks[3].vram_bytes * 2
    assert simulation.run(60, lambda: simulation.chain.sequence >= 2)
    execution_id = simulation.request()
    settle(simulation, execution_id)
    plan = simulation.find_plan(execution_id)
    assert plan.tasks[3] == (able.address,)
    assert 3 in plan.unverifiable


def test_an_unsettled_execution_is_forgotten_after_its_refund() -> None:
    simulation = start()
    for node in simulation.nodes:
        node.plans = {f"0x{7:064x}": None}  # type: ignore[dict-item]  # they never run it
    execution_id = simulation.request(7, deadline_s=30)
    simulation.run(20)
    assert simulation.certificates[execution_id]
    simulation.run(30 + GRACE_S)
    for account, member in simulation.members.items():
        assert member.get_status(simulation.now)["executions_open"] == 0
        slots = [key for kind, key in simulation.journals[account] if kind == "signed"]
        assert {slot.partition("/")[0] for slot in slots} == {"snapshot", "plan"}
    simulation.skip(300 + GRACE_S + tuning.SIGNED_MARGIN_S)  # past the deadline's end, for long
    simulation.run(3)
    for account in simulation.members:
        slots = [key for kind, key in simulation.journals[account] if kind == "signed"]
        assert all(slot.startswith("snapshot/") for slot in slots)


def test_a_node_that_stops_beating_leaves_the_snapshot() -> None:
    simulation = start(nodes=4)
    gone = simulation.nodes.pop()
    assert simulation.run(20, lambda: simulation.chain.sequence >= 2)
    simulation.run(1)
    for member in simulation.members.values():
        snapshot = member.contents.find_snapshot(simulation.chain.root)
        assert snapshot is not None
        nodes = [entry.node for entry in snapshot.entries]
        assert nodes == sorted(node.address for node in simulation.nodes)
        assert gone.address not in nodes


def test_snapshots_are_not_repeated_without_news() -> None:
    simulation = start()
    simulation.run(limits.SNAPSHOT_REFRESH_S - 5)
    assert simulation.chain.sequence <= 2  # the second when a round trip was late for the first
    assert simulation.chain.rejected == {}


def test_a_leader_cannot_invent_a_node() -> None:
    simulation = start()
    known = next(iter(simulation.members.values())).contents.find_snapshot(simulation.chain.root)
    assert known is not None
    invented = known.entries[0].model_copy(update={"node": make_identity(777).address})

    def lie(message: Message) -> Message:
        if isinstance(message, SnapshotProposal):
            entries = tuple(sorted((*known.entries, invented), key=lambda entry: entry.node))
            lying = known.model_copy(update={"entries": entries, "sequence": message.sequence})
            return message.model_copy(update={"root": lying.root()})
        return message

    for identity in simulation.identities:
        simulation.tamper[identity.address] = lie
    before = simulation.chain.sequence
    simulation.nodes.pop()  # something to propose
    simulation.run(30)
    assert simulation.chain.sequence == before
    assert any("differs from ours; not signed" in line for line in simulation.logs)


def test_a_member_that_invents_tasks_cannot_make_proposals_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CHUNKED_MESSAGE_NODES", 5)
    monkeypatch.setattr(limits, "MAX_CHUNKED_MESSAGE_BYTES", 30_000)
    simulation = Simulation(1)
    liar = simulation.identities[1]  # who does not lead the first epoch
    invented = tuple(sorted(task_id(number) for number in range(500, 1_500)))

    def lie(message: Message) -> Message:
        if not isinstance(message, ObservationShare):
            return message
        views = tuple(
            view.model_copy(update={"resident": invented}) for view in message.observation.views
        )
        observation = message.observation.model_copy(update={"views": views})
        data = observation.canonical_bytes()
        signature = "0x" + REAL.sign(liar, OBSERVATION_DOMAIN, data).hex()
        return ObservationShare(observation=observation, signature=signature)

    sizes = []

    def measure(message: Message) -> Message:
        if isinstance(message, SnapshotProposal):
            sizes.append(len(encode_canonical(encode_gossip(message, 1))))
        return message

    for identity in simulation.identities:
        simulation.tamper[identity.address] = lie if identity is liar else measure
    assert simulation.run(120, lambda: simulation.chain.sequence >= 2)
    assert sizes and max(sizes) <= limits.MAX_CHUNKED_MESSAGE_BYTES


def test_a_proposal_with_false_evidence_is_attributed() -> None:
    simulation = start(economics=VERIFY_ALL)
    liar = simulation.identities[1].address

    def lie(message: Message) -> Message:
        if isinstance(message, SettlementProposal) and message.completions:
            forged = message.completions[0].model_copy(update={"salt": "0x" + "99" * 32})
            return message.model_copy(
                update={
                    "completions": (forged,),
                    "results": (*message.results, "a.b.c"),
                    "settlement_hash": "0x" + "13" * 32,
                }
            )
        return message

    simulation.tamper[liar] = lie
    ids = [simulation.request(n) for n in range(1, 17)]
    settle(simulation, *ids)
    assert {fault.peer for fault in simulation.faults} <= {liar}
    assert any("false evidence" in fault.message for fault in simulation.faults)


def test_a_completion_must_be_what_was_committed_steps_included() -> None:
    simulation = start(economics=VERIFY_NONE)
    execution_id = simulation.request(steps=4)
    for node in simulation.nodes:
        node.plans[execution_id] = None  # type: ignore[assignment]  # the test plays them
    assert simulation.run(5, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    account, certificate = next(iter(simulation.certificates[execution_id].items()))
    executor = certificate.plan.executors()[0]
    node = simulation.by_node[executor]
    entries = tuple(
        TaskCommitment(
            task=task,
            inputs=("1" * 64,),
            outputs=("2" * 64,),
            state=EMPTY_DIGEST,
        )
        for task, name in enumerate(certificate.plan.executors())
        if name == executor
    )
    completion = Completion(
        execution_id=execution_id,
        node=executor,
        tasks=entries,
        salt="0x" + "55" * 32,
        end=make_signed_end(execution_id, 4),
    )
    member, key = simulation.members[account], node.identity.signing_key_hex
    agreement = AgreedCommitments(((executor, completion.root()),), (), 3)
    root, exposures = compute_commitments_root(execution_id, agreement), ((executor, 1),)
    agreed = ev.ExecutionCommitted(execution_id, root, "0x" + "01" * 32, exposures)
    simulation.feed(account, agreed)
    state = member.settlements._states[execution_id]
    state.chain.bind(agreement)
    with pytest.raises(Unavailable, match="no draw here yet"):
        member.handle(ev.ReportReceived(completion, key), simulation.now)
    basis = state.find_basis()
    assert basis is not None
    words = {"execution_id": execution_id, "signature": "0x", "seed": ID, **basis._asdict()}
    take_draw(state, Draw(**words), place=0, now=simulation.now)
    with pytest.raises(PeerFault, match="4 steps, 3 were committed"):
        member.handle(ev.ReportReceived(completion, key), simulation.now)
    other = completion.model_copy(update={"salt": "0x" + "56" * 32})
    with pytest.raises(PeerFault, match="root"):
        member.handle(ev.ReportReceived(other, key), simulation.now)
    with pytest.raises(BadSignature):
        member.handle(ev.ReportReceived(completion, "0x" + "00" * 32), simulation.now)
    unknown = completion.model_copy(update={"execution_id": "0x" + "99" * 32})
    with pytest.raises(Unavailable, match="not been seen"):
        member.handle(ev.ReportReceived(unknown, key), simulation.now)


def test_strangers_and_echoes_are_refused() -> None:
    simulation = start()
    account = simulation.identities[0].address
    member = simulation.members[account]
    message = PlanPartial(execution_id=ID, request_hash=ID, partial="0x" + "00" * 48)
    with pytest.raises(PeerFault, match="no committee member"):
        member.handle(ev.GossipReceived(make_identity(5).address, message), simulation.now)
    with pytest.raises(PeerFault, match="our own message"):
        member.handle(ev.GossipReceived(account, message), simulation.now)


def test_early_messages_are_bounded() -> None:
    simulation = start()
    account, other = (identity.address for identity in simulation.identities[:2])
    member = simulation.members[account]
    for number in range(tuning.MAX_EARLY_MESSAGES + 100):
        message = PlanPartial(
            execution_id=f"0x{number:064x}", request_hash=ID, partial="0x" + "00" * 48
        )
        member.handle(ev.GossipReceived(other, message), simulation.now)
    kept = member.plans._early[other]
    assert len(kept) == tuning.MAX_EARLY_MESSAGES
    assert next(iter(kept))[0] == f"0x{100:064x}"


def test_open_executions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_OPEN_EXECUTIONS", 2)
    simulation = start()
    ids = [simulation.request(n) for n in range(1, 4)]
    simulation.run(2)
    assert any("will be refunded" in line for line in simulation.logs)
    assert ids[2] not in simulation.certificates
    settle(simulation, *ids[:2])


def test_s96_requests_that_get_no_plan_keep_no_place_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They pay for no stake; who plans them meanwhile does not need this member."""
    monkeypatch.setattr(tuning, "MAX_OPEN_EXECUTIONS", 2)
    simulation = start()
    dear = [simulation.request(n, steps=limits.MAX_STEPS) for n in (1, 2)]  # for too low a price
    simulation.run(limits.MAX_PLAN_WAIT_S + 1)
    planned = [simulation.request(n) for n in (3, 4)]
    simulation.run(2)
    assert not set(dear) & simulation.certificates.keys()
    settle(simulation, *planned)


def test_only_members_can_be_members() -> None:
    _, view = make_committee()
    make_keys()
    with pytest.raises(InvalidInput, match="use a member's keystore"):
        CommitteeMember(
            make_identity(5),
            view,
            VERIFY_ALL,
            read_token,
            grace_s=GRACE_S,
            signing_guard=SigningGuard(),
        )


def test_members_that_restarted_do_not_hold_up_the_next_snapshot() -> None:
    """They saw the current one accepted long ago, and cannot know how long."""
    simulation = start()
    simulation.run(limits.SNAPSHOT_REFRESH_S - 5)
    before = simulation.chain.sequence
    for place in (1, 2):
        simulation.start_member(place)
    assert simulation.run(12, lambda: simulation.chain.sequence > before)
    assert not any("is not due" in line for line in simulation.logs)
