"""Whoever is silent, and however many steps a task has, an execution is settled in time."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from splitup.core import limits, tuning
from splitup.messages.verification import ValidatorCommitment, VerificationOrder
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.task_checks import TaskCheck
from splitup.protocol.settlement.verification_rounds import VerificationRounds
from tests.builders import address
from tests.protocol.settlement.test_outsiders import Ring
from tests.protocol.simulator import GRACE_S, VERIFY_ALL, Node, Simulation, get_slashes, settle

# Of the shorter settlement here, as the most steps of a request are of an hour.
STEPS = limits.MAX_STEPS * GRACE_S // 3_600
DEADLINE_S = 30


class Quiet(Simulation):
    """Validators answer after so many seconds, by the order in which they are asked; or never."""

    def __init__(self, *answers_s: float, tasks: int = 1) -> None:
        super().__init__(economics=VERIFY_ALL, nodes=8, tasks=tasks)
        self.answers_s = answers_s
        self.asked: dict[int, list[str]] = {}
        self.members_s = 0.0  # that members need to recompute
        assert self.run(20, lambda: self.chain.sequence >= 1)

    def _verify(self, node: Node, order: VerificationOrder) -> None:
        asked = self.asked.setdefault(order.task, [])
        if node.address in asked:
            return
        asked.append(node.address)
        after_s = dict(enumerate(self.answers_s)).get(len(asked) - 1, math.inf)
        if after_s < math.inf:
            self.after(after_s, partial(super()._verify, node, order))

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        if self.members_s < math.inf:
            self.after(self.members_s, partial(super()._recompute, account, command))

    def play(self) -> str:
        """Settle one execution before the chain would refund it; return its id."""
        execution_id = self.request(steps=STEPS, deadline_s=DEADLINE_S)
        settle(self, execution_id, within_s=DEADLINE_S + GRACE_S)
        return execution_id


def test_s41_silent_validators_do_not_leave_an_honest_executor_unpaid() -> None:
    """Members compute instead, and have as much time as all validators had."""
    simulation = Quiet()
    simulation.members_s = 15.0
    execution_id = simulation.play()
    (executor,) = simulation.find_plan(execution_id).executors()
    assert len(simulation.asked[0]) > 4
    assert simulation.find_outcomes(execution_id) == {0: "honest"}
    assert simulation.get_paid(execution_id).keys() == {executor}


def test_s41_the_first_validator_that_answers_after_silent_ones_is_heard() -> None:
    simulation = Quiet(math.inf, math.inf, math.inf, 10.0)
    execution_id = simulation.play()
    (executor,) = simulation.find_plan(execution_id).executors()
    assert simulation.find_outcomes(execution_id) == {0: "honest"}
    assert simulation.get_paid(execution_id).keys() == {executor, simulation.asked[0][3]}
    assert not simulation.recomputed


def test_a_slow_validator_is_heard_although_others_were_asked_meanwhile() -> None:
    simulation = Quiet(25.0)
    execution_id = simulation.play()
    (executor,) = simulation.find_plan(execution_id).executors()
    assert len(simulation.asked[0]) > 2
    assert simulation.get_paid(execution_id).keys() == {executor, simulation.asked[0][0]}
    assert not simulation.recomputed


@pytest.mark.parametrize("answering", [0, 1])
def test_s41_a_liar_gains_nothing_by_silent_validators_and_a_task_that_takes_members_long(
    answering: int,
) -> None:
    """Nor if one validator contradicts it and the others are silent; the others are paid."""
    simulation = Quiet(*[1.0] * answering, tasks=2)
    simulation.members_s = math.inf
    execution_id = f"0x{1:064x}"
    for node in simulation.nodes:
        node.lies = True
    simulation.lies_at = {(execution_id, 0)}
    assert simulation.play() == execution_id
    outcomes = simulation.find_outcomes(execution_id)
    assert outcomes[0] == "undecided" and not get_slashes(simulation, execution_id)
    liar, other = simulation.find_plan(execution_id).executors()
    paid = simulation.get_paid(execution_id)
    if answering:  # of the other task's validators, too
        assert liar != other and liar not in paid and outcomes[1] == "honest"
        assert paid.keys() == {other, simulation.asked[1][0]}
    else:
        assert outcomes[1] == "undecided" and not paid, "nobody can tell an honest task from a lie"


class Watched(Ring):
    """Three nodes check only each other, and members take long to look."""

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        pass  # it takes longer than there is time


def find_own(simulation: Ring) -> tuple[str, set[int]]:
    """Return an execution of many steps in which the ring has tasks, and these."""
    assert simulation.run(60, lambda: simulation.chain.sequence >= 2), "it tells its own class"
    for number in range(1, 30):
        execution_id = simulation.request(number, steps=STEPS, deadline_s=DEADLINE_S)
        settle(simulation, execution_id, within_s=DEADLINE_S + GRACE_S)
        plan = simulation.find_plan(execution_id)
        own = {t for t, node in enumerate(plan.executors()) if node in simulation.ring}
        if own:
            checked = {node for task, node in simulation.verified_by(execution_id) if task in own}
            assert checked <= simulation.ring
            return execution_id, own
    raise AssertionError("the ring got no work")


def test_s41_a_ring_gains_nothing_by_a_task_that_takes_members_long() -> None:
    simulation = Watched()
    execution_id, own = find_own(simulation)
    outcomes = simulation.find_outcomes(execution_id)
    assert {task for task, outcome in outcomes.items() if outcome == "undecided"} == own
    paid = {p.account for p in simulation.chain.settlements[execution_id].payments}
    plan = simulation.find_plan(execution_id)
    assert set(plan.executors()) - simulation.ring <= paid and not paid & simulation.ring


def test_s41_a_ring_is_seen_by_the_next_member_when_the_first_is_silent() -> None:
    simulation = Ring()
    simulation.first_asked = "silent"
    execution_id, own = find_own(simulation)
    outcomes = simulation.find_outcomes(execution_id)
    assert {task for task, outcome in outcomes.items() if outcome == "lied"} == own


@pytest.mark.parametrize("steps", [1, 5_300, 36_000, limits.MAX_STEPS])
@pytest.mark.parametrize("count", [1, 5, limits.MAX_ASKED])
def test_all_validators_together_have_no_more_time_than_is_left(steps: int, count: int) -> None:
    """Each of them has at least its share of it, or what is usual, before the next is asked."""
    validators, until, now = tuple(address(n) for n in range(1, count + 1)), 1_800.0, 0.0
    check, attestations = TaskCheck(0, validators, steps), Attestations(quorum=3)
    while not check.is_covered(attestations):
        assert now <= until + count
        check.advance(attestations, None, None, until, now)
        now += 1.0
    usual_s = limits.VERIFICATION_SILENCE_S + limits.VERIFICATION_STEP_S * steps
    starts = [*check.asked_at.values(), now]
    assert min(b - a for a, b in pairwise(starts)) >= int(min(until / count, usual_s))


def test_an_execution_without_news_is_looked_at_seldom_and_news_of_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members tick every 50 ms; to look at a thousand drawn tasks each time would fill a core."""
    looks, advance = [], VerificationRounds.advance

    def count(*args: Any) -> list[cmd.Command]:
        looks.append(args)
        return advance(*args)

    monkeypatch.setattr(VerificationRounds, "advance", count)
    simulation = Quiet(tasks=1)
    execution_id = simulation.request(steps=STEPS, deadline_s=DEADLINE_S)
    assert simulation.run(DEADLINE_S, lambda: bool(simulation.asked))
    simulation.run(1.5)
    before, seconds = len(looks), 6
    simulation.run(seconds)
    often = 1 / tuning.SETTLEMENT_LOOK_S + 2  # and after each repetition of what was said
    assert 0 < len(looks) - before <= often * seconds * len(simulation.members)
    member, validator = next(iter(simulation.members.values())), simulation.asked[0][0]
    held = ValidatorCommitment(
        execution_id=execution_id, task=0, validator=validator, root="0x" + "11" * 32
    )
    key = simulation.by_node[validator].identity.signing_key_hex
    member.handle(ev.Tick(), simulation.now + 1.0)
    member.handle(ev.Tick(), simulation.now + 1.05)
    member.handle(ev.ReportReceived(held, key), simulation.now + 1.06)
    member.handle(ev.Tick(), simulation.now + 1.1)
    said = member.settlements.find_attestation(execution_id)
    assert said is not None and [one.root for one in said.attestation.held] == [held.root]
