"""Texts side by side in the steps of an encoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.errors import InvalidInput
from splitup.decode.texts import EncodedText, make_text_arrays, pack_texts


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_text_is_in_one_step_that_has_room(lengths: list[int]) -> None:
    steps = pack_texts(lengths, 20)
    assert sorted(number for step in steps for number in step) == list(range(len(lengths)))
    rows = [sum(lengths[number] for number in step) for step in steps]
    assert all(1 <= count <= 20 for count in rows)
    # any two steps would not fit into one, so there are fewer than twice as many as needed
    assert len(rows) < 2 or sum(sorted(rows)[:2]) > 20
    assert len(rows) <= max(1, 2 * -(-sum(lengths) // 20))


def test_the_inputs_of_a_step() -> None:
    texts = [EncodedText((7, 8, 9), (0, 0, 1)), EncodedText((5, 6))]
    arrays = make_text_arrays(texts)
    assert arrays["tokens"].tolist() == [7, 8, 9, 5, 6]
    assert arrays["layout"].tolist() == [
        [0, 0, 3, 0],
        [1, 0, 3, 0],
        [2, 0, 3, 1],
        [0, 3, 2, 0],
        [1, 3, 2, 0],
    ]
    assert arrays["texts"].tolist() == [[0, 3], [3, 2]]
    assert {array.dtype.name for array in arrays.values()} == {"int32"}


@pytest.mark.parametrize("length", [0, 21])
def test_a_text_that_fits_no_step(length: int) -> None:
    with pytest.raises(InvalidInput, match=f"text 1 has {length} tokens; the model takes 1 to 20"):
        pack_texts([3, length], 20)
