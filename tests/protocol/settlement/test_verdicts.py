"""What becomes of executors and validators that lie, withhold or fail, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from splitup.core import limits, tuning
from splitup.messages.completions import EMPTY_DIGEST, Completion
from splitup.messages.verification import Ruling, ValidatorCommitment, VerificationResult
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.peer_messages import Attested
from splitup.protocol.settlement.evidence import compute_evidence_root
from splitup.protocol.settlement.proof_of_sampling import MAX_JUDGES
from splitup.protocol.settlement.settlement_state import SettlementState
from splitup.protocol.settlement.verification_rounds import VerificationRounds
from splitup.protocol.settlement.verification_state import Verification
from tests.builders import (
    FOREIGN_CLASS,
    make_chain_manifest,
    make_diamond_manifest,
    make_tolerant,
)
from tests.parameters import some_of
from tests.protocol.simulator import (
    GRACE_S,
    TICK_S,
    VERIFY_ALL,
    Network,
    Simulation,
    get_slashes,
    settle,
    start,
)

FLOOR = limits.EXPOSURE_FLOOR_MICRO_USDC


def test_a21_a_node_that_lies_loses_its_stake_and_the_honest_ones_are_paid() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=2)
    first = simulation.request(1)
    settle(simulation, first)
    plan = simulation.find_plan(first)
    liar = simulation.by_node[plan.executors()[0]]
    liar.lies = True
    number, execution_id = 1, first
    while plan.executors().count(liar.address) == 0 or execution_id == first:
        number += 1
        execution_id = simulation.request(number)
        settle(simulation, execution_id)
        plan = simulation.find_plan(execution_id)

    settlement = simulation.chain.settlements[execution_id]
    lies = plan.executors().count(liar.address)
    penalty = lies * 10 * 4 * 100_000 // 1_200 + FLOOR
    assert [(s.node, s.amount_micro_usdc) for s in settlement.slashes] == [(liar.address, penalty)]
    paid = {p.account: p.amount_micro_usdc for p in settlement.payments if not p.from_slash}
    assert liar.address not in paid
    refund = [p.amount_micro_usdc for p in settlement.payments if p.account == plan.request.client]
    assert refund == [2 * 4 * 10], "the client got back what the execution cost"
    assert any(p.from_slash and p.account in simulation.by_node for p in settlement.payments)


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


def test_an_executor_that_withholds_its_completion_pays_and_the_client_gets_it_all_back() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=2)
    execution_id = simulation.request()
    for node in simulation.nodes:
        node.withholds_completion = True
    settle(simulation, execution_id, within_s=120)
    plan = simulation.find_plan(execution_id)
    price = 10 * 4
    slashes = get_slashes(simulation, execution_id)
    executors = Counter(plan.executors())
    assert slashes == {node: n * (price * 2_000 // 1_200) + FLOOR for node, n in executors.items()}
    payments = simulation.chain.settlements[execution_id].payments
    assert not [p for p in payments if not p.from_slash], "nobody is paid for what nobody saw"
    validators = [p.amount_micro_usdc for p in payments if p.account in simulation.by_node]
    assert sum(validators) == 2 * price, "but those are who checked it"
    assert simulation.recomputed == {}


def test_a_crashed_executor_that_comes_back_in_time_loses_nothing() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=1)
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    executor = simulation.find_plan(execution_id).executors()[0]
    simulation.pause(executor, limits.EXECUTOR_REVEAL_S / 2)
    settle(simulation, execution_id, within_s=120)
    assert get_slashes(simulation, execution_id) == {}
    assert executor in {p.account for p in simulation.chain.settlements[execution_id].payments}


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
    assert get_slashes(simulation, execution_id) == {}, "slow is not wrong"
    member = next(iter(simulation.members.values()))
    evidence = member.settlements.find_evidence(execution_id)
    assert evidence is not None
    ((withholder,), (heard,)) = evidence.verdicts[0].silent, evidence.verdicts[0].validators
    assert simulation.by_node[withholder].withholds_result
    paid = {p.account: p for p in simulation.chain.settlements[execution_id].payments}
    assert paid[heard].amount_micro_usdc == 10 * 4 and withholder not in paid


def test_many_answers_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that looked at all tasks for each answer would hear honest nodes too late."""
    looks: Counter[int] = Counter()
    advance = VerificationRounds.advance

    def count(
        self: VerificationRounds, state: SettlementState, found: Verification, now: float
    ) -> list[cmd.Command]:
        looks[len(found.checks)] += 1
        return advance(self, state, found, now)

    monkeypatch.setattr(VerificationRounds, "advance", count)
    for tasks in (8, 64):
        simulation = start(economics=VERIFY_ALL, nodes=6, tasks=tasks)
        settle(simulation, simulation.request())
    assert looks[64] <= 1.5 * looks[8]


