"""Make the decoding of weights shorter (``splitup.cpu.decoder_match``); no bit of a weight changes.

A graph shifts a bit down, masks it, shifts it up and masks it again. One shift and one mask do; and
a byte for all lanes comes with its neighbours in a word, which takes one instruction fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from splitup.cpu.matmul_shape import LANES

# An operation's name, then its operands: values, constants (a number per lane) or numbers.
Value = tuple[Any, ...]
Lanes = tuple[int, ...]
WORD_BYTES: Final = 4
_WORD: Final = 2**32 - 1
_SIZES: Final = {"byte": 1, "bytes": LANES, "half": 2}
_MOVES: Final[dict[str, Callable[[int, int], int]]] = {
    "and": lambda bits, mask: bits & mask,
    "shift right": lambda bits, count: bits >> min(count, 32),
    "shift left": lambda bits, count: bits << min(count, 32) & _WORD,
}


class _Bits(NamedTuple):
    """The bits of a mask of a value that was shifted to the right, or left by less than 0."""

    source: Value
    held: Lanes  # bits of the source that may be set
    right: Lanes
    mask: Lanes


_ZEROS: Final = (0,) * LANES
_ALL: Final = (_WORD,) * LANES


def is_constant(value: Value) -> bool:
    """Return whether a value is a number per lane."""
    return not isinstance(value[0], str)


def list_places(value: Value) -> Iterator[int]:
    """Yield the first place of each load of a value, and the place behind it."""
    if value[0] in _SIZES:
        yield from (value[1], value[1] + _SIZES[value[0]])
    for one in value[1:]:
        if isinstance(one, tuple):
            yield from list_places(one)


def shorten(value: Value, places: range) -> Value:
    """Return a value of the same bits, which may load a word from any of ``places``."""
    return _write(_read(value, places), places)


def _read(value: Value, places: range) -> _Bits:
    """Return a value as bits of what is no shift and no mask, which is shortened."""
    if is_constant(value):
        return _Bits(value, _ALL, _ZEROS, _ALL)
    name, *operands = value
    if name in _MOVES and is_constant(operands[1]):
        inner = _read(operands[0], places)
        counts = tuple(number & _WORD for number in operands[1])
        sign = {"shift right": 1, "shift left": -1}.get(name, 0)
        right = tuple(one + sign * count for one, count in zip(inner.right, counts, strict=True))
        mask = tuple(map(_MOVES[name], inner.mask, counts))
        bits = inner._replace(right=right, mask=mask)
        if _choose_load(bits, places) is not None:
            return bits
        return _Bits((name, _write(inner, places), operands[1]), mask, _ZEROS, mask)
    parts = [_read(one, places) if isinstance(one, tuple) else one for one in operands]
    held = _ALL
    if name == "or":
        held = tuple(one | two for one, two in zip(*(part.mask for part in parts), strict=True))
    elif name in ("byte", "bytes") and not operands[1]:
        held = (255,) * LANES
    written = (_write(part, places) if isinstance(part, _Bits) else part for part in parts)
    return _Bits((name, *written), held, _ZEROS, held)


def _choose_load(bits: _Bits, places: range) -> _Bits | None:
    """Return the bits of one source that is shifted in one direction, None if there is none."""
    source, held, right, mask = bits
    if source[0] == "byte" and not source[2] and (any(right) or mask != held):
        for before in range(4):
            place, shifts = source[1] - before, tuple(8 * before + count for count in right)
            if place in places and min(shifts) >= 0:
                return _Bits(("word", place), _ALL, shifts, mask)
    return None if min(right) < 0 < max(right) else bits


def _write(bits: _Bits, places: range) -> Value:
    found = _choose_load(bits, places)
    assert found is not None, "bits that nothing computes were read"
    value, held, right, mask = found
    if any(right):
        name = "shift left" if min(right) < 0 else "shift right"
        counts = tuple(map(abs, right))
        value, held = (name, value, counts), tuple(map(_MOVES[name], held, counts))
    return value if held == mask else ("and", value, mask)
