from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.errors import InvalidInput
from splitup.protocol.selection import (
    EXECUTOR,
    VALIDATOR,
    compute_clock,
    compute_plan,
    neglog2_q32,
    rank,
    rank_validators,
)
from tests.builders import make_chain_manifest, make_request, make_snapshot


def seed(number: int) -> str:
    return f"0x{number:064x}"


@given(st.integers(0, 2**64 - 1))
def test_neglog2_is_the_logarithm(value: int) -> None:
    exact = 64 - math.log2(value + 1)
    assert 0 <= neglog2_q32(value) / 2**32 - exact < 1e-9 * max(1, exact) + 2**-31


def test_neglog2_vectors() -> None:
    """Shared with Solidity: powers of two are exact, the ends of the range are 64 and 0."""
    assert neglog2_q32(0) == 64 << 32
    assert neglog2_q32(2**63 - 1) == 1 << 32
    assert neglog2_q32(2**64 - 1) == 0
    with pytest.raises(InvalidInput):
        neglog2_q32(2**64)


def test_clock_depends_on_every_argument() -> None:
    node, other = "0x" + "1" * 40, "0x" + "2" * 40
    clocks = {
        compute_clock(seed(1), 0, EXECUTOR, node, 1000),
        compute_clock(seed(2), 0, EXECUTOR, node, 1000),
        compute_clock(seed(1), 1, EXECUTOR, node, 1000),
        compute_clock(seed(1), 0, VALIDATOR, node, 1000),
        compute_clock(seed(1), 0, EXECUTOR, other, 1000),
        compute_clock(seed(1), 0, EXECUTOR, node, 2000),
    }
    assert len(clocks) == 6


def chi_squared(observed: Counter[str], expected: dict[str, float]) -> float:
    return sum((observed[node] - mean) ** 2 / mean for node, mean in expected.items())


def test_shares_follow_weights() -> None:
    """Stakes 1 : 2 : 4 : 8 give shares 1 : 2 : 4 : 4, because stake is capped at four units."""
    stakes = {n: 10**9 * 2 ** (n - 1) for n in range(1, 5)}
    entries = make_snapshot(4, 1, stakes=stakes).entries
    draws = 4000
    wins = Counter(rank(seed(i), 0, EXECUTOR, entries)[0] for i in range(draws))
    weights = {entry.node: min(2**i, 4) for i, entry in enumerate(entries)}
    total = sum(weights.values())
    expected = {node: draws * weight / total for node, weight in weights.items()}
    assert chi_squared(wins, expected) < 16.27  # 3 degrees of freedom, p = 0.001


def test_a_slow_node_still_earns() -> None:
    entries = make_snapshot(4, 1, rtts={1: 10_000}).entries
    wins = Counter(rank(seed(i), 0, EXECUTOR, entries)[0] for i in range(2000))
    assert 0.04 < wins[entries[0].node] / 2000 < 0.12  # 1/4 against three ones: 1/13


def test_a22_splitting_a_stake_gains_nothing() -> None:
    """Two nodes of half the stake win as often as one of the whole stake (below the cap)."""
    whole = make_snapshot(3, 1, stakes={1: 2 * 10**9}).entries
    split = make_snapshot(4, 1).entries
    wins_whole = sum(rank(seed(i), 0, EXECUTOR, whole)[0] == whole[0].node for i in range(3000))
    mine = {split[0].node, split[1].node}
    wins_split = sum(rank(seed(i), 0, EXECUTOR, split)[0] in mine for i in range(3000))
    assert abs(wins_whole - wins_split) < 3000 * 0.04


def test_plan_names_only_holders_and_is_pure() -> None:
    manifest = make_chain_manifest(3)
    snapshot = make_snapshot(4, 3, resident={1: [0], 2: [0, 1], 3: [1, 2], 4: []})
    plan = compute_plan(make_request(), seed(5), snapshot, manifest)
    names = [entry.node for entry in snapshot.entries]
    assert [set(order) for order in plan.tasks] == [set(names[:2]), set(names[1:3]), {names[2]}]
    assert [entry.node for entry in plan.nodes] == names[:3]
    assert compute_plan(make_request(), seed(5), snapshot, manifest).root() == plan.root()
    assert compute_plan(make_request(), seed(6), snapshot, manifest).root() != plan.root()


def test_a_task_nobody_holds_is_named() -> None:
    snapshot = make_snapshot(2, 2, resident={1: [0], 2: [0]})
    with pytest.raises(InvalidInput, match="task 1"):
        compute_plan(make_request(), seed(1), snapshot, make_chain_manifest(2))


@given(number=st.integers(0, 2**64))
def test_a22_nobody_checks_its_own_work(number: int) -> None:
    manifest, live = make_chain_manifest(4), make_snapshot(6, 4)
    plan = compute_plan(make_request(), seed(number), live, manifest)
    executors = plan.executors()
    for task in range(4):
        validators = rank_validators(seed(number), task, plan, live, manifest)
        assert executors[task] not in validators
        assert len(validators) == len(set(validators)) == 5
        neighbours = {executors[t] for t in (task - 1, task + 1) if 0 <= t < 4} - {executors[task]}
        assert set(validators[len(validators) - len(neighbours) :]) == neighbours


def test_only_nodes_that_compute_the_same_bytes_check_each_other() -> None:
    """A GPU's honest result differs from a CPU's in the last bits: that must convict nobody."""
    classes = {1: "CUDA", 2: "CUDA", 3: "CUDA"}
    manifest, live = make_chain_manifest(8), make_snapshot(6, 8, classes=classes)
    plan = compute_plan(make_request(), seed(11), live, manifest)
    kind = {entry.node: entry.determinism for entry in live.entries}
    assert {kind[node] for node in plan.executors()} == {"CUDA", "CPU:X86"}
    for task, executor in enumerate(plan.executors()):
        validators = rank_validators(seed(12), task, plan, live, manifest)
        assert len(validators) == 2
        assert {kind[node] for node in validators} == {kind[executor]}


def test_a21_a_class_of_ones_own_earns_nothing_while_others_can_be_checked() -> None:
    lonely = make_snapshot(5, 1, classes={1: "mine alone", 2: "ours", 3: "ours"})
    pair_and_one = make_snapshot(3, 1, classes={1: "mine alone"})
    manifest = make_chain_manifest(1)
    everybody = {entry.node for entry in pair_and_one.entries}
    for number in range(50):
        plan = compute_plan(make_request(), seed(number), lonely, manifest)
        assert set(plan.tasks[0]) == {
            entry.node for entry in lonely.entries
        }  # 1, 2 and 2: none can
        plan = compute_plan(make_request(), seed(number), pair_and_one, manifest)
        assert set(plan.tasks[0]) == everybody
        six = make_snapshot(6, 1, classes={1: "mine alone", 2: "ours", 3: "ours"})
        plan = compute_plan(make_request(), seed(number), six, manifest)
        assert set(plan.tasks[0]) == {entry.node for entry in six.entries[3:]}
