from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.messages.plans import TaskTerms
from splitup.messages.snapshots import UNRULED, Reference, SnapshotEntry
from splitup.protocol.planning.challenges import find_wrong_choice
from splitup.protocol.planning.sampling_clocks import (
    EXECUTOR,
    VALIDATOR,
    compute_eta_ms,
    compute_fairness_milli,
    compute_reference_ms,
    neglog2_q32,
)
from splitup.protocol.planning.selection import (
    COLUMN_VALUES,
    CandidatePool,
    Index,
    compute_plan,
    compute_terms,
    compute_weights,
    neglog2_q32_of,
    rank,
    rank_validators,
)
from splitup.protocol.snapshots.snapshot_rules import compute_credits
from tests.builders import (
    FOREIGN_CLASS,
    NO_TERMS,
    address,
    make_chain_manifest,
    make_request,
    make_snapshot,
    make_tolerant,
    rank_all,
    task_id,
)
from tests.protocol.planning.exact_weights import compute_clock, compute_weight


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
    snapshot = make_snapshot(4, 1, stakes=stakes)
    entries = snapshot.entries
    draws = 2_000
    wins = Counter(rank_all(seed(i), 0, EXECUTOR, snapshot)[0] for i in range(draws))
    weights = {entry.node: min(2**i, 4) for i, entry in enumerate(entries)}
    total = sum(weights.values())
    expected = {node: draws * weight / total for node, weight in weights.items()}
    assert chi_squared(wins, expected) < 16.27  # 3 degrees of freedom, p = 0.001


def test_a_slow_node_still_earns() -> None:
    snapshot = make_snapshot(4, 1, rtts={1: 10_000})
    entries = snapshot.entries
    wins = Counter(rank_all(seed(i), 0, EXECUTOR, snapshot)[0] for i in range(1_000))
    assert 0.04 < wins[entries[0].node] / 1_000 < 0.12  # 1/4 against three ones: 1/13


def test_a22_splitting_a_stake_gains_nothing() -> None:
    """Two nodes of half the stake win as often as one of the whole stake (below the cap)."""
    whole, split = make_snapshot(3, 1, stakes={1: 2 * 10**9}), make_snapshot(4, 1)
    wins_whole = sum(rank_all(seed(i), 0, EXECUTOR, whole)[0] == address(1) for i in range(1_000))
    mine = {address(1), address(2)}
    wins_split = sum(rank_all(seed(i), 0, EXECUTOR, split)[0] in mine for i in range(1_000))
    assert abs(wins_whole - wins_split) < 1_000 * 0.06


def test_a22_beyond_the_cap_nodes_earn_by_their_stakes() -> None:
    """Sixteen units beside 4: one node weighs as much as the other, sixteen nodes weigh 16."""
    for snapshot, share in (
        (make_snapshot(2, 1, stakes={1: 16 * 10**9, 2: 4 * 10**9}), 1 / 2),
        (make_snapshot(17, 1, stakes={17: 4 * 10**9}), 16 / 20),
    ):
        reference = snapshot.once(Index).reference
        *mine, other = (compute_weight(entry, NO_TERMS, reference) for entry in snapshot.entries)
        assert sum(mine) / (sum(mine) + other) == pytest.approx(share)


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


# ---- operators -----------------------------------------------------------------------------------


@given(number=st.integers(0, 2**64))
def test_a22_an_operator_never_checks_itself(number: int) -> None:
    operators = {n: 100 + n % 4 for n in range(1, 13)}  # four operators of three nodes each
    manifest, live = make_chain_manifest(3), make_snapshot(12, 3, operators=operators)
    plan = compute_plan(make_request(), seed(number), live, manifest)
    run_by = {entry.node: entry.operator for entry in live.entries}
    for task, executor in enumerate(plan.executors()):
        judges = [
            run_by[node] for node in rank_validators(seed(number), task, plan, live, manifest)
        ]
        assert run_by[executor] not in judges
        assert len(judges) == len(set(judges)) == 3, "two nodes of one operator judge together"
        neighbours = {run_by[plan.executors()[t]] for t in (task - 1, task + 1) if 0 <= t < 3}
        last = neighbours - {run_by[executor]}
        assert set(judges[len(judges) - len(last) :]) == last


