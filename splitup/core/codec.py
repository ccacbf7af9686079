"""Canonical bytes: every value has one encoding, the same on every machine.

The form is the integer-and-string subset of RFC 8785 (JSON Canonicalization Scheme): UTF-8 JSON,
keys sorted by code point, no spaces, no floats. Digests, signatures and content addresses are
computed over these bytes, so no value may have two encodings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable
from typing import Any

from splitup.core import limits
from splitup.core.errors import InvalidInput

# The closing quote is optional, so that a match never fails and is never tried again from the next
# quote: an unterminated string would take quadratic time. Nor does a repetition give back what it
# took, for which it would remember 60 bytes for every escape.
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_LONG_NUMBERS = re.compile(r"\d{16,}+")
_ESCAPES = re.compile(r'\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]))')  # that canonical bytes hold
_OTHERS = re.compile(r"[ \t\n\r]|-0")  # no canonical bytes hold them outside of strings
_SUSPICIOUS = re.compile(rf"{_OTHERS.pattern}|{_LONG_NUMBERS.pattern}")
_OTHER_SPELLING = "key order, spacing or escapes differ"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # of the depth, as signed bytes
# What parts of a JSON text become in memory at most: an empty object with the place for one entry,
# an empty list, a key with its own place, a string with its own, and the place of one entry more.
_OBJECT_BYTES, _LIST_BYTES, _KEY_BYTES, _STRING_BYTES, _ENTRY_BYTES = 192, 96, 40, 72, 16
MAX_SAFE_INTEGER = 2**53 - 1  # RFC 8785 section 3.1: larger integers do not survive every parser


def encode_canonical(value: Any) -> bytes:
    """Return the canonical bytes of a value made of dict, list, str, int, bool and None.

    Raises InvalidInput for floats, integers outside ±(2^53 − 1) and non-string keys. Larger
    numbers travel as decimal or hexadecimal strings.
    """
    check_canonical(value)
    return _dump(value)


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def decode_canonical(data: bytes, *, max_bytes: int, **bounds: int) -> Any:
    """Parse canonical bytes; raise InvalidInput for any other encoding of a value.

    Raises InvalidInput when ``data`` is longer than ``max_bytes``, is not what ``parse_json``
    takes with these bounds, repeats a key, or is not byte for byte what ``encode_canonical`` would
    write.
    """
    if len(data) > max_bytes:
        raise InvalidInput(f"canonical object has {len(data)} bytes; the limit is {max_bytes}")
    try:
        text = data.decode()
        check_structure(text, **bounds)
        _check_spelling(text)
        value = load_unique(text, _check_order, parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not a canonical object: {error}") from None
    return value


def parse_json(
    data: bytes | bytearray | str,
    *,
    max_values: int = limits.MAX_JSON_VALUES,
    max_growth: int = limits.JSON_GROWTH,
    **options: Any,
) -> Any:
    """Parse JSON from an untrusted source; ``options`` are those of ``json.loads``.

    Raises ValueError if it is invalid, nests too deeply, has more than about ``max_values`` values,
    or would become more than ``max_growth`` times as large in memory (``check_structure``).
    """
    text = data if isinstance(data, str) else data.decode()
    check_structure(text, max_values, max_growth)
    return json.loads(text, **options)


def load_unique(
    text: str, check: Callable[[dict[str, Any]], None] | None = None, **options: Any
) -> Any:
    """Do what ``json.loads`` does, and raise ValueError for a key that an object repeats.

    ``check`` sees each object. The keys that objects kept are counted, and colons of the text:
    to be given each object's pairs would take half as much memory again as the objects do.
    """
    kept = 0

    def count(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal kept
        kept += len(found)
        if check is not None:
            check(found)
        return found

    value = json.loads(text, object_hook=count, **options)
    if (colons := text.count(":")) != kept:
        colons -= sum(string[0].count(":") for string in _STRINGS.finditer(text))
        if colons != kept:
            raise ValueError(f"a key is repeated: {colons} keys are {kept}")
    return value


def parse_json_prefix(text: str) -> tuple[Any, int]:
    """Parse the JSON value that a text begins with, likewise; return it and its length."""
    check_structure(text)
    value, length = json.JSONDecoder().raw_decode(text)
    return value, length


def check_structure(
    text: str, max_values: int = limits.MAX_JSON_VALUES, max_growth: int = limits.JSON_GROWTH
) -> None:
    """Raise ValueError for a JSON text that ``parse_json`` does not take; it may be none at all.

    This comes before anything is built. ``json.loads`` recurses in C and relies on the
    interpreter's recursion limit, which libraries raise on import (tinygrad to 10,000; py_ecc,
    under web3, to 100,000): far enough for nested brackets to overflow the stack and kill the
    process. And brackets alone, ``[[],[],…``, become 43 times their size in memory.
    """
    most = max_growth * len(text) + limits.JSON_FREE_BYTES
    openings = text.count("[") + text.count("{")
    if (
        openings <= limits.MAX_JSON_DEPTH
        and openings + text.count(",") < max_values
        and _weigh(text) <= most
    ):
        return  # whatever of it stands in strings
    bare = _STRINGS.sub('""', text)
    if (values := bare.count(",") + bare.count("[") + bare.count("{")) >= max_values:
        raise ValueError(f"it has about {values} values; the limit is {max_values}")
    if (weight := _weigh(bare)) > most:
        raise ValueError(f"its {len(text)} characters become {weight} bytes; {most} may be")
    steps = memoryview(bare.encode("ascii", "replace").translate(_STEPS, _NOT_BRACKETS)).cast("b")
    if max(itertools.accumulate(steps), default=0) > limits.MAX_JSON_DEPTH:
        raise ValueError(f"it nests deeper than {limits.MAX_JSON_DEPTH} levels")


def _weigh(text: str) -> int:
    """Return about how much memory the values of a JSON text take."""
    keys = text.count(":")
    return (
        _OBJECT_BYTES * text.count("{")
        + _LIST_BYTES * text.count("[")
        + _KEY_BYTES * keys
        + _STRING_BYTES * max(0, text.count('"') // 2 - keys)
        + _ENTRY_BYTES * text.count(",")
    )


def compute_digest(data: bytes | memoryview) -> str:
    """Return the SHA-256 of ``data`` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _refuse(text: str) -> None:
    raise ValueError(f"{text:.40} is no integer")


def _check_order(found: dict[str, Any]) -> None:
    """Raise ValueError unless the keys of an object ascend."""
    if not all(map(operator.lt, found, itertools.islice(found, 1, None))):
        raise ValueError(f"{_OTHER_SPELLING} at '{next(iter(found)):.40}'")


def _check_spelling(text: str) -> None:
    """Raise ValueError for a JSON text with another spelling of what it says than ``_dump``'s.

    Encoding the value again would tell as well, and take five times the memory of the value.
    """
    if "\\" in text and "\\" in _ESCAPES.sub("", text):
        raise ValueError(_OTHER_SPELLING)
    if _SUSPICIOUS.search(text) is None:
        return
    bare = _STRINGS.sub('""', text)
    if _OTHERS.search(bare):
        raise ValueError(_OTHER_SPELLING)
    for number in _LONG_NUMBERS.finditer(bare):
        if len(digits := number[0]) > 16 or int(digits) > MAX_SAFE_INTEGER:
            raise ValueError(f"integer out of range: {digits:.40}")


def check_canonical(root: Any) -> None:
    """Raise InvalidInput for a value that has no canonical bytes."""
    pending: list[Any] = [(root,)]  # containers only: few of the values are
    while pending:  # iterative, so that nesting cannot exhaust the stack
        container = pending.pop()
        if isinstance(container, dict):
            for key in container:
                if type(key) is not str and not isinstance(key, str):
                    raise InvalidInput(f"canonical object has a key that is no string: {key!r}")
            container = container.values()
        for value in container:
            kind = type(value)  # isinstance costs three times as much where most are strings
            if kind is str or kind is bool or value is None:
                continue
            if kind is int or isinstance(value, int):
                if not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
                    raise InvalidInput(f"canonical integer out of range: {value}")
            elif kind is dict or kind is list or isinstance(value, (dict, list, tuple)):
                pending.append(value)
            elif not isinstance(value, str):
                raise InvalidInput(f"canonical object cannot hold a {kind.__name__}")
