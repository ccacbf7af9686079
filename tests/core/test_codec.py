from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.codec import MAX_SAFE_INTEGER, decode_canonical, encode_canonical
from splitup.core.errors import InvalidInput

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    | st.text(st.characters(codec="utf-8"))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


@given(VALUES)
def test_round_trip(value: Any) -> None:
    data = encode_canonical(value)
    assert decode_canonical(data, max_bytes=len(data)) == value


def test_keys_are_sorted_and_nothing_is_escaped_twice() -> None:
    encoded = encode_canonical({"b": 1, "a": [True, None, "é"]})
    assert encoded == '{"a":[true,null,"é"],"b":1}'.encode()


@pytest.mark.parametrize(
    "data",
    [
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"a": 1}',
        b"1.5",
        b"1e3",
        b"NaN",
        b"9007199254740993",
        b'"\\u0041"',
        b"[" * 100_000 + b"]" * 100_000,
        b"\xff",
        b"",
    ],
    ids=lambda data: repr(data[:16]),
)
def test_every_other_spelling_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_canonical(data, max_bytes=1_000_000)


def test_length_is_checked_before_parsing() -> None:
    with pytest.raises(InvalidInput, match="the limit is 3"):
        decode_canonical(b"[1,2]", max_bytes=3)


@pytest.mark.parametrize("value", [1.0, {1: 2}, {"a": b"x"}, 2**53])
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput):
        encode_canonical(value)
