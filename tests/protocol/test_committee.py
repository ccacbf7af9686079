"""A committee of machines through faults and attacks, in virtual time (``simulator``)."""

from __future__ import annotations

from collections import Counter

import pytest

from splitup import limits
from splitup.codec import encode_canonical
from splitup.crypto import bls
from splitup.crypto.scheme import REAL
from splitup.errors import BadSignature, InvalidInput, PeerFault, Unavailable
from splitup.graph.compare import Tolerance
from splitup.protocol import events as ev
from splitup.protocol.certificates import RANDOMNESS_DOMAIN
from splitup.protocol.committee import CommitteeMember
from splitup.protocol.messages import (
    DrawPartial,
    PlanPartial,
    PlanVote,
    SettlementProposal,
    encode_gossip,
)
from splitup.protocol.observations import OBSERVATION_DOMAIN, ObservationShare, SnapshotProposal
from splitup.protocol.verification import MAX_JUDGES, Economics
from splitup.wire import EMPTY_DIGEST, Completion, Message, TaskCommitment
from tests.builders import make_chain_manifest, make_diamond_manifest, task_id
from tests.protocol.simulator import (
    GRACE_S,
    Network,
    Simulation,
    make_committee,
    make_identity,
    make_keys,
    read_result,
)

VERIFY_ALL = Economics(sampling_bps=10_000, reward_milli=1_200, slash_milli=100_000)
VERIFY_NONE = Economics(sampling_bps=0, reward_milli=1_200, slash_milli=100_000)


def start(seed: int = 1, **options: object) -> Simulation:
    """A simulation with its first snapshot on chain."""
    simulation = Simulation(seed, **options)  # type: ignore[arg-type]
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    return simulation


def settle(simulation: Simulation, *execution_ids: str, within_s: float = 60) -> None:
    assert simulation.run(within_s, lambda: simulation.is_settled(*execution_ids)), (
        simulation.logs[-5:],
        simulation.faults[-5:],
    )
    simulation.run(3)
    simulation.check()


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
        assert member.find_certificate(execution_id) is not None, "late clients still ask for it"
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


@pytest.mark.parametrize("place", range(4))
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
        5, lambda: simulation.members[account].find_certificate(execution_id) is not None
    )
    assert account in simulation.certificates[execution_id]
    settle(simulation, execution_id)


@pytest.mark.parametrize("seed", range(4))
def test_f09_duplicate_reordered_and_late_messages(seed: int) -> None:
    network = Network(repeat=0.5, delay_ms=(1, 700))
    simulation = start(seed=seed, network=network, economics=VERIFY_ALL)
    ids = [simulation.request(n) for n in range(1, 6)]
    settle(simulation, *ids)
    assert simulation.faults == []


@pytest.mark.parametrize("seed", range(4))
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
        seeds.add(next(iter(simulation.certificates[execution_id].values())).plan.seed)
    assert len(seeds) == 1


def test_a21_a_node_that_lies_loses_its_stake_and_the_honest_ones_are_paid() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=2)
    first = simulation.request(1)
    settle(simulation, first)
    plan = next(iter(simulation.certificates[first].values())).plan
    liar = simulation.by_node[plan.executors()[0]]
    liar.lies = True
    number, execution_id = 1, first
    while plan.executors().count(liar.address) == 0 or execution_id == first:
        number += 1
        execution_id = simulation.request(number)
        settle(simulation, execution_id)
        plan = next(iter(simulation.certificates[execution_id].values())).plan

    settlement = simulation.chain.settlements[execution_id]
    lies = plan.executors().count(liar.address)
    penalty = lies * 10 * 4 * 100_000 // 1_200
    assert [(s.node, s.amount_micro_usdc) for s in settlement.slashes] == [(liar.address, penalty)]
    paid = {p.to: p.amount_micro_usdc for p in settlement.payments if not p.from_slash}
    assert liar.address not in paid
    refund = [p.amount_micro_usdc for p in settlement.payments if p.to == plan.request.client]
    assert refund == [2 * 4 * 10], "the client got back what the execution cost"
    assert any(p.from_slash and p.to in simulation.by_node for p in settlement.payments)


