"""Stakes and operators decide who may run and who may check a task (``simulator``)."""

from __future__ import annotations

from collections import Counter

import pytest

from splitup.core import limits
from splitup.protocol.planning.exposure import compute_penalty
from tests.builders import make_chain_manifest
from tests.parameters import some_of
from tests.protocol.simulator import (
    VERIFY_ALL,
    VERIFY_NONE,
    Simulation,
    settle,
    start,
)

# of one task over four steps: what it exposes, and how much stake covers that n times
TASK = make_chain_manifest(1).tasks[0]
EXPOSURE = compute_penalty(TASK, 4, VERIFY_NONE) + limits.EXPOSURE_FLOOR_MICRO_USDC


def cover(count: int) -> int:
    return limits.VALIDATION_RESERVE_MICRO_USDC + count * EXPOSURE


def refresh(simulation: Simulation) -> None:
    """Wait for a snapshot that knows the registry as it is."""
    simulation.run(6)
    before = simulation.chain.sequence
    assert simulation.run(
        limits.SNAPSHOT_REFRESH_S + 10, lambda: simulation.chain.sequence > before
    )


def test_no_plan_asks_for_more_than_the_free_stakes() -> None:
    """A few executions fill the stakes; each plan goes where something is left.

    Nobody commits, so that the chain locks nothing: what the plans expose counts all the same.
    """
    simulation = start(economics=VERIFY_NONE, nodes=4, tasks=2)
    for node in simulation.nodes:
        node.stake_micro_usdc = cover(4)
        node.plans = _Everything()  # type: ignore[assignment]
    refresh(simulation)
    for number in range(1, 5):
        execution_id = simulation.request(number, steps=4, deadline_s=3_600)
        simulation.run(
            10, lambda e=execution_id: e in simulation.chain.plans or _is_refused(simulation, e)
        )
        refresh(simulation)
    assert len(simulation.chain.plans) >= 3
    planned: Counter[str] = Counter()
    for execution_id in simulation.chain.plans:
        certificate = next(iter(simulation.certificates[execution_id].values()))
        planned.update(dict(certificate.plan.exposures()))
    assert planned.total() <= len(simulation.chain.plans) * 2 * EXPOSURE  # F once per node
    assert max(planned.values()) <= 4 * EXPOSURE
    assert not simulation.chain.locked


def test_a_commitment_waits_until_stake_is_free() -> None:
    """Two plans of one snapshot expose a node beyond its stake: the second waits for the first."""
    simulation = start(economics=VERIFY_NONE, nodes=4, tasks=2)
    for node in simulation.nodes:
        node.stake_micro_usdc = cover(2)
    ids = [simulation.request(number, steps=4) for number in range(1, 9)]
    settle(simulation, *ids, within_s=200)
    assert simulation.chain.rejected["ExposureTooHigh"]
    assert not +simulation.chain.locked


def test_what_no_stake_covers_is_refused_at_once() -> None:
    simulation = start(economics=VERIFY_NONE, nodes=4, tasks=2)
    for node in simulation.nodes:
        node.stake_micro_usdc = cover(1) - 1
    refresh(simulation)
    execution_id = simulation.request(steps=4)
    simulation.run(10)
    assert _is_refused(simulation, execution_id)
    assert not simulation.chain.plans and not simulation.chain.rejected


@pytest.mark.parametrize("seed", some_of(range(3), 0))
def test_a22_nodes_of_one_operator_never_check_each_other(seed: int) -> None:
    """Of six nodes three are one operator's: what they run, others check."""
    simulation = start(seed, economics=VERIFY_ALL, nodes=6, tasks=3)
    family = {node.address for node in simulation.nodes[:3]}
    for node in simulation.nodes[:3]:
        node.operator = "0x" + "0f" * 20
    refresh(simulation)
    ids = [simulation.request(number) for number in range(1, 5)]
    settle(simulation, *ids)
    assert simulation.orders
    by_family = 0
    for order in simulation.orders:
        executor = order.certificate.plan.executors()[order.task]
        by_family += executor in family
        for task, validator in simulation.verified_by(order.draw.execution_id):
            runs = order.certificate.plan.executors()[task]
            assert not {runs, validator} <= family, "an operator checked itself"
    assert by_family, "the seed shows nothing"


class _Everything(dict[str, object]):
    """A node that has every plan already: it runs none."""

    def __contains__(self, key: object) -> bool:
        return True


def _is_refused(simulation: Simulation, execution_id: str) -> bool:
    return all(
        "free stake" in m.plans.find_refusal(execution_id) for m in simulation.members.values()
    )