@pytest.mark.long  # a minute; with 64 tasks above
def test_the_largest_execution_is_verified_whole(raised_recursion_limit: None) -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=limits.MAX_TASKS)
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert get_slashes(simulation, execution_id) == {}


def test_commitments_are_attested_together_and_the_last_one_with_the_next_tick() -> None:
    """Each attestation repeats what the one before it said, to all members."""
    tasks = 12
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=tasks)
    member = next(iter(simulation.members.values()))
    sent: list[tuple[float, int]] = []  # when, and how many commitments it tells of
    came: dict[int, float] = {}  # when the first commitment for each task did
    handle = member.handle

    def watch(event: ev.Event, now: float) -> list[cmd.Command]:
        match event:
            case ev.ReportReceived(report=ValidatorCommitment(task=task)):
                came.setdefault(task, now)
        commands = handle(event, now)
        said = [command.message for command in commands if isinstance(command, cmd.Gossip)]
        words = [message.attestation for message in said if isinstance(message, Attested)]
        sent.extend((now, len(signed.attestation.held)) for signed in words)
        return commands

    member.handle = watch  # type: ignore[method-assign]
    settle(simulation, simulation.request())
    told_at = next(now for now, held in sent if held == tasks)
    assert told_at <= max(came.values()) + TICK_S, "others wait for it"
    assert len(sent) < tasks


@pytest.mark.parametrize("seed", some_of(range(3), 0))
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
            match event:
                case ev.ReportReceived(report=ValidatorCommitment() as told):
                    held.setdefault((told.execution_id, told.task), set()).add(account)
                case ev.ReportReceived(report=Completion() | VerificationResult()):
                    for task in range(3):
                        if len(held.get((execution_id, task), ())) < 3:
                            early.append(f"{account} saw {event} before {task} was committed to")
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
    plan = simulation.find_plan(execution_id)
    slashes = get_slashes(simulation, execution_id)
    assert slashes == {plan.executors()[0]: 10 * 4 * 100_000 // 1_200 + FLOOR}
    assert simulation.recomputed[execution_id, 0] == 4
    asked = {node for _, node in simulation.ordered}
    assert len(asked) == MAX_JUDGES, "five nodes in all were heard before the committee"


@pytest.mark.parametrize("seed", some_of(range(3), 1))
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
    plan = simulation.find_plan(execution_id)
    lied = {t for t, n in enumerate(plan.executors()) if n == simulation.nodes[0].address}
    outcomes = simulation.find_outcomes(execution_id)
    assert lied == {task for task, outcome in outcomes.items() if outcome == "lied"}


def test_two_colluding_validators_cannot_convict() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=1)
    for node in simulation.nodes:
        node.false_accuser = True  # and all of them agree
    execution_id = simulation.request()
    settle(simulation, execution_id)
    plan = simulation.find_plan(execution_id)
    slashes = get_slashes(simulation, execution_id)
    assert len(slashes) == MAX_JUDGES and plan.executors()[0] not in slashes
    paid = {
        p.account for p in simulation.chain.settlements[execution_id].payments if not p.from_slash
    }
    assert paid == {plan.executors()[0]}


def test_members_keep_the_evidence_that_they_signed_though_a_verdict_changes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = start(economics=VERIFY_ALL, nodes=6, tasks=2)
    emit = simulation.emit

    def change_verdicts(event: ev.Event) -> None:
        """As when it turns out, before the settlement's block, that a validator stays silent."""
        if isinstance(event, ev.ExecutionEnded):
            for member in simulation.members.values():
                verification = member.settlements._states[event.execution_id].verification
                assert verification is not None
                for task, verdict in verification.verdicts.items():
                    silent = (simulation.nodes[0].address,)
                    verification.verdicts[task] = replace(verdict, silent=silent)
        emit(event)

    monkeypatch.setattr(simulation, "emit", change_verdicts)
    execution_id = simulation.request()
    settle(simulation, execution_id)
    simulation.run(1.0)
    root = simulation.chain.settlements[execution_id].evidence_root
    found = [
        member.settlements.find_evidence(execution_id) for member in simulation.members.values()
    ]
    kept = [evidence for evidence in found if evidence is not None]
    assert len(kept) >= 3
    assert {compute_evidence_root(one) for one in kept} == {root}


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
    evidence = member.settlements.find_evidence(execution_id)
    assert evidence is not None and evidence.verdicts[0].outcome == "outvoted"


