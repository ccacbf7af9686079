"""The dynamic programme against trying every cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splitup_deploy.cutting.partition import (
    Balance,
    Region,
    TargetTooSmall,
    find_regions,
    partition,
)
from splitup_deploy.cutting.task_graphs import cut_graph, name_tasks
from splitup_deploy.cutting.timing import Clock, predict_transfer_ps

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.graph.cost import compute_vram_bytes
from splitup.graph.ir import Graph
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A chain of values with skips; some have a weight, some share one, some keep a state."""
    b = Builder()
    made = [b.store("float32", b.input("x", "float32", 64))]
    sizes, shared, updates = [64], None, []
    for index in range(draw(st.integers(1, 6))):
        size = draw(st.sampled_from([64, 128, 256]))
        value = b.add("SHRINK", "float32", made[-1], arg=((0, 1),))
        if draw(st.booleans()):
            skip = b.add("SHRINK", "float32", made[draw(st.integers(0, index))], arg=((0, 1),))
            value = b.add("ADD", "float32", value, skip)
        kind = draw(st.sampled_from(["weight", "shared", "state", "none"]))
        if kind == "weight":
            weight = b.weight(f"w{index}", np.full(size, index, np.float32))
            value = b.add("MUL", "float32", value, weight)
        elif kind == "shared":
            if shared is None:
                shared = b.weight("shared", np.ones(256, np.float32))
            part = b.add("SHRINK", "float32", shared, arg=((0, size),))
            value = b.add("MUL", "float32", value, part)
        elif kind == "state":
            old = b.state(f"s{index}", "float32", size)
            value = b.add("ADD", "float32", value, old)
        else:
            grown = b.add("EXPAND", "float32", value, arg=(size,))
            value = b.add("RESHAPE", "float32", grown, arg=(size,))
        made.append(b.store("float32", value))
        sizes.append(size)
        if kind == "state":
            updates.append(made[-1])
    return b.graph({"y": made[-1]}, updates)


@dataclass(frozen=True)
class Cut:
    """What one way to cut costs, measured on its tasks."""

    tasks: int
    moved: int
    longest: int  # of the tasks' times
    period: int
    squares: int

    def rank(self, balance: Balance) -> tuple[int, ...]:
        if balance == "latency":
            return (self.tasks, self.moved, self.longest, self.squares)
        return (self.period, self.tasks, self.moved, self.squares)


def measure(graph: Graph, parts: list[list[Region]], *targets: int) -> Cut | None:
    """Return the costs of a way to cut; None when it is not legal.

    Several targets take turns; a region that is an atom may go to the largest.
    """
    graph = check_graph(graph)
    clock = Clock(graph)
    tasks = cut_graph(graph, parts)
    assert sorted(r.root for part in parts for r in part) == [
        region.root for region in find_regions(graph, {})
    ]
    try:
        sizes = [compute_vram_bytes(t.graph) for t in tasks]
    except InvalidModel:
        return None  # a state's update is in one task, its reading in another
    for turn, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        if size > (targets[-1] if len(part) == 1 else targets[turn % len(targets)]):
            return None
    moved = [
        sum(
            spec.nbytes
            for spec, source in zip(task.graph.inputs, task.sources, strict=True)
            if not isinstance(source, str)
        )
        for task in tasks
    ]
    for index, task in enumerate(tasks):  # acyclic: only earlier tasks are read
        assert all(isinstance(s, str) or s[0] < index for s in task.sources)
    times = [sum(clock.predict_ps(r.root, r.nodes) for r in part) for part in parts]
    periods = [max(t, predict_transfer_ps(n)) for t, n in zip(times, moved, strict=True)]
    squares = sum(time**2 for time in times)
    return Cut(len(parts), sum(moved), max(times), max(periods), squares)


def list_cuts(graph: Graph, target: int | tuple[int, ...], most: int) -> list[Cut]:
    """Return the costs of every legal way to cut the order of regions."""
    regions = find_regions(graph, {})
    targets = (target,) if isinstance(target, int) else target
    results = []
    for count in range(min(len(regions), most)):
        for cuts in combinations(range(1, len(regions)), count):
            parts = [regions[a:b] for a, b in pairwise([0, *cuts, len(regions)])]
            if (cut := measure(graph, parts, *targets)) is not None:
                results.append(cut)
    return results


@settings(max_examples=15, deadline=None)
@given(
    graphs(),
    st.integers(1, 24),
    st.sampled_from(["latency", "throughput"]),
    st.none() | st.integers(1, 8),
)
def test_the_best_cut_is_found(
    graph: Graph, quarters: int, balance: Balance, max_tasks: int | None
) -> None:
    target = 512 * quarters
    every = list_cuts(graph, target, 8 if max_tasks is None else max_tasks)
    graph = check_graph(graph)
    try:
        parts = partition(graph, {}, target, balance=balance, max_tasks=max_tasks)
    except InvalidModel as error:
        assert not every and ("needs" in str(error) or "are allowed" in str(error))
        return
    if balance == "throughput" and max_tasks is None:
        fewest = min(cut.tasks for cut in every)
        every = [cut for cut in every if cut.tasks == fewest]
    found = measure(graph, parts, target)
    assert found is not None
    assert found.rank(balance) == min(cut.rank(balance) for cut in every)


