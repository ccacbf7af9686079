from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.errors import InvalidInput
from splitup.decode.stop import StopFilter


def read(pieces: list[str], stop: list[str]) -> tuple[str, int]:
    """Return the text, and how many tokens were read."""
    ends, text = StopFilter(stop), ""
    for number, piece in enumerate(pieces, 1):
        text += "".join(part for _, part in ends.push(number, piece))
        if ends.found:
            return text, number
    return text + "".join(part for _, part in ends.flush()), len(pieces)


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    text, count = read(pieces, stop)
    whole = "".join(pieces[:count])
    places = [place for s in stop if (place := whole.find(s)) >= 0]
    assert text == (whole[: min(places)] if places else whole)
    assert places or count == len(pieces)


def test_tokens_come_as_soon_as_they_are_certain() -> None:
    ends = StopFilter(["\n\n", "END"])
    assert ends.push(1, "one ") == [(1, "one ")]
    assert ends.push(2, "E") == []
    assert ends.push(3, "N") == []
    assert ends.push(4, "X") == [(2, "E"), (3, "N"), (4, "X")]
    assert ends.push(5, "two\n") == []
    assert ends.push(6, "\nmore") == [(5, "two")] and ends.found


@pytest.mark.parametrize("stop", [[""], ["x" * 1000], ["x"] * 100])
def test_impossible_strings(stop: list[str]) -> None:
    with pytest.raises(InvalidInput, match="stop strings"):
        StopFilter(stop)