@pytest.mark.parametrize("shape", some_of(("chain", "diamond"), "diamond"))
@pytest.mark.parametrize("liar_task", [0, 1])
def test_a_lie_upstream_never_slashes_an_honest_node_downstream(shape: str, liar_task: int) -> None:
    """The nodes below compute on what they were given: they are judged on that alone."""
    manifest = make_chain_manifest(4) if shape == "chain" else make_diamond_manifest()
    simulation = start(economics=VERIFY_ALL, nodes=8, manifest=manifest)
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
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
    execution_id = simulation.request(2)  # its seed gives every task a node of its own
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
    liar = plan.executors()[liar_task]
    assert plan.executors().count(liar) == 1
    setattr(simulation.by_node[liar], fault, True)
    settle(simulation, execution_id, within_s=120)
    return simulation, execution_id, simulation.find_outcomes(execution_id), liar


@pytest.mark.parametrize("shape", some_of(("chain", "diamond"), "diamond"))
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
    assert get_slashes(simulation, execution_id) == {liar: 10 * 4 * 2_000 // 1_200 + FLOOR}
    plan = simulation.find_plan(execution_id)
    paid = simulation.get_paid(execution_id)
    assert set(plan.executors()) - {liar} <= paid.keys()


@pytest.mark.parametrize("shape", ["chain", "diamond"])
def test_inputs_that_nobody_has_earn_nothing_and_cost_no_stake(shape: str) -> None:
    """Whether the producer sent others, or the reader hides a lie, nobody can prove."""
    simulation, execution_id, outcomes, _ = play(shape, 1, "misstates_inputs")
    assert outcomes == {t: "contradicted" if t in (0, 1) else "honest" for t in range(4)}
    assert get_slashes(simulation, execution_id) == {}
    price = 10 * 4
    assert sum(simulation.get_paid(execution_id).values()) == (2 + 3) * price, "two, and judges"


@pytest.mark.parametrize("seed", some_of(range(3), 0))
def test_who_stores_while_others_look_does_not_split_the_members(seed: int) -> None:
    """What one honest member has found all others find when they look again."""
    simulation = start(seed=seed, economics=VERIFY_ALL, nodes=8, manifest=SHAPES["chain"])
    execution_id = simulation.request()
    simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
    late = simulation.by_node[plan.executors()[0]]
    late.hides_outputs = True

    def has_begun() -> bool:
        late.hides_outputs = sum(simulation.recomputed.values()) < 2
        return not late.hides_outputs

    assert simulation.run(60, has_begun)
    settle(simulation, execution_id, within_s=120)
    assert set(simulation.find_outcomes(execution_id).values()) == {"honest"}
    assert get_slashes(simulation, execution_id) == {}


def start_abroad(nodes: int, tasks: int) -> Simulation:
    """Start nodes of a class in which no member computes; all tasks have a tolerance."""
    manifest = make_tolerant(make_chain_manifest(tasks))
    simulation = start(economics=VERIFY_ALL, nodes=nodes, manifest=manifest)
    for node in simulation.nodes:
        node.determinism = FOREIGN_CLASS
    simulation.run(10)  # until a snapshot says so
    return simulation


def request_abroad(simulation: Simulation, number: int = 1) -> tuple[str, str]:
    """Request an execution of one task; return it and its executor."""
    execution_id = simulation.request(number)
    assert simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
    return execution_id, plan.executors()[0]


@pytest.mark.parametrize("fault", ["", "lies", "corrupts_state"])
def test_members_of_another_class_find_a_liar_among_two(fault: str) -> None:
    """Only numbers within the tolerance are right; the state is seen in later outputs."""
    simulation = start_abroad(nodes=2, tasks=1)
    execution_id, executor = request_abroad(simulation)
    if fault:
        setattr(simulation.by_node[executor], fault, True)
    settle(simulation, execution_id)
    lied = fault == "lies"
    assert simulation.find_outcomes(execution_id) == {0: "lied" if lied else "honest"}
    penalty = 10 * 4 * 100_000 // 1_200 + FLOOR
    assert get_slashes(simulation, execution_id) == ({executor: penalty} if lied else {})
    (validator,) = simulation.by_node.keys() - {executor}
    paid = {p.account for p in simulation.chain.settlements[execution_id].payments}
    assert paid & simulation.by_node.keys() == {validator} if lied else {validator, executor}
    assert bool(simulation.recomputed) == bool(fault), "nobody recomputes what nobody doubts"


def test_who_judges_an_executor_that_stores_nothing_is_paid_for_right_numbers() -> None:
    simulation = start_abroad(nodes=2, tasks=1)
    execution_id, executor = request_abroad(simulation)
    simulation.by_node[executor].hides_outputs = True
    simulation.by_node[executor].has_other_driver = True
    settle(simulation, execution_id, within_s=120)
    assert simulation.find_outcomes(execution_id) == {0: "withheld"}
    (validator,) = simulation.by_node.keys() - {executor}
    assert get_slashes(simulation, execution_id).keys() == {executor}
    assert validator in {p.account for p in simulation.chain.settlements[execution_id].payments}


@pytest.mark.parametrize("nodes", [2, 6])
def test_two_honest_nodes_of_a_class_may_differ_within_the_tolerance(nodes: int) -> None:
    simulation = start_abroad(nodes=nodes, tasks=1)
    for node in simulation.nodes[::2]:
        node.has_other_driver = True
    execution_id, executor = request_abroad(simulation)
    settle(simulation, execution_id, within_s=120)
    assert simulation.find_outcomes(execution_id) == {0: "honest"}
    assert get_slashes(simulation, execution_id) == {}
    paid = {p.account for p in simulation.chain.settlements[execution_id].payments}
    assert executor in paid and len(paid & simulation.by_node.keys()) == 2
    if nodes == 2:
        assert simulation.recomputed[execution_id, 0] == 4


@pytest.mark.parametrize("fault", ["false_accuser", "hides_outputs"])
@pytest.mark.parametrize("accusers", [1, 5])
def test_who_accuses_falsely_loses_stake_to_members_of_another_class(
    fault: str, accusers: int
) -> None:
    """Also if most of five do. Who stores no outputs to compare with stands there as a liar."""
    simulation = start_abroad(nodes=6, tasks=1)
    execution_id, executor = request_abroad(simulation)
    assert simulation.run(30, lambda: bool(simulation.ordered))
    ((_, first),) = set(simulation.ordered)  # it has not computed yet
    for node in simulation.nodes:
        if node.address == first or (accusers > 1 and node.address != executor):
            setattr(node, fault, True)
            node.has_other_driver = True
    settle(simulation, execution_id, within_s=120)
    assert simulation.find_outcomes(execution_id) == {0: "honest"}
    slashes = get_slashes(simulation, execution_id)
    lie = 10 * 4 * 100_000 // 1_200 + FLOOR // 10
    asked = {node for _, node in simulation.ordered}
    accusing = {n.address for n in simulation.nodes if getattr(n, fault)} & asked
    assert slashes == dict.fromkeys(accusing, lie)
    assert len(accusing) == (1 if accusers == 1 else MAX_JUDGES)
    paid = {
        p.account for p in simulation.chain.settlements[execution_id].payments if not p.from_slash
    }
    assert paid & simulation.by_node.keys() == {executor}


@pytest.mark.parametrize(("lies", "outcome"), [(False, "honest"), (True, "lied")])
def test_a_class_that_nobody_shares_is_compared_within_the_tasks_tolerance(
    lies: bool, outcome: str
) -> None:
    """Nobody of its class can check it; members compare its numbers with those of their own."""
    simulation = start_abroad(nodes=1, tasks=2)
    simulation.nodes[0].lies = lies
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert set(simulation.find_outcomes(execution_id).values()) == {outcome}
    penalty = 2 * 10 * 4 * 100_000 // 1_200 + FLOOR
    slashed = sum(get_slashes(simulation, execution_id).values())
    assert penalty - 2 < slashed <= penalty if lies else slashed == 0


def test_a_silent_validator_is_passed_over() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=4, tasks=1)
    for node in simulation.nodes[:2]:
        node.mute_validator = True
    ids = [simulation.request(n) for n in range(1, 5)]
    settle(simulation, *ids, within_s=90)
    for execution_id in ids:
        paid = {p.account for p in simulation.chain.settlements[execution_id].payments}
        assert paid & {node.address for node in simulation.nodes[2:]}