def make_uneven(weights: list[int], sizes: list[int]) -> Graph:
    """Return a chain; every value adds up a weight and is as large as is given, in elements."""
    b = Builder()
    made = b.store("float32", b.input("x", "float32", 64))
    for index, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        table = b.weight(f"w{index}", np.full(weight, index, np.float32))
        total = b.add("REDUCE", "float32", table, arg=("ADD", 1))
        first = b.add("SHRINK", "float32", made, arg=((0, 1),))
        value = b.add("ADD", "float32", first, total)
        grown = b.add("EXPAND", "float32", value, arg=(size,))
        made = b.store("float32", b.add("RESHAPE", "float32", grown, arg=(size,)))
    return b.graph({"y": made})


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    """A chain in which what a value weighs, how long it takes and what it moves are unrelated."""
    count = draw(st.integers(4, 6))
    weights = [draw(st.sampled_from([64, 256, 512, 1024])) for _ in range(count)]
    return make_uneven(weights, [draw(st.sampled_from([64, 128, 192, 256])) for _ in range(count)])


@settings(max_examples=15, deadline=None)
@given(chains(), st.integers(40, 90), st.sampled_from(["latency", "throughput"]))
def test_every_criterion_decides(graph: Graph, percent: int, balance: Balance) -> None:
    """Targets of a part of the whole leave several cuts to choose from."""
    graph = check_graph(graph)
    target = compute_vram_bytes(graph) * percent // 100
    every = list_cuts(graph, target, 8)
    if not every:
        return
    fewest = min(cut.tasks for cut in every)
    every = [cut for cut in every if cut.tasks == fewest]
    parts = partition(graph, {}, target, balance=balance)
    found = measure(graph, parts, target)
    assert found is not None
    assert found.rank(balance) == min(cut.rank(balance) for cut in every)