def test_a_validator_that_accuses_falsely_is_slashed_instead() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=2)
    accuser = simulation.nodes[0]
    accuser.false_accuser = True
    ids = [simulation.request(n) for n in range(1, 17)]
    settle(simulation, *ids)
    asked = {order.draw.execution_id for order in simulation.orders}
    assert asked == set(ids)
    slashed = [s for i in ids for s in simulation.chain.settlements[i].slashes]
    assert slashed and {s.node for s in slashed} == {accuser.address}


def get_slashes(simulation: Simulation, execution_id: str) -> dict[str, int]:
    settlement = simulation.chain.settlements[execution_id]
    return {slash.node: slash.amount_micro_usdc for slash in settlement.slashes}


def test_an_executor_that_withholds_its_completion_pays_and_the_client_gets_it_all_back() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=2)
    execution_id = simulation.request()
    for node in simulation.nodes:
        node.withholds_completion = True
    settle(simulation, execution_id, within_s=120)
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    price = 10 * 4
    slashes = get_slashes(simulation, execution_id)
    executors = Counter(plan.executors())
    assert slashes == {node: n * (price * 2_000 // 1_200) for node, n in executors.items()}
    payments = simulation.chain.settlements[execution_id].payments
    assert not [p for p in payments if not p.from_slash], "nobody is paid for what nobody saw"
    validators = [p.amount_micro_usdc for p in payments if p.to in simulation.by_node]
    assert sum(validators) == 2 * price, "but those are who checked it"
    assert simulation.recomputed == {}


def test_a_crashed_executor_that_comes_back_in_time_loses_nothing() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=1)
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    executor = next(iter(simulation.certificates[execution_id].values())).plan.executors()[0]
    simulation.pause(executor, limits.EXECUTOR_REVEAL_S / 2)
    settle(simulation, execution_id, within_s=120)
    assert get_slashes(simulation, execution_id) == {}
    assert executor in {p.to for p in simulation.chain.settlements[execution_id].payments}


def test_a_validator_that_withholds_its_result_loses_its_fee_to_the_next() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=4, tasks=1)
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    for node in simulation.nodes:
        node.withholds_result = True
    assert simulation.run(30, lambda: bool(simulation.orders))
    for node in simulation.nodes:
        node.withholds_result = node.address in {o for _, o in simulation.ordered}
    settle(simulation, execution_id, within_s=120)
    ((withholder, amount),) = get_slashes(simulation, execution_id).items()
    assert amount == 2 * 10 * 4
    assert simulation.by_node[withholder].withholds_result
    paid = [p for p in simulation.chain.settlements[execution_id].payments if p.from_slash]
    assert [p.amount_micro_usdc for p in paid] == [10 * 4]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_revealed_before_a_quorum_holds_a_commitment_for_every_drawn_task(
    seed: int,
) -> None:
    """No member can show anybody a claimed output before its validator has committed."""
    simulation = start(seed=seed, economics=VERIFY_ALL, nodes=6, tasks=3)
    held: dict[tuple[str, int], set[str]] = {}
    early: list[str] = []
    for account, member in simulation.members.items():
        handle = member.handle

        def watch(event: ev.Event, now: float, account: str = account, handle=handle):  # type: ignore[no-untyped-def]
            if isinstance(event, ev.PromiseReceived):
                key = (event.promise.execution_id, event.promise.task)
                held.setdefault(key, set()).add(account)
            if isinstance(event, ev.CompletionReceived | ev.ResultReceived):
                for task in range(3):
                    if len(held.get((execution_id, task), ())) < 3:
                        early.append(f"{account} saw {event} before task {task} was committed to")
            return handle(event, now)

        member.handle = watch  # type: ignore[method-assign]
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert held and not early


