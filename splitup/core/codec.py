"""Canonical bytes: every value has one encoding, the same on every machine.

The form is the integer-and-string subset of RFC 8785 (JSON Canonicalization Scheme): UTF-8 JSON,
keys sorted by code point, no spaces, no floats. Digests, signatures and content addresses are
computed over these bytes, so no value may have two encodings.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from splitup.core import limits
from splitup.core.errors import InvalidInput

# The closing quote is optional, so that a match never fails and is never tried again from the next
# quote: an unterminated string would take quadratic time.
_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")
MAX_SAFE_INTEGER = 2**53 - 1  # RFC 8785 section 3.1: larger integers do not survive every parser


def encode_canonical(value: Any) -> bytes:
    """Return the canonical bytes of a value made of dict, list, str, int, bool and None.

    Raises InvalidInput for floats, integers outside ±(2^53 − 1) and non-string keys. Larger
    numbers travel as decimal or hexadecimal strings.
    """
    _check(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def decode_canonical(data: bytes, *, max_bytes: int) -> Any:
    """Parse canonical bytes; raise InvalidInput for any other encoding of a value.

    Raises InvalidInput when ``data`` is longer than ``max_bytes``, is not JSON, nests too deeply,
    repeats a key, or is not byte for byte what ``encode_canonical`` would write.
    """
    if len(data) > max_bytes:
        raise InvalidInput(f"canonical object has {len(data)} bytes; the limit is {max_bytes}")
    try:
        value = parse_json(data)
        encoded = encode_canonical(value)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not a canonical object: {error}") from None
    if encoded != data:
        raise InvalidInput("not a canonical object: key order, spacing or escapes differ")
    return value


def parse_json(data: bytes | bytearray | str, **options: Any) -> Any:
    """Parse JSON from an untrusted source; raises ValueError if it is invalid or nests too deeply.

    The depth is checked first. ``json.loads`` recurses in C and relies on the interpreter's
    recursion limit, which libraries raise on import (tinygrad to 10,000; py_ecc, under web3, to
    100,000): far enough for nested brackets to overflow the stack and kill the process.
    """
    text = data if isinstance(data, str) else bytes(data).decode()
    _check_depth(text)
    return json.loads(text, **options)


def parse_json_prefix(text: str) -> tuple[Any, int]:
    """Parse the JSON value that a text begins with, likewise; return it and its length."""
    _check_depth(text)
    value, length = json.JSONDecoder().raw_decode(text)
    return value, length


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in _NOT_BRACKETS.sub("", _STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > limits.MAX_JSON_DEPTH:
            raise ValueError(f"it nests deeper than {limits.MAX_JSON_DEPTH} levels")


def compute_digest(data: bytes | memoryview) -> str:
    """Return the SHA-256 of ``data`` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _check(root: Any) -> None:
    pending = [root]
    while pending:  # iterative, so that nesting cannot exhaust the stack
        value = pending.pop()
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise InvalidInput(f"canonical object has a key that is no string: {key!r}")
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, bool) or value is None or isinstance(value, str):
            continue
        elif isinstance(value, int):
            if abs(value) > MAX_SAFE_INTEGER:
                raise InvalidInput(f"canonical integer out of range: {value}")
        else:
            raise InvalidInput(f"canonical object cannot hold a {type(value).__name__}")