@pytest.mark.long  # in small: test_every_kind_of_card_of_a_fleet_finds_work
@settings(max_examples=30, deadline=None)
@given(
    chains(),
    st.lists(st.integers(25, 90), min_size=2, max_size=3, unique=True),
    st.sampled_from(["latency", "throughput"]),
    st.none() | st.integers(2, 6),
)
def test_cards_of_a_mixed_fleet_take_turns(
    graph: Graph, percents: list[int], balance: Balance, max_tasks: int | None
) -> None:
    graph = check_graph(graph)
    whole = compute_vram_bytes(graph)
    targets = tuple(sorted(whole * percent // 100 for percent in percents))
    every = list_cuts(graph, targets, 8 if max_tasks is None else max_tasks)
    try:
        parts = partition(graph, {}, targets[::-1], balance=balance, max_tasks=max_tasks)
    except InvalidModel as error:
        assert not every and ("needs" in str(error) or "are allowed" in str(error))
        return
    if balance == "latency" or max_tasks is None:
        fewest = min(cut.tasks for cut in every)
        every = [cut for cut in every if cut.tasks == fewest]
    found = measure(graph, parts, *targets)
    assert found is not None
    assert found.rank(balance) == min(cut.rank(balance) for cut in every)


def test_the_longest_task_comes_before_evenness() -> None:
    """Shortest longest task: 3584, 3584, 2048; most even: 2560, 2560, 4096 elements."""
    b = Builder()
    made = b.store("float32", b.input("x", "float32", 64))
    for index, heavy in enumerate([2048, 512, 1024, 1536, 2048, 2048]):
        weight = b.weight(f"w{index}", np.full(heavy, index, np.float32))
        total = b.add("REDUCE", "float32", weight, arg=("ADD", 1))
        made = b.store("float32", b.add("ADD", "float32", made, total))
    graph = b.graph({"y": made})
    target = 4 * 4600  # two tasks would need 5120 elements
    every = list_cuts(graph, target, 3)
    assert {cut.tasks for cut in every} == {3} and len({cut.moved for cut in every}) == 1
    best = min(every, key=lambda cut: (cut.longest, cut.squares))
    even = min(every, key=lambda cut: cut.squares)
    assert even.longest > best.longest  # the two criteria disagree here
    found = measure(graph, partition(check_graph(graph), {}, target), target)
    assert found == best


def test_the_fewest_bytes_come_before_the_longest_task() -> None:
    """And all beginnings of the best cut count: the first of its two cuts, too."""
    graph = make_uneven([2048, 256, 1024, 2048, 512, 2048], [192, 256, 192, 64, 256, 128])
    target = 17_024
    every = list_cuts(graph, target, 3)
    assert {cut.tasks for cut in every} == {3} and len({cut.moved for cut in every}) > 2
    best = min(every, key=lambda cut: (cut.moved, cut.longest, cut.squares))
    assert min(cut.longest for cut in every) < best.longest  # the two criteria disagree here
    assert measure(graph, partition(check_graph(graph), {}, target), target) == best


def test_a_part_of_a_legal_task_may_be_illegal() -> None:
    """What a part reads is an input, which takes memory all the time; inside it could go."""
    b = Builder()
    made = b.store("float32", b.input("x", "float32", 1))
    for _ in range(2):
        grown = b.add("EXPAND", "float32", made, arg=(1024, 1))
        wide = b.store("float32", grown)
        made = b.store("float32", b.add("REDUCE", "float32", wide, arg=("ADD", 1)))
    graph = b.graph({"y": made})
    graph, regions = check_graph(graph), find_regions(graph, {})
    whole = compute_vram_bytes(graph)
    _, part = cut_graph(graph, [regions[:2], regions[2:]])
    assert compute_vram_bytes(part.graph) > whole
    assert len(partition(graph, {}, whole)) == 1


def test_borders_begin_tasks() -> None:
    graph = make_chain()
    roots = [region.root for region in find_regions(graph, {})]
    parts = partition(check_graph(graph), {}, 10**6, borders={roots[2], roots[3]})
    assert [[region.root for region in part] for part in parts] == [
        roots[:2],
        roots[2:3],
        roots[3:],
    ]


def test_too_many_tasks() -> None:
    graph = make_chain()
    with pytest.raises(TargetTooSmall, match=r"gives at least 4 tasks; 3 are allowed") as caught:
        partition(check_graph(graph), {}, 1024, max_tasks=3)
    assert "--max-tasks" in caught.value.remedy


def make_chain() -> Graph:
    b = Builder()
    x = b.store("float32", b.input("x", "float32", 64))
    for index in range(4):
        w = b.weight(f"w{index}", np.full(64, index, np.float32))
        x = b.store("float32", b.add("MUL", "float32", x, w))
    return b.graph({"y": x})


def test_the_operation_that_is_too_large_is_named() -> None:
    graph = make_chain()
    labels = {region.root: f"step {i}" for i, region in enumerate(find_regions(graph, {}))}
    with pytest.raises(InvalidModel, match=r"'step 1' alone needs 768B of memory.*target is 767B"):
        partition(check_graph(graph), labels, 767)


def test_names_of_tasks() -> None:
    graph = make_chain()
    roots = [region.root for region in find_regions(graph, {})]
    labels = ["embed", "block 0: norm", "block 0: output", "block 1: norm", "head"]
    regions = find_regions(graph, dict(zip(roots, labels, strict=True)))
    assert name_tasks([regions[:1], regions[1:3], regions[3:]]) == [
        "embed",
        "block 0",
        "block 1 + head",
    ]
    assert name_tasks([regions[:2], regions[2:3], regions[3:]])[0] == "embed + block 0"
    assert name_tasks([regions]) == ["embed ... head"]
    assert name_tasks([regions[1:2], regions[2:3]]) == ["block 0 (1 of 2)", "block 0 (2 of 2)"]


def test_values_that_nobody_needs_are_left_out() -> None:
    b = Builder()
    x = b.input("x", "float32", 64)
    b.store("float32", b.add("NEG", "float32", x))
    y = b.store("float32", x)
    graph = b.graph({"y": y})
    assert [region.root for region in find_regions(graph, {})] == [y]


def make_work(*products: int) -> Graph:
    """Return a chain of sums over 2^42 elements, each after so many products."""
    b = Builder()
    x = b.store("float32", b.input("x", "float32", 1))
    for count in products:
        value = b.add("EXPAND", "float32", x, arg=(2**21, 2**21))
        for _ in range(count):
            value = b.add("MUL", "float32", value, value)
        x = b.store("float32", b.add("REDUCE", "float32", value, arg=("ADD", 2)))
    return b.graph({"y": x})


def test_the_bound_on_a_task_s_operations_holds_for_tasks_and_not_for_models() -> None:
    graph = check_graph(make_work(100, 100, 100, 200))
    assert graph.operations > limits.MAX_TASK_FLOPS
    tasks = cut_graph(graph, partition(graph, {}, 10**9))
    assert [round(task.graph.operations / 2**42) for task in tasks] == [101, 202, 201]
    with pytest.raises(InvalidModel, match=r"'the sum' alone takes \d+ operations.* --chunk"):
        large = check_graph(make_work(1, 300))
        partition(large, {len(large.nodes) - 1: "the sum"}, 10**9)