def test_a22_the_only_holder_is_not_asked_to_verify_itself() -> None:
    simulation = start(economics=VERIFY_ALL, nodes=1, tasks=2)
    execution_id = simulation.request()
    settle(simulation, execution_id)
    assert simulation.orders == []
    settlement = simulation.chain.settlements[execution_id]
    assert [p.account for p in settlement.payments] == [simulation.nodes[0].address]


@pytest.fixture
def short_rulings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the time that a ruling may take, since each second is simulated."""
    monkeypatch.setattr(limits, "RULING_S", limits.RULING_S / 5)


class Busy(Simulation):
    """Members recompute one task at a time, and take long for each."""

    def __init__(self, *, nodes: int, tasks: int) -> None:
        super().__init__(economics=VERIFY_ALL, nodes=nodes, tasks=tasks)
        self.TASK_S = 0.8 * limits.RULING_S
        self._free_at: dict[str, float] = {}

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        free_at = max(self.now, self._free_at.get(account, 0.0)) + self.TASK_S
        self._free_at[account] = free_at
        self.after(free_at - self.now, partial(super()._recompute, account, command))


@pytest.mark.usefixtures("short_rulings")
def test_many_lies_at_once_do_not_leave_members_without_the_time_to_convict() -> None:
    simulation = Busy(nodes=5, tasks=1)
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    for node in simulation.nodes:
        node.lies = True
    ids = [simulation.request(number, deadline_s=3_600) for number in (1, 2)]
    settle(simulation, *ids, within_s=3_600)
    for execution_id in ids:
        assert set(simulation.find_outcomes(execution_id).values()) == {"lied"}
        assert get_slashes(simulation, execution_id)


@pytest.mark.usefixtures("short_rulings")
def test_members_that_never_answer_hold_a_settlement_up_for_a_while_only() -> None:
    simulation = Busy(nodes=5, tasks=1)
    simulation.TASK_S = math.inf
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    for node in simulation.nodes:
        node.lies = True
    patient, hurried = simulation.request(1, deadline_s=3_600), simulation.request(2, deadline_s=60)
    settle(simulation, hurried, within_s=60 + GRACE_S)
    settle(simulation, patient, within_s=2 * limits.RULING_S)
    for execution_id in (patient, hurried):
        assert not get_slashes(simulation, execution_id)
        assert set(simulation.find_outcomes(execution_id).values()) <= {"undecided", "unresolved"}


class Slow(Simulation):
    """Members take too long for a task, each time twice as long, until they have time enough."""

    SLOW_S = 100.0

    def __init__(self, *, slow_tries: float) -> None:
        super().__init__(economics=VERIFY_ALL, nodes=6, tasks=1)
        self._slow_tries = slow_tries

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        took_s = self.SLOW_S * 2**command.tries
        if command.tries >= self._slow_tries:
            self.after(took_s, partial(super()._recompute, account, command))
            return
        execution_id, task = command.order.draw.execution_id, command.order.task
        self.recomputed[execution_id, task] += 1
        slow = Ruling(
            task=task, inputs=(), outputs=(), state=EMPTY_DIGEST, error="", missing=(), slow=True
        )
        event = ev.TaskRecomputed(execution_id, (slow,))
        self.after(took_s, partial(self.feed, account, event))


@pytest.mark.usefixtures("short_rulings")
def test_members_that_are_slow_at_first_convict_a_liar_before_the_deadline() -> None:
    simulation = Slow(slow_tries=2)
    simulation.SLOW_S /= 5
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    for node in simulation.nodes:
        node.lies = True
    execution_id = simulation.request(deadline_s=3_600)
    settle(simulation, execution_id, within_s=1_200)
    assert simulation.SLOW_S * (1 + 2 + 4) > 2 * limits.RULING_S, "longer than silence is borne"
    assert simulation.find_outcomes(execution_id) == {0: "lied"}
    assert get_slashes(simulation, execution_id)


def test_members_that_are_too_slow_in_the_end_say_so_and_nobody_loses_stake() -> None:
    simulation = Slow(slow_tries=math.inf)
    simulation.SLOW_S = 1.0
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    for node in simulation.nodes:
        node.lies = True
    execution_id = simulation.request(deadline_s=3_600)
    settle(simulation, execution_id, within_s=150)
    assert simulation.recomputed[execution_id, 0] == 4 * tuning.SLOW_TRIES
    assert not get_slashes(simulation, execution_id)
    assert simulation.find_outcomes(execution_id) == {0: "outvoted"}


def test_members_that_are_slow_until_the_end_say_of_nobody_that_it_was_outvoted() -> None:
    """Nodes that accuse an honest one gain nothing by the judges' slow machines."""
    simulation = Slow(slow_tries=math.inf)
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    for node in simulation.nodes:
        node.false_accuser = True
    execution_id = simulation.request(deadline_s=60)
    settle(simulation, execution_id, within_s=60 + GRACE_S)
    assert simulation.find_outcomes(execution_id) == {0: "undecided"}
    settlement = simulation.chain.settlements[execution_id]
    assert (settlement.payments, settlement.slashes) == ((), ())
