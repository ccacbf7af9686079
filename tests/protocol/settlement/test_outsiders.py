"""Nodes that only check each other are checked by a member that the draw chooses."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from splitup.messages.plans import Plan
from splitup.messages.verification import VerificationOrder
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.peer_messages import Attested, SettlementSignature
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.selection import compute_plan, is_pool_small, rank_validators
from splitup.protocol.settlement.attestations import sign_attestation
from splitup.protocol.settlement.proof_of_sampling import (
    Outcome,
    is_for_outsider,
    is_sampled,
    judge,
)
from tests.builders import (
    COMMON_CLASS,
    FOREIGN_CLASS,
    address,
    make_chain_manifest,
    make_request,
    make_snapshot,
    make_tolerant,
    task_id,
)
from tests.protocol.settlement.test_proof_of_sampling import BAD, GOOD, V1, commitment, result, rule
from tests.protocol.simulator import Node, Simulation, get_slashes, settle

OWN_CLASS = "tinygrad 0.14.0/CPU:CLANG/x86_64-0123456789ab/a compiler that nobody else has"
EVERY = Economics(sampling_bps=10_000, reward_milli=1_200, slash_milli=800)  # q = 1
ECONOMICS = (Path(__file__).resolve().parents[3] / "bench/reports/economics.md").read_text()


class Ring(Simulation):
    """Three of the nodes have a class of their own, lie, and confirm each other's lies."""

    is_copying = False

    def __init__(
        self, seed: int = 4, *, honest: int = 8, determinism: str = OWN_CLASS, **options: object
    ) -> None:
        super().__init__(seed, nodes=honest + 3, economics=EVERY, **options)  # type: ignore[arg-type]
        self.first_asked = ""  # "silent" or "unable"
        self.asked: dict[tuple[str, int], str] = {}  # who was asked first
        self.ring = {node.address for node in self.nodes[-3:]}
        for node in self.nodes[-3:]:
            node.determinism, node.lies = determinism, True

    def _verify(self, node: Node, order: VerificationOrder) -> None:
        self.is_copying = node.lies
        super()._verify(node, order)
        self.is_copying = False

    def _compute_on(self, node: Node, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        if self.is_copying:
            self.is_copying = False
            claimed = self._claim(execution_id, plan, task)
            self.is_copying = True
            return claimed
        return super()._compute_on(node, execution_id, plan, task)

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        key = command.order.draw.execution_id, command.order.task
        if self.asked.setdefault(key, account) != account or not self.first_asked:
            return super()._recompute(account, command)
        if self.first_asked == "unable":
            self.unable.add(account)
            super()._recompute(account, command)
            self.unable.remove(account)
        return None


def play(simulation: Ring, within_s: float = 60) -> tuple[str, set[int]]:
    """Run executions until one has a task of the ring; return it and the ring's tasks in it."""
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    for number in range(1, 30):
        execution_id = simulation.request(number)
        settle(simulation, execution_id, within_s=within_s)
        plan = simulation.find_plan(execution_id)
        own = {t for t, node in enumerate(plan.executors()) if node in simulation.ring}
        if own:
            return execution_id, own
    raise AssertionError("the ring got no work")


@pytest.mark.parametrize("determinism", [OWN_CLASS, FOREIGN_CLASS])
def test_s05_a_ring_with_a_class_of_its_own_is_found_out(determinism: str) -> None:
    """Also if no member computes in it: they compare numbers, and who repeated a lie lied."""
    manifest = make_tolerant(make_chain_manifest(3))
    simulation = Ring(determinism=determinism, manifest=manifest)
    execution_id, own = play(simulation)
    outcomes = simulation.find_outcomes(execution_id)
    assert {task for task, outcome in outcomes.items() if outcome == "lied"} == own
    assert get_slashes(simulation, execution_id).keys() <= simulation.ring
    recomputed = {task for execution, task in simulation.recomputed if execution == execution_id}
    assert recomputed == own, "nobody recomputes what many others checked"


def test_s05_one_member_looks_when_there_is_nothing_to_find() -> None:
    simulation = Ring()
    for node in simulation.nodes:
        node.lies = False
    execution_id, own = play(simulation)
    assert set(simulation.find_outcomes(execution_id).values()) == {"honest"}
    assert all(simulation.recomputed[execution_id, task] == 1 for task in own)
    assert get_slashes(simulation, execution_id) == {}


@pytest.mark.parametrize("fault", ["silent", "unable"])
def test_s05_the_next_member_looks_when_the_first_gives_no_answer(fault: str) -> None:
    simulation = Ring()
    simulation.first_asked = fault
    execution_id, own = play(simulation, within_s=300)
    outcomes = simulation.find_outcomes(execution_id)
    assert {task for task, outcome in outcomes.items() if outcome == "lied"} == own


def test_s05_a_pool_is_small_by_its_share_of_the_stake_not_by_its_operators() -> None:
    manifest = make_chain_manifest(4)
    ring = {address(number) for number in (21, 22, 23)}
    own = dict.fromkeys(range(1, 24), COMMON_CLASS) | dict.fromkeys((21, 22, 23), OWN_CLASS)
    for classes, expected in ((own, True), (dict.fromkeys(range(1, 24), COMMON_CLASS), False)):
        snapshot = make_snapshot(23, 4, classes=classes)
        outside = 0
        for number in range(60):
            seed = "0x" + hashlib.sha256(b"%d" % number).hexdigest()
            plan = compute_plan(make_request(), seed, snapshot, manifest)
            for task, node in enumerate(plan.executors()):
                small = is_pool_small(node, task_id(task), snapshot)
                assert small == (expected and node in ring)
                judges = rank_validators(seed, task, plan, snapshot, manifest)
                outside += node in ring and bool(set(judges) - ring)
        assert bool(outside) != expected, "only in the class of its own the ring judges itself"
    many = dict.fromkeys(range(1, 10), OWN_CLASS)  # nine of 23 are 39 %, less the executor's
    snapshot = make_snapshot(23, 4, classes=dict.fromkeys(range(1, 24), COMMON_CLASS) | many)
    assert is_pool_small(address(1), task_id(0), snapshot)
    assert not is_pool_small(address(20), task_id(0), snapshot)


def test_s05_the_share_makes_lying_in_a_ring_a_loss() -> None:
    """The ring saves C with every lie, and a third of the members help it."""
    default = Economics(sampling_bps=800, reward_milli=1_200, slash_milli=100_000)
    assert default.compute_outsider_bps(800) == 2_471
    tasks, found = 400_000, 0
    for number in range(tasks // 1_000):
        seed = "0x" + hashlib.sha256(b"%d" % number).hexdigest()
        for task in range(1_000):
            if is_sampled(seed, task, default.sampling_bps):
                helps = hashlib.sha256(b"%d/%d" % (number, task)).digest()[0] < 256 / 3
                found += is_for_outsider(seed, task, default, 800) and not helps
    gain = 1.0 - found / tasks * (1.2 + 100.0)  # in C, per task
    assert -0.5 < gain < -0.2, gain  # 1 - 0.08 * 0.247 * 2/3 * 101.2 = -0.33
    for slash in (100, 50, 10):  # the table of bench/reports/economics.md
        economics = Economics(sampling_bps=800, reward_milli=1_200, slash_milli=1_000 * slash)
        q = economics.compute_outsider_bps(800) / 10_000
        helped, honest = (1 - 0.08 * q * share * (1.2 + slash) for share in (2 / 3, 1))
        share = f"{100 * q:.1f} %" if q < 1 else "100 %"
        assert f"| {slash} C | {share} | +1.00 | {helped:+.2f} | {honest:+.2f} |" in ECONOMICS
    assert default.sampling_bps * default.compute_outsider_bps(800) / 10_000 < 200, (
        "below 2 % of all tasks"
    )


def test_s05_a_ruling_outweighs_validators_that_all_agree() -> None:
    claim, usable = commitment(output=BAD), [result(V1, BAD)]
    verdict = judge(claim, "e", usable, rule(GOOD))
    assert verdict.outcome is Outcome.LIED and set(verdict.liars) == {"e", V1}
    verdict = judge(claim, "e", usable, rule(BAD))
    assert (verdict.outcome, verdict.validators) == (Outcome.HONEST, (V1,))
    rejected = rule(GOOD).model_copy(update={"compared": True, "outputs": ()})
    verdict = judge(claim, "e", usable, rejected, {V1: rejected})
    assert (verdict.outcome, verdict.liars) == (Outcome.LIED, ("e", V1)), "who copied lied, too"
    accepted = rule(BAD).model_copy(update={"compared": True})
    assert judge(claim, "e", usable, accepted).outcome is Outcome.HONEST
    elsewhere = rule(GOOD, inputs="0" * 64)
    assert judge(claim, "e", usable, elsewhere).outcome is Outcome.HONEST, "about other inputs"


class TwoFaced(Ring):
    """Nobody's outputs are wrong; a member tells one other that they are, and signs nothing.

    All others' signatures are needed, as it is one of as many as may lie.
    """

    def __init__(self) -> None:
        super().__init__()
        for node in self.nodes:
            node.lies = False
        self.liar, self.misled = self.identities[0], self.identities[1].address
        self.lies_told = 0

    def feed(self, account: str, event: ev.Event) -> None:
        if isinstance(event, ev.GossipReceived) and event.sender == self.liar.address:
            if isinstance(event.message, SettlementProposal | SettlementSignature):
                return
            if isinstance(event.message, Attested) and account == self.misled:
                said = event.message.attestation.attestation
                rulings = tuple(
                    one.model_copy(update={"outputs": ("0" * 64,)}) for one in said.rulings
                )
                self.lies_told += len(rulings)
                signed = sign_attestation(self.liar, said.model_copy(update={"rulings": rulings}))
                event = ev.GossipReceived(event.sender, Attested(attestation=signed))
        super().feed(account, event)


def test_s45_a_member_that_tells_others_different_results_does_not_divide_them() -> None:
    simulation = TwoFaced()
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    for number in range(1, 30):
        execution_id = simulation.request(number)
        settle(simulation, execution_id)
        assert set(simulation.find_outcomes(execution_id).values()) == {"honest"}
        if simulation.lies_told:
            return
    raise AssertionError("the member was never asked")