def test_a22_a_task_of_too_few_operators_is_not_sold_as_verifiable() -> None:
    """Three nodes hold it, but two of them are one operator's."""
    operators = {1: 7, 2: 7}
    manifest = make_chain_manifest(1)
    plan = compute_plan(make_request(), seed(1), make_snapshot(3, 1, operators=operators), manifest)
    assert plan.unverifiable == (0,)
    plan = compute_plan(make_request(), seed(1), make_snapshot(4, 1, operators=operators), manifest)
    assert plan.unverifiable == ()


def test_a_task_with_a_tolerance_is_verifiable_where_no_member_computes() -> None:
    """Members compare its numbers with their own, whoever runs it."""
    manifest = make_chain_manifest(1)
    snapshot = make_snapshot(4, 1, classes=dict.fromkeys(range(1, 5), UNRULED + FOREIGN_CLASS))
    assert compute_plan(make_request(), seed(1), snapshot, manifest).unverifiable == (0,)
    tolerant = make_tolerant(manifest)
    assert compute_plan(make_request(), seed(1), snapshot, tolerant).unverifiable == ()


@pytest.mark.parametrize(
    ("marked", "is_tolerant", "expected"),
    [
        (3, True, {"CPU:X86", UNRULED + FOREIGN_CLASS}),
        (3, False, {"CPU:X86"}),
        (2, True, {"CPU:X86"}),
    ],
)
def test_a21_three_stakes_cannot_take_all_work_from_another_class(
    marked: int, is_tolerant: bool, expected: set[str]
) -> None:
    """Nodes of a marked class share the work of a task with tolerances, if three operators do."""
    numbers = range(4, 4 + marked)
    snapshot = make_snapshot(3 + marked, 1, classes=dict.fromkeys(numbers, UNRULED + FOREIGN_CLASS))
    kind = {entry.node: entry.determinism for entry in snapshot.entries}
    manifest = make_chain_manifest(1)
    if is_tolerant:
        manifest = make_tolerant(manifest)
    wins: Counter[str] = Counter()
    for number in range(100):
        plan = compute_plan(make_request(), seed(number), snapshot, manifest)
        assert {kind[node] for node in plan.tasks[0]} == expected
        assert plan.unverifiable == ()
        assert find_wrong_choice(plan, snapshot) is None
        (executor,) = plan.executors()
        wins[kind[executor]] += 1
        judges = rank_validators(seed(number), 0, plan, snapshot, manifest)
        assert len(judges) == 2
        assert {kind[node] for node in judges} == {kind[executor]}
    assert set(wins) == expected
    assert min(wins.values()) >= 100 / len(expected) - 20  # four standard deviations


def test_a22_sybils_cannot_make_a_class_of_their_own() -> None:
    """Five nodes of one operator share a class; three of three operators share another."""
    classes = dict.fromkeys(range(1, 6), "mine")
    operators = dict.fromkeys(range(1, 6), 99)
    snapshot = make_snapshot(8, 1, classes=classes, operators=operators)
    for number in range(20):
        plan = compute_plan(make_request(), seed(number), snapshot, make_chain_manifest(1))
        assert set(plan.tasks[0]) == {address(6), address(7), address(8)}


# ---- measured times ------------------------------------------------------------------------------

TASK = TaskTerms(
    task_id=task_id(0),
    flops=10**9,
    weights_bytes=8 * 10**9,
    input_bytes=10**6,
    ready_ms=0,
    crosses_classes=False,
)
REFERENCE = Reference(rtt_ms=10, queue_ms=0, speed_mflops=10_000, bandwidth_kbps=100_000)


def eta(
    terms: TaskTerms = TASK,
    *,
    queue_ms: int = 0,
    speed: int = 10_000,
    bandwidth: int = 100_000,
    is_resident: bool = True,
) -> int:
    node = Reference(10, queue_ms, speed, bandwidth)
    return compute_eta_ms(terms, REFERENCE, node, is_resident=is_resident)


def test_an_eta_adds_queue_load_transfer_and_compute() -> None:
    assert eta() == 1 + 10 + 10 + 100  # 10^6 bytes at 10^5 a ms, 10^9 operations at 10^7 a ms
    assert eta(queue_ms=70) == eta() + 70
    assert eta(is_resident=False) == eta() + 80_000
    assert eta(speed=0, bandwidth=0) == eta(), "unmeasured counts as the reference"
    assert compute_reference_ms(TASK, REFERENCE) == eta()