@pytest.mark.parametrize("unable", [0, 1])
def test_a_corrupted_state_is_a_lie_although_the_outputs_are_right(unable: int) -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=1)
    simulation.unable = {m.address for m in simulation.identities[:unable]}
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    for node in simulation.nodes:
        node.corrupts_state = True
    settle(simulation, execution_id)
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    slashes = get_slashes(simulation, execution_id)
    assert slashes == {plan.executors()[0]: 10 * 4 * 100_000 // 1_200}
    assert simulation.recomputed[execution_id, 0] == 4
    asked = {node for _, node in simulation.ordered}
    assert len(asked) == MAX_JUDGES, "five nodes in all were heard before the committee"


@pytest.mark.parametrize("seed", range(3))
def test_f10_verdicts_survive_loss_delay_and_a_member_that_forgets(seed: int) -> None:
    network = Network(loss=0.3, repeat=0.1, delay_ms=(1, 1000))
    simulation = Simulation(seed, network=network, economics=VERIFY_ALL)
    assert simulation.run(600, lambda: simulation.chain.sequence >= 1)
    simulation.nodes[0].lies = True
    simulation.nodes[1].false_accuser = True
    execution_id = simulation.request()
    assert simulation.run(100, lambda: bool(simulation.ordered))
    simulation.start_member(seed)  # it lost what it held and had attested
    settle(simulation, execution_id, within_s=250)
    assert simulation.faults == []
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    lied = {t for t, n in enumerate(plan.executors()) if n == simulation.nodes[0].address}
    outcomes = simulation.find_outcomes(execution_id)
    assert lied == {task for task, outcome in outcomes.items() if outcome == "lied"}


def test_two_colluding_validators_cannot_convict() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=1)
    for node in simulation.nodes:
        node.false_accuser = True  # and all of them agree
    execution_id = simulation.request()
    settle(simulation, execution_id)
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    slashes = get_slashes(simulation, execution_id)
    assert len(slashes) == MAX_JUDGES and plan.executors()[0] not in slashes
    paid = {p.to for p in simulation.chain.settlements[execution_id].payments if not p.from_slash}
    assert paid == {plan.executors()[0]}


def test_where_members_cannot_recompute_nobody_loses_stake_and_the_outvoted_no_pay() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=1)
    simulation.unable = {member.address for member in simulation.identities[:2]}
    execution_id = simulation.request()
    for node in simulation.nodes:
        node.lies = True
    settle(simulation, execution_id)
    assert get_slashes(simulation, execution_id) == {}
    assert simulation.chain.settlements[execution_id].payments == ()
    member = next(iter(simulation.members.values()))
    evidence = member.find_evidence(execution_id)
    assert evidence is not None and evidence.verdicts[0].outcome == "outvoted"


@pytest.mark.parametrize("shape", ["chain", "diamond"])
@pytest.mark.parametrize("liar_task", [0, 1])
def test_a_lie_upstream_never_slashes_an_honest_node_downstream(shape: str, liar_task: int) -> None:
    """The nodes below compute on what they were given: they are judged on that alone."""
    manifest = make_chain_manifest(4) if shape == "chain" else make_diamond_manifest()
    simulation = start(economics=VERIFY_ALL, nodes=8, manifest=manifest)
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    simulation.lies_at = {(execution_id, liar_task)}
    liar = simulation.by_node[plan.executors()[liar_task]]
    liar.lies = True
    settle(simulation, execution_id)
    outcomes = simulation.find_outcomes(execution_id)
    assert outcomes == {task: "lied" if task == liar_task else "honest" for task in range(4)}
    assert set(get_slashes(simulation, execution_id)) == {liar.address}


SHAPES = {"chain": make_chain_manifest(4), "diamond": make_diamond_manifest()}


def play(shape: str, liar_task: int, fault: str) -> tuple[Simulation, str, dict[int, str], str]:
    """Return an execution in which one executor is at fault, its outcomes, and the executor."""
    simulation = start(economics=VERIFY_ALL, nodes=8, manifest=SHAPES[shape])
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    liar = plan.executors()[liar_task]
    assert plan.executors().count(liar) == 1
    setattr(simulation.by_node[liar], fault, True)
    settle(simulation, execution_id, within_s=120)
    return simulation, execution_id, simulation.find_outcomes(execution_id), liar


def get_pay(simulation: Simulation, execution_id: str) -> dict[str, int]:
    payments = simulation.chain.settlements[execution_id].payments
    return {p.to: p.amount_micro_usdc for p in payments if not p.from_slash}


