from __future__ import annotations

import pytest

from splitup.core.errors import InvalidInput
from splitup.decode.step import (
    StepInput,
    check_path,
    make_arrays,
    make_block_step,
    make_causal_step,
    make_tree_step,
)


def test_the_layout_of_a_tree_is_pinned() -> None:
    step = make_tree_step([5, 6, 7, 8], [-1, 0, 0, 2], 10, outputs=(3,), kept=(0, 3))
    arrays = make_arrays(step, 4)
    assert arrays["tokens"].tolist() == [5, 6, 7, 8] and arrays["outputs"].tolist() == [3]
    assert arrays["layout"].tolist() == [
        [10, 10, 1, 0, 0, 0, 0, 0, 0, 2],  # of two kept rows, the second was two rows further on
        [11, 0, 1, 2, 0, 0, 0, 0, 0, 0],
        [11, 0, 1, 3, 0, 0, 0, 0, 0, 0],
        [12, 0, 1, 3, 4, 0, 0, 0, 0, 0],
    ]
    assert all(array.dtype == "int32" for array in arrays.values())


def test_rows_before_and_behind() -> None:
    causal = make_arrays(make_causal_step([1, 2], 3), 2)["layout"]
    assert causal.tolist() == [[3, 3, 1, 0, 0, 0], [4, 0, 1, 2, 0, 0]]
    block = make_arrays(make_block_step([1, 2], 3), 2)["layout"]
    assert block.tolist() == [[3, 3, 1, 2, 0, 0], [4, 0, 1, 2, 0, 0]]


@pytest.mark.parametrize(
    "step",
    [
        make_causal_step([1] * 5, 0),
        make_causal_step([1], 0, outputs=()),
        make_causal_step([1], 0, outputs=(0,) * 5),
        StepInput((1, 2), (0, 0), 0, ((0,), (0, 1)), (1,)),
        StepInput((1, 2), (0, 9), 0, ((0,), (0, 1)), (1,)),
        StepInput((1, 2), (3, 4), 4, ((0,), (0, 1)), (1,)),
    ],
)
def test_what_the_layout_cannot_say(step: StepInput) -> None:
    with pytest.raises(InvalidInput):
        make_arrays(step, 4)


def test_sequences_and_trees_follow_paths() -> None:
    last = make_causal_step([1, 2, 3], 4)
    window = StepInput((1, 2, 3, 4), (7, 8, 9, 9), 7, ((0,), (0, 1), (0, 1, 2), (0, 3, 1)), (0,))
    for step in (
        make_causal_step([1, 2, 3], 7),
        make_causal_step([1], 4),  # the same start: nothing of the last step counts
        make_causal_step([1], 0),  # anew
        make_tree_step([1, 2, 3, 4], [-1, 0, 0, 2], 7, kept=(0, 1, 2)),
        make_tree_step([1, 2], [-1, -1], 7),
        window,
    ):
        check_path(step, last)
        check_path(step, None)


@pytest.mark.parametrize(
    "step",
    [
        make_block_step([1, 2], 7),
        make_causal_step([1], 3),  # behind the start of the step before
        StepInput((1, 2), (7, 8), 7, ((0,), (1,)), (1,)),  # nothing at 7
        StepInput((1, 2), (7, 9), 7, ((0,), (0, 1)), (1,)),  # nothing at 8
        StepInput((1, 2), (7, 8), 7, ((0,), (0,)), (1,)),  # not itself
        StepInput((1, 2, 3), (7, 7, 8), 7, ((0,), (1,), (0, 1, 2)), (1,)),  # two at 7
        StepInput(
            (1, 2, 3, 4), (7, 7, 8, 9), 7, ((0,), (1,), (1, 2), (0, 2, 3)), (1,)
        ),  # another's parent
        StepInput((1,), (7,), 7, ((),), (0,)),
    ],
)
def test_what_recurrent_layers_cannot_follow(step: StepInput) -> None:
    with pytest.raises(InvalidInput, match="recurrent layers"):
        check_path(step, make_causal_step([1, 2, 3], 4))