def test_waiting_is_free_while_the_tasks_before_run() -> None:
    later = TASK.model_copy(update={"ready_ms": 50})
    assert eta(later, queue_ms=50) == eta()
    assert eta(later, queue_ms=70) == eta() + 20


def test_the_critical_path_is_that_of_reference_nodes() -> None:
    terms = compute_terms(make_chain_manifest(3), Reference(10, 5, 0, 0))
    assert [found.ready_ms for found in terms] == [0, 11, 22]


def test_fairness_runs_from_a_quarter_to_four() -> None:
    bound = limits.MAX_CREDIT_MILLI
    factors = [compute_fairness_milli(credit) for credit in range(-bound, bound + 1, 100)]
    assert (factors[0], factors[bound // 100], factors[-1]) == (250, 1000, 4000)
    assert all(a <= b for a, b in pairwise(factors))


# ---- whole plans at once are the same integers ---------------------------------------------------

counts = st.integers(0, 2**53 - 1) | st.integers(0, 1000)
figures = st.fixed_dictionaries(
    {
        "stake_micro_usdc": counts | st.integers(10**9, 5 * 10**9),
        "rtt_ms": counts,
        "queue_ms": counts,
        "speed_mflops": counts,
        "bandwidth_kbps": counts,
        "credit_milli": st.integers(-limits.MAX_CREDIT_MILLI, limits.MAX_CREDIT_MILLI),
        "is_resident": st.booleans(),
    }
)
terms_of_all_sizes = st.builds(
    lambda flops, weights, inputs, ready: TaskTerms(
        task_id=task_id(0),
        flops=flops,
        weights_bytes=weights,
        input_bytes=inputs,
        ready_ms=ready,
        crosses_classes=False,
    ),
    *[counts] * 4,
)


def make_entry(number: int, drawn: dict[str, int]) -> SnapshotEntry:
    rest = {name: value for name, value in drawn.items() if name != "is_resident"}
    return SnapshotEntry(
        node=address(number),
        signing_key=seed(number),
        endpoint="http://n",
        resident=(task_id(0),) if drawn["is_resident"] else (),
        determinism="",
        **rest,
    )


@given(st.lists(figures, min_size=1, max_size=6), terms_of_all_sizes, st.integers(0, 2**64))
def test_columns_give_the_weights_and_clocks_of_single_nodes(
    drawn: list[dict[str, int]], terms: TaskTerms, number: int
) -> None:
    entries = tuple(make_entry(n, values) for n, values in enumerate(drawn, start=1))
    snapshot = make_snapshot(0, 0).model_copy(update={"entries": entries})
    index = snapshot.once(Index)
    for is_resident in (True, False):
        rows = np.array(
            [r for r, values in enumerate(drawn) if values["is_resident"] == is_resident], np.int64
        )
        if not len(rows):
            continue
        pool = CandidatePool(3, terms, rows, is_resident)
        weights = compute_weights([pool], np.zeros(len(rows), np.int64), rows, index)
        exact = [compute_weight(entries[row], terms, index.reference) for row in rows]
        assert weights.tolist() == exact
        clocks = sorted(
            (compute_clock(seed(number), 3, VALIDATOR, entries[row].node, weight), row)
            for row, weight in zip(rows, exact, strict=True)
        )
        assert rank(seed(number), VALIDATOR, [pool], index) == [[row for _, row in clocks]]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_many_logarithms_are_the_single_ones(values: list[int]) -> None:
    values += [0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    values *= -(-COLUMN_VALUES // len(values))
    found = neglog2_q32_of(np.array(values, np.uint64))
    assert found.tolist() == [neglog2_q32(value) for value in values]


def test_equal_clocks_go_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_snapshot(5, 1)
    monkeypatch.setattr(
        "splitup.protocol.planning.selection._draw", lambda *_: np.full(5, 2**40, np.uint64)
    )
    assert rank_all(seed(1), 0, EXECUTOR, snapshot) == [entry.node for entry in snapshot.entries]


draws = st.one_of(  # the ends of the range, where a logarithm has few bits, and close neighbours
    st.integers(0, 2**64 - 1),
    st.integers(0, 4),
    st.integers(2**64 - 4_100, 2**64 - 1),
    st.integers(2**63 - 3, 2**63 + 3),
)


@given(
    st.lists(
        st.lists(st.tuples(draws, st.integers(1, 2**40)), max_size=20), min_size=1, max_size=4
    ),
    st.integers(1, 8),
)
def test_a_limit_gives_the_first_of_the_whole_order(
    pools_drawn: list[list[tuple[int, int]]], limit: int
) -> None:
    flat = [one for pool in pools_drawn for one in pool]
    index = make_snapshot(20, 1).once(Index)
    pools = [
        CandidatePool(number, NO_TERMS, np.arange(len(pool), dtype=np.int64))
        for number, pool in enumerate(pools_drawn)
    ]
    values = np.array([value for value, _ in flat], np.uint64)
    weights = np.array([weight for _, weight in flat], np.int64)
    module = "splitup.protocol.planning.selection"
    with (
        patch(f"{module}._draw", lambda *_: values),
        patch(f"{module}.compute_weights", lambda *_: weights),
    ):
        whole = rank(seed(1), EXECUTOR, pools, index)
        assert rank(seed(1), EXECUTOR, pools, index, limit) == [order[:limit] for order in whole]


# ---- tasks that nobody holds ---------------------------------------------------------------------


def test_a_task_nobody_holds_goes_to_nodes_that_can_load_it() -> None:
    figures = {2: {"vram_free_bytes": 1000}, 3: {"vram_free_bytes": 999}}
    resident: dict[int, list[int]] = {1: [], 2: [], 3: []}
    snapshot = make_snapshot(3, 1, resident=resident, figures=figures)
    plan = compute_plan(make_request(), seed(1), snapshot, make_chain_manifest(1))
    assert plan.tasks == ((address(2),),)
    assert plan.unverifiable == (0,)


# ---- fairness ------------------------------------------------------------------------------------


def test_credit_is_owed_to_whoever_got_less_than_its_share() -> None:
    stakes = {"a": 10**9, "b": 10**9, "c": 2 * 10**9}
    credits = compute_credits(stakes, {}, {"a": 200, "c": 200})
    assert credits == {"a": -1000, "b": 1000, "c": 0}
    assert compute_credits(stakes, credits, {}) == credits, "no work, no debt"
    again = compute_credits(stakes, credits, {"a": 100, "b": 100, "c": 200})
    assert again == {"a": -875, "b": 875, "c": 0}


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**12)), max_size=30))
def test_credit_is_bounded_whatever_is_assigned(rounds: list[dict[str, int]]) -> None:
    stakes, credits = {"a": 10**9, "b": 10**9, "c": 0}, dict[str, int]()
    for assigned in rounds:
        credits = compute_credits(stakes, credits, assigned)
        assert all(abs(credit) <= limits.MAX_CREDIT_MILLI for credit in credits.values())