@pytest.mark.parametrize("shape", ["chain", "diamond"])
@pytest.mark.parametrize("fault", ["hides_outputs", "stores_others"])
@pytest.mark.parametrize("unable", [0, 1])
def test_whose_outputs_nobody_finds_has_withheld_them_and_their_reader_is_paid(
    shape: str, fault: str, unable: int
) -> None:
    simulation, execution_id, outcomes, liar = play(shape, 0, fault)
    readers = {task for source, task in simulation.manifest.edges() if source == 0}
    assert outcomes == {
        task: "withheld" if task == 0 else "unresolved" if task in readers else "honest"
        for task in range(4)
    }
    assert get_slashes(simulation, execution_id) == {liar: 10 * 4 * 2_000 // 1_200}
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    paid = get_pay(simulation, execution_id)
    assert set(plan.executors()) - {liar} <= paid.keys()


@pytest.mark.parametrize("shape", ["chain", "diamond"])
def test_inputs_that_nobody_has_earn_nothing_and_cost_no_stake(shape: str) -> None:
    """Whether the producer sent others, or the reader hides a lie, nobody can prove."""
    simulation, execution_id, outcomes, _ = play(shape, 1, "misstates_inputs")
    assert outcomes == {t: "contradicted" if t in (0, 1) else "honest" for t in range(4)}
    assert get_slashes(simulation, execution_id) == {}
    price = 10 * 4
    assert sum(get_pay(simulation, execution_id).values()) == (2 + 3) * price, "two, and judges"


@pytest.mark.parametrize("seed", range(3))
def test_who_stores_while_others_look_does_not_split_the_members(seed: int) -> None:
    """What one honest member has found all others find when they look again."""
    simulation = start(seed=seed, economics=VERIFY_ALL, nodes=8, manifest=SHAPES["chain"])
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    late = simulation.by_node[plan.executors()[0]]
    late.hides_outputs = True

    def has_begun() -> bool:
        late.hides_outputs = sum(simulation.recomputed.values()) < 2
        return not late.hides_outputs

    assert simulation.run(60, has_begun)
    settle(simulation, execution_id, within_s=120)
    assert set(simulation.find_outcomes(execution_id).values()) == {"honest"}
    assert get_slashes(simulation, execution_id) == {}


@pytest.mark.parametrize(("lies", "outcome"), [(False, "honest"), (True, "lied")])
def test_a_class_that_nobody_shares_is_compared_within_the_tasks_tolerance(
    lies: bool, outcome: str
) -> None:
    """Nobody of its class can check it; members compare its numbers with those of their own."""
    tolerance = Tolerance(
        dtype="float32", relative_l2_ppb=1000, exponent_ppb=None, mantissa_ppb=None, max_ulp=None
    )
    chain = make_chain_manifest(2)
    tasks = tuple(task.model_copy(update={"tolerances": (tolerance,)}) for task in chain.tasks)
    manifest = chain.model_copy(update={"tasks": tasks})
    simulation = start(economics=VERIFY_ALL, nodes=1, manifest=manifest)
    (foreign,) = simulation.nodes
    foreign.determinism, foreign.lies = "GPU", lies
    simulation.run(10)  # until a snapshot says so
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert set(simulation.find_outcomes(execution_id).values()) == {outcome}
    penalty = 2 * 10 * 4 * 100_000 // 1_200
    slashed = sum(get_slashes(simulation, execution_id).values())
    assert penalty - 2 < slashed <= penalty if lies else slashed == 0


def test_a_silent_validator_is_passed_over() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=4, tasks=1)
    for node in simulation.nodes[:2]:
        node.mute_validator = True
    ids = [simulation.request(n) for n in range(1, 5)]
    settle(simulation, *ids, within_s=90)
    for execution_id in ids:
        paid = {p.to for p in simulation.chain.settlements[execution_id].payments}
        assert paid & {node.address for node in simulation.nodes[2:]}


def test_a22_the_only_holder_is_not_asked_to_verify_itself() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=1, tasks=2)
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert simulation.orders == []
    settlement = simulation.chain.settlements[execution_id]
    assert [p.to for p in settlement.payments] == [simulation.nodes[0].address]


def test_a_request_that_cannot_be_planned_says_why() -> None:
    simulation = start(nodes=2)
    simulation.manifest = make_chain_manifest(4)  # the snapshot's nodes hold three of its tasks
    for account in simulation.members:
        simulation.feed(account, ev.ManifestFetched(simulation.manifest))
    execution_id = simulation.request()
    simulation.run(1.5)
    for member in simulation.members.values():
        assert "no live node serves task 3" in member.find_refusal(execution_id)
        assert member.find_certificate(execution_id) is None


