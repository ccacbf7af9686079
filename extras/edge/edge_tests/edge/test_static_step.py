"""The static step's masks and matrices do what the dynamic step's layout says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from splitup_edge.static_step import HIDDEN, StaticShape, keep_rows, make_static_inputs

from splitup.core.errors import InvalidInput
from splitup.decode.step import (
    StepInput,
    make_arrays,
    make_block_step,
    make_causal_step,
    make_tree_step,
)

MAX_LEN, BLOCK = 24, 6
SHAPE = StaticShape(2, 1, 3, MAX_LEN, BLOCK, (0, 4))  # the second layer has a window
VECTORS = np.random.default_rng(3).normal(0, 1, (MAX_LEN, 40, 3))  # by position and token


def mix(keys: np.ndarray, scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True) @ keys


class Dynamic:
    """What a step means: rows of (position, token), of which each step sees and keeps some."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.start = 0

    def step(self, step: StepInput, window: int) -> np.ndarray:
        last, self.rows = self.rows[self.start :], self.rows[: step.start - len(step.kept)]
        before = self.rows[self.start :]  # rows of the last step that stay where they are
        assert before == last[: len(before)]
        self.rows += [last[row] for row in step.kept]
        self.start = step.start
        new = list(zip(step.positions, step.tokens, strict=True))
        found = []
        for row, own in enumerate(new):
            seen = [*self.rows, *(new[other] for other in step.sees[row])]
            seen = [one for one in seen if not window or own[0] < one[0] + window]
            keys = np.array([VECTORS[one] for one in seen])
            found.append(mix(keys, keys @ VECTORS[own]))
        self.rows += new
        return np.array(found)


def run_static(inputs: dict[str, np.ndarray], cache: np.ndarray) -> tuple[Any, np.ndarray]:
    """The formulas of the issue for layers that have tokens' vectors as queries, keys, values."""
    new = VECTORS[inputs["positions"][0], inputs["input_ids"][0]]
    found, updated = [], []
    for layer in range(SHAPE.layers):
        keys = np.concatenate([cache[layer, 0, 0, 0], new])
        found.append(mix(keys, new @ keys.T + inputs["attention_mask"][layer, 0, 0]))
        insert, keep = inputs["insert_matrix"][layer, 0, 0], inputs["keep_mask"][layer, 0, 0]
        updated.append(cache[layer] * keep + insert @ new)
    return found, np.stack(updated)


@st.composite
def sequences(draw: st.DrawFn) -> list[StepInput]:
    """Steps of causal rows, blocks and trees, of which a part stays, some of it moved."""
    steps: list[StepInput] = []
    start, kept, fresh = 0, (), 0
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, min(BLOCK, MAX_LEN - start)))
        tokens = draw(st.lists(st.integers(0, 39), min_size=count, max_size=count))
        kind = draw(st.sampled_from(["causal", "block", "tree"]))
        parents = [draw(st.integers(-1, row - 1)) for row in range(count)]
        if kind == "tree" or kept:
            step = make_tree_step(tokens, parents, start, kept=kept)
        else:
            step = (
                make_causal_step(tokens, start)
                if kind == "causal"
                else make_block_step(tokens, start)
            )
        steps.append(step)
        kept = ()
        if (step.sees[0] and kind == "tree") or step.kept:
            kept = tuple(step.sees[draw(st.integers(0, count - 1))])
            fresh = len(kept)
        else:
            fresh = draw(st.integers(0, count))
        start += fresh
        if start >= MAX_LEN:
            break
    return steps


@given(sequences())
def test_static_steps_see_and_keep_what_dynamic_ones_do(steps: list[StepInput]) -> None:
    cache = SHAPE.new_cache(np.float64)
    dynamic = [Dynamic() for _ in SHAPE.windows]
    for step in steps:
        arrays = make_arrays(step, BLOCK)
        keep_rows(cache, arrays["layout"])
        inputs = make_static_inputs(arrays, SHAPE, dtype=np.float64)
        assert {name: array.shape for name, array in inputs.items()} == {
            name: size for name, size in SHAPE.inputs.items() if name != "kv_cache"
        }
        assert set(np.unique(inputs["attention_mask"])) <= {0.0, HIDDEN}
        found, cache = run_static(inputs, cache)
        count = len(step.tokens)
        for given_rows, one, window in zip(found, dynamic, SHAPE.windows, strict=True):
            assert np.abs(given_rows[:count] - one.step(step, window)).max() <= 1e-12
        idle = make_static_inputs(arrays, SHAPE, commits=False, dtype=np.float64)
        assert run_static(idle, cache)[1].tobytes() == cache.tobytes()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_rows_never_see_a_later_block(size: int, blocks: int, start: int) -> None:
    count, shape = size * blocks, StaticShape(1, 1, 1, MAX_LEN, 9)
    arrays = make_arrays(make_block_step([0] * count, start, block_size=size), 9)
    mask = make_static_inputs(arrays, shape)["attention_mask"][0, 0, 0] == 0
    of = np.arange(count) // size
    assert (mask[:count, MAX_LEN : MAX_LEN + count] == (of[:, None] >= of)).all()
    assert mask[:count, :start].all() and not mask[:count, start:MAX_LEN].any()
    assert not mask[count:].any() and not mask[:, MAX_LEN + count :].any()


def test_the_cache_of_28_layers_takes_235_million_bytes() -> None:
    assert StaticShape(28, 8, 128, 2048, 4).count_cache_bytes(2) == 234_881_024


def test_a_row_that_is_not_there_is_refused() -> None:
    arrays = make_arrays(make_causal_step([1, 2], 0), BLOCK)
    arrays["layout"][0, 2] = 3
    with pytest.raises(InvalidInput, match="sees row 2, and the step has 2"):
        make_static_inputs(arrays, SHAPE)