def find_longest_wait(*, is_fair: bool) -> int:
    """Return the most snapshots in a row, of 400 with 12 tasks, that a node gets no work of."""
    stakes = {n: 10**9 for n in range(1, 9)} | {9: 4 * 10**9, 10: 2 * 10**9}
    credits, waits, longest = dict[str, int](), Counter[str](), 0
    for number in range(400):
        owed = {n: credits.get(address(n), 0) * is_fair for n in stakes}
        snapshot = make_snapshot(
            10,
            0,
            stakes=stakes,
            rtts={9: 9, 1: 999},
            figures={n: {"credit_milli": owed[n]} for n in owed},
        )
        pools = [CandidatePool(task, NO_TERMS, np.arange(10)) for task in range(12)]
        rows = rank(seed(number), EXECUTOR, pools, snapshot.once(Index), 1)
        won = Counter(snapshot.entries[order[0]].node for order in rows)
        credits = dict(compute_credits({address(n): stakes[n] for n in stakes}, credits, won))
        for entry in snapshot.entries:
            waits[entry.node] = 0 if won[entry.node] else waits[entry.node] + 1
        longest = max(longest, *waits.values())
    return longest


def test_credit_halves_the_longest_wait() -> None:
    assert find_longest_wait(is_fair=True) < find_longest_wait(is_fair=False) / 2


def test_the_least_weight_is_one() -> None:
    entry = make_snapshot(1, 1, stakes={1: 0}).entries[0]
    assert compute_weight(entry, NO_TERMS, Reference(0, 0, 0, 0)) == 1