def test_a_task_that_nobody_holds_goes_to_a_node_with_the_memory_to_load_it() -> None:
    simulation = Simulation(1, nodes=3, economics=VERIFY_NONE, tasks=4, held=3)
    able = simulation.nodes[1]
    able.vram_free_bytes = simulation.manifest.tasks[3].vram_bytes * 2
    assert simulation.run(60, lambda: simulation.chain.sequence >= 2)
    execution_id = simulation.request()
    settle(simulation, execution_id)
    plan = next(iter(simulation.certificates[execution_id].values())).plan
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
        assert all(slot.startswith("snapshot/") for slot in slots)


def test_a_node_that_stops_beating_leaves_the_snapshot() -> None:
    simulation = start(nodes=4)
    gone = simulation.nodes.pop()
    assert simulation.run(20, lambda: simulation.chain.sequence >= 2)
    simulation.run(1)
    for member in simulation.members.values():
        snapshot = member.find_snapshot(simulation.chain.root)
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
    known = next(iter(simulation.members.values())).find_snapshot(simulation.chain.root)
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
    monkeypatch.setattr(limits, "PARCEL_NODES", 5)
    monkeypatch.setattr(limits, "MAX_PARCEL_BYTES", 30_000)
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
    assert sizes and max(sizes) <= limits.MAX_PARCEL_BYTES


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
        execution_id=execution_id, node=executor, steps=4, tasks=entries, salt="0x" + "55" * 32
    )
    member, key = simulation.members[account], node.identity.signing_key_hex
    block_hash = "0x" + "01" * 32
    simulation.feed(
        account, ev.CompletionCommitted(execution_id, executor, 3, completion.root(), block_hash)
    )
    with pytest.raises(PeerFault, match="4 steps, 3 were committed"):
        member.handle(ev.CompletionReceived(completion, key), simulation.now)
    other = completion.model_copy(update={"salt": "0x" + "56" * 32})
    with pytest.raises(PeerFault, match="root"):
        member.handle(ev.CompletionReceived(other, key), simulation.now)
    with pytest.raises(BadSignature):
        member.handle(ev.CompletionReceived(completion, "0x" + "00" * 32), simulation.now)
    unknown = completion.model_copy(update={"execution_id": "0x" + "99" * 32})
    with pytest.raises(Unavailable, match="not been seen"):
        member.handle(ev.CompletionReceived(unknown, key), simulation.now)


def test_strangers_and_echoes_are_refused() -> None:
    simulation = start()
    account = simulation.identities[0].address
    member = simulation.members[account]
    message = PlanPartial(execution_id="0x" + "11" * 32, partial="0x" + "00" * 48)
    with pytest.raises(PeerFault, match="no committee member"):
        member.handle(ev.GossipReceived(make_identity(5).address, message), simulation.now)
    with pytest.raises(PeerFault, match="our own message"):
        member.handle(ev.GossipReceived(account, message), simulation.now)


def test_early_messages_are_bounded() -> None:
    simulation = start()
    account, other = (identity.address for identity in simulation.identities[:2])
    member = simulation.members[account]
    for number in range(limits.MAX_EARLY_MESSAGES + 100):
        message = PlanPartial(execution_id=f"0x{number:064x}", partial="0x" + "00" * 48)
        member.handle(ev.GossipReceived(other, message), simulation.now)
    kept = member._plans._early[other]
    assert len(kept) == limits.MAX_EARLY_MESSAGES
    assert next(iter(kept))[0] == f"0x{100:064x}"


def test_open_executions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_EXECUTIONS", 2)
    simulation = start()
    ids = [simulation.request(n) for n in range(1, 4)]
    simulation.run(2)
    assert any("left to be refunded" in line for line in simulation.logs)
    assert ids[2] not in simulation.certificates
    settle(simulation, *ids[:2])


def test_only_members_can_be_members() -> None:
    _, view = make_committee()
    make_keys()
    with pytest.raises(InvalidInput, match="use a member's keystore"):
        CommitteeMember(make_identity(5), view, VERIFY_ALL, read_result, grace_s=GRACE_S)


def test_members_that_restarted_do_not_hold_up_the_next_snapshot() -> None:
    """They saw the current one accepted long ago, and cannot know how long."""
    simulation = start()
    simulation.run(limits.SNAPSHOT_REFRESH_S - 5)
    before = simulation.chain.sequence
    for place in (1, 2):
        simulation.start_member(place)
    assert simulation.run(12, lambda: simulation.chain.sequence > before)
    assert not any("is not due" in line for line in simulation.logs)
