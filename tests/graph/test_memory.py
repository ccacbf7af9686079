from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.graph.cost import compute_vram_bytes
from splitup.graph.ir import Graph, encode_float
from splitup.graph.memory import Arena, LiveRange, find_live_ranges, find_temporaries, place_buffers
from splitup.graph.rules import check_graph
from tests.graph.graphs import Builder


@given(
    st.lists(
        st.builds(
            lambda first, length, blocks: LiveRange(first, first + length, 256 * blocks),
            st.integers(0, 9),
            st.integers(0, 9),
            st.integers(1, 9),
        )
    )
)
def test_what_lives_at_one_time_lies_apart(ranges: list[LiveRange]) -> None:
    offsets, size = place_buffers(ranges)
    for time in range(20):
        alive = sorted(
            (offset, offset + placed.nbytes)
            for offset, placed in zip(offsets, ranges, strict=True)
            if placed.first <= time <= placed.last
        )
        assert all(a[1] <= b[0] for a, b in pairwise(alive))
    assert size == max((o + t.nbytes for o, t in zip(offsets, ranges, strict=True)), default=0)
    assert all(offset % 256 == 0 for offset in offsets)


def test_the_lowest_gap_that_is_large_enough_is_taken() -> None:
    arena = Arena()
    first = arena.place([LiveRange(0, 0, 256), LiveRange(0, 1, 512), LiveRange(0, 9, 768)])
    assert first == [1280, 768, 0]  # the largest comes first
    assert arena.place([LiveRange(1, 9, 256)]) == [1280]
    assert arena.place([LiveRange(2, 9, 1024)]) == [1536]
    assert arena.place([LiveRange(2, 9, 512)]) == [768] and arena.size == 2560


def make_chain(length: int, size: int) -> Builder:
    b = Builder()
    made = b.store("float32", b.input("x", "float32", size))
    for _ in range(length):
        made = b.store("float32", b.add("NEG", "float32", made))
    return b


def test_a_chain_takes_two_values() -> None:
    b = make_chain(9, 1024)
    graph = b.graph({"y": len(b.nodes) - 1})
    assert compute_vram_bytes(check_graph(graph)) == 3 * 4096  # and the input


def test_outputs_live_to_the_end_and_updates_lie_elsewhere() -> None:
    b = make_chain(2, 64)
    old = b.state("s", "float32", 64)
    new = b.store("float32", b.add("ADD", "float32", 5, old))
    graph = b.graph({"y": 1, "z": new}, [new])
    ranges = find_live_ranges(check_graph(graph))
    assert ranges == {1: LiveRange(0, 4, 256), 3: LiveRange(1, 2, 256), 5: LiveRange(2, 3, 256)}


def make_norms() -> tuple[Graph, Builder]:
    """Return a norm, and a product that something is added to: two reductions."""
    b = Builder()
    x = b.input("x", "float32", 64, 48)
    total = b.add("REDUCE", "float32", b.add("PERMUTE", "float32", x, arg=(1, 0)), arg=("ADD", 1))
    scale = b.add("RESHAPE", "float32", b.add("RECIPROCAL", "float32", total), arg=(64, 1))
    normed = b.store("float32", b.add("MUL", "float32", x, scale))
    w = b.weight("w", np.ones((48, 48), np.float32))
    left = b.add("RESHAPE", "float32", normed, arg=(64, 48, 1))
    product = b.add("MUL", "float32", left, b.add("RESHAPE", "float32", w, arg=(1, 48, 48)))
    product = b.add("PERMUTE", "float32", product, arg=(1, 0, 2))
    summed = b.add("REDUCE", "float32", product, arg=("ADD", 1))
    half = b.const("float32", encode_float(0.5))
    kept = b.store("float32", b.add("ADD", "float32", b.add("MUL", "float32", summed, half), x))
    again = b.store("float32", b.add("NEG", "float32", kept))
    return b.graph({"y": again}), b


def test_temporaries_are_what_is_read_again_and_again() -> None:
    graph, _ = make_norms()
    found = find_temporaries(check_graph(graph))
    assert [check_graph(graph).values[node].shape for node in sorted(found)] == [(64,)]


def test_predicted_is_allocated() -> None:
    graph, b = make_norms()
    program = TaskProgram(graph.to_bytes(), b.safetensors())
    assert program.allocated_bytes == program.vram_bytes
    x = np.random.default_rng(0).uniform(1, 2, (64, 48)).astype(np.float32)
    (result,) = program.run(program.new_state(), [x.tobytes()])
    normed = x / x.sum(1, keepdims=True)
    wanted = -(0.5 * normed.sum(1, keepdims=True) + x)
    np.testing.assert_allclose(np.frombuffer(result, np.float32).reshape(64, 48), wanted, rtol=1e-5)


def make_random(seed: int) -> Graph:
    """Return sums and products of several inputs whose halves and rows are read apart."""
    draw, b = random.Random(seed), Builder()
    rows, columns = draw.choice([(8, 16), (4, 32), (16, 64)])
    made = [
        (b.input(f"x{place}", "float32", rows, columns), (rows, columns))
        for place in range(draw.randint(2, 6))
    ]

    def add(op: str, shape: tuple[int, ...], *sources: int, arg: object = None) -> int:
        node = b.add(op, "float32", *sources, **({} if arg is None else {"arg": arg}))
        made.append((node, shape))
        return node

    def halve(node: int, shape: tuple[int, ...], offset: int) -> None:
        half = shape[1] // 2
        add("SHRINK", (shape[0], half), node, arg=((0, shape[0]), (offset, half)))

    for _ in range(draw.randint(4, 18)):
        node, shape = draw.choice(made[-8:])
        can_halve = len(shape) == 2 and shape[1] % 2 == 0 and shape[1] > 2
        like = [other for other, known in made if known == shape]
        kind = draw.random()
        if kind < 0.15:
            for other in draw.sample(like, min(len(like), draw.randint(3, 6))):
                node = b.add(draw.choice(["ADD", "MUL"]), "float32", node, other)
            made.append((node, shape))
            if can_halve and draw.random() < 0.7:
                for offset in draw.sample([0, shape[1] // 2], 2):
                    halve(node, shape, offset)
        elif kind < 0.4:
            add(draw.choice(["ADD", "MUL", "SUB", "MAX"]), shape, node, draw.choice(like))
        elif kind < 0.5:
            add(draw.choice(["NEG", "SQRT", "RECIPROCAL"]), shape, node)
        elif kind < 0.62 and len(shape) == 2:
            across = b.add("PERMUTE", "float32", node, arg=(1, 0))
            add("REDUCE", shape[:1], across, arg=(draw.choice(["ADD", "MAX"]), 1))
        elif kind < 0.74 and shape == (rows,):
            repeated = b.add("EXPAND", "float32", node, arg=(columns,))
            add("PERMUTE", (rows, columns), repeated, arg=(1, 0))
        elif kind < 0.84 and can_halve:
            halve(node, shape, draw.choice([0, shape[1] // 2]))
        else:
            made.append((b.store("float32", node), shape))
    last = [b.store("float32", node) for node, _ in made[-draw.randint(1, 2) :]]
    return b.graph({f"y{place}": node for place, node in enumerate(last)})


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 1_000), marks=pytest.mark.long)], ids=len
)
def test_a_compiled_graph_takes_no_more_than_was_predicted(seeds: range) -> None:
    device = select_device().device
    for seed in seeds:
        graph = check_graph(make_random(seed))
        schedule = compile_graph(graph, device)
        taken = sum(schedule.inputs) + sum(schedule.values)
        assert taken <= compute_vram_bytes(graph), f"seed {seed}"
