from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.codec import (
    MAX_SAFE_INTEGER,
    check_canonical,
    decode_canonical,
    encode_canonical,
    parse_json,
)
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
PIECES = (
    *(
        '"',
        "\\",
        "\\\\",
        '\\"',
        "\\/",
        "\\n",
        "\\u0061",
        "\\u0000",
        "\\u000a",
        "\\u001F",
        "\\u001f",
    ),
    *("\\ud83d\\ude00", "\\ud800", " ", "\n", "\t", "\x00", "-", "-0", "0", "1.0", "1e5", "true"),
    *(
        "9007199254740992",
        "NaN",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"a":1',
        '"a":1,',
        "\ufeff",
        "\u00a0",
    ),
)


class _Number(IntEnum):
    SMALL = 3
    LARGE = MAX_SAFE_INTEGER + 1


class _Word(StrEnum):
    ANY = "any"


_ODD = st.sampled_from(
    (
        *(1.0, -0.0, float("nan"), b"", bytearray(), 1j, object(), set(), frozenset(), range(2)),
        *(_Number.SMALL, _Number.LARGE, _Word.ANY, int, iter(()), memoryview(b"")),
        *(2**53 - 1, 2**53, 1 - 2**53, -(2**53), 10**30, -(10**30)),
    )
)
_ANYTHING = st.recursive(
    SCALARS | _ODD,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.just(_Word.ANY), inner, max_size=4)
        | st.dictionaries(SCALARS | st.just(b"") | st.just(1.5), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def is_canonical(value: Any) -> bool:
    """Say it again, as plainly as possible: the checked code is written for its speed."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_canonical(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_canonical, value))
    if isinstance(value, int):
        return abs(value) < 2**53
    return value is None or isinstance(value, str)


@given(_ANYTHING)
def test_a15_the_fast_check_of_canonical_values_takes_what_the_plain_one_takes(value: Any) -> None:
    if is_canonical(value):
        check_canonical(value)
    else:
        with pytest.raises(InvalidInput):
            check_canonical(value)


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
        b'"\\/"',
        b'"\\u000a"',
        b'"\\u001F"',
        b'"\\ud800"',
        b"-0",
        b"[-0]",
        b"[1 ]",
        b"1\n",
        b'{"a":{"":1,"":2}}',
        b"[" * 100_000 + b"]" * 100_000,
        b"\xff",
        b"",
    ],
    ids=lambda data: repr(data[:16]),
)
def test_every_other_spelling_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_canonical(data, max_bytes=1_000_000)


@given(VALUES, st.data())
def test_what_is_taken_is_what_encoding_again_gives(value: Any, data: st.DataObject) -> None:
    """Whatever is put into canonical bytes: no text is taken that has another spelling."""
    text = encode_canonical(value).decode()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 2)))
        text = text[:start] + data.draw(st.sampled_from(PIECES)) + text[end:]
    try:
        found = decode_canonical(text.encode(), max_bytes=10**6)
    except InvalidInput:
        return
    assert encode_canonical(found).decode() == text


def test_length_is_checked_before_parsing() -> None:
    with pytest.raises(InvalidInput, match="the limit is 3"):
        decode_canonical(b"[1,2]", max_bytes=3)


@pytest.mark.parametrize("value", [1.0, {1: 2}, {"a": b"x"}, 2**53])
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput):
        encode_canonical(value)


def test_s20_brackets_are_counted_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match=r"become \d+ bytes"):
        parse_json("[" + "[],[0]," * 20_000 + "0]")
    text = "[[{,:" * 100_000  # brackets in a string are none
    assert parse_json(f'["{text}"]') == [text]


def test_s20_values_are_counted_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="values; the limit is"):
        parse_json("[" + "0," * limits.MAX_JSON_VALUES + "0]")
    assert len(parse_json("[" + "0," * 1_000 + "0]")) == 1_001


@pytest.mark.parametrize("number", [MAX_SAFE_INTEGER, -MAX_SAFE_INTEGER])
def test_the_largest_integers_are_canonical(number: int) -> None:
    assert decode_canonical(f'["1234567890123456789",{number}]'.encode(), max_bytes=100)
    with pytest.raises(InvalidInput):
        decode_canonical(f"[{number + (1 if number > 0 else -1)}]".encode(), max_bytes=100)
