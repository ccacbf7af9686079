"""What members' looks at many numbers of steps cost, to which nodes commit (ADR 21)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from splitup.core import limits, tuning
from splitup.messages.completions import ExecutorCommitment
from splitup.messages.plans import Plan
from splitup.protocol.execution.ends import make_count
from splitup.protocol.settlement.collected_commitments import CollectedCommitments, HeldCommitment
from splitup.protocol.settlement.settlement_state import SettlementState
from tests.builders import address
from tests.protocol.settlement.test_steps import STEPS
from tests.protocol.settlement.unended import DEADLINE_S, count, open_execution


class CountedPrices(list[int]):
    looked_up = 0

    def __getitem__(self, task: Any) -> Any:
        self.looked_up += 1
        return super().__getitem__(task)


def collect_counts(plan: Plan, starts: dict[str, list[int]]) -> CollectedCommitments:
    """Return counts of nodes: of 64 steps each, from ``starts`` on."""
    name, collected = plan.request.execution_id, CollectedCommitments()
    for node, highest in starts.items():
        for steps in highest:
            counted = ExecutorCommitment(
                execution_id=name,
                node=node,
                root="0x" + "a" * 64,
                end=make_count(name, steps),
                earlier=("0x" + "b" * 64,) * (limits.UNPAID_STEPS - 1),
            )
            collected.add_counted(counted, f"{node}.{steps}", plan)
    return collected


def make_wide_plan(nodes: int, tasks: int) -> Any:
    names = [address(1 + number) for number in range(nodes)]
    executors = tuple(names[task % nodes] for task in range(tasks))
    request = SimpleNamespace(execution_id="0x" + "ee" * 32, steps=limits.MAX_STEPS)
    return SimpleNamespace(
        request=request,
        places=(),
        tasks=tuple((node,) for node in executors),
        executors=lambda: executors,
    )


def test_s80_hundreds_of_numbers_cost_no_more_than_the_messages_that_name_them() -> None:
    """Members looked at all 1,024 tasks for each of 512 numbers that one node counted: 0.4 s."""
    plan = make_wide_plan(nodes=4, tasks=limits.MAX_TASKS)
    starts = {
        node: [64 * (8 * place + number + 1) for number in range(limits.MAX_ENDS)]
        for place, node in enumerate(dict.fromkeys(plan.executors()))
    }
    prices = CountedPrices([1] * limits.MAX_TASKS)
    found = list(collect_counts(plan, starts).sum_prices(plan, prices, [0]))
    assert len(found) == 4 * limits.MAX_ENDS * limits.UNPAID_STEPS
    assert {covered for _, covered, _ in found} == {limits.MAX_TASKS // 4}
    assert prices.looked_up <= 2 * limits.MAX_ENDS * limits.MAX_TASKS


@pytest.mark.parametrize("seed", range(20))
def test_prices_of_all_numbers_are_those_of_the_executors_at_each(seed: int) -> None:
    rng, plan = random.Random(seed), make_wide_plan(nodes=3, tasks=7)
    nodes = list(dict.fromkeys(plan.executors()))
    starts = {node: rng.sample(range(64, 200), rng.randint(0, 3)) for node in nodes}
    collected = collect_counts(plan, starts)
    for node in nodes:  # some for an end, of which some contradict each other
        taken = frozenset([(rng.randrange(7), 0)])
        for steps in rng.sample(range(40, 200), 3):
            roots = rng.choice([{}, {steps: "0x" + "c" * 64}])
            held = HeldCommitment(roots, ("",), taken, False)
            collected.by_node.setdefault(node, {})[steps] = held
    prices, expected = [rng.randint(1, 9) for _ in range(7)], {}
    for steps in range(200):
        here = collected.list_commitments(steps)
        named = {task for task, _ in collected.list_taken(steps, here)}
        done = named | {task for task, node in enumerate(plan.executors()) if node in here}
        if here:
            expected[steps] = sum(prices[task] for task in done), 0 in done
    found = {steps: rest for steps, *rest in collected.sum_prices(plan, prices, [0])}
    assert {steps: tuple(rest) for steps, rest in found.items()} == expected


def test_s80_commitments_near_the_deadline_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation, _, plan = open_execution()
    assert not simulation.run(DEADLINE_S - tuning.AGREE_MARGIN_S + 1, lambda: False)
    looks = []
    find = SettlementState.find_agreement
    monkeypatch.setattr(
        SettlementState,
        "find_agreement",
        lambda *args: looks.append(1) or find(*args),  # type: ignore[func-returns-value]
    )
    account = next(iter(simulation.members))
    for steps in range(1, STEPS + 1):
        for task in range(3):
            count(simulation, plan, task, steps, to=[account])
    assert not looks
    simulation.run(1)
    assert looks
