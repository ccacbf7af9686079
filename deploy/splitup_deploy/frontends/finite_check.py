"""Find NaN and infinity in a weight while its bytes are read.

Such a number is legal, and masks of exported graphs hold infinities, but in the weights of a layer
it is a sign of a broken file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

_HALF: Final = 0x7C00
# By dtype or scale: the bytes of a number, and the bits of its exponent. All ones are NaN or
# infinity.
_FLOATS: Final[dict[str, tuple[int, int]]] = {
    "float16": (2, _HALF),
    "bfloat16": (2, 0x7F80),
    "float32": (4, 0x7F80 << 16),
    "float64": (8, 0x7FF0 << 48),
    "F16": (2, _HALF),
    "BF16": (2, 0x7F80),
    "F32": (4, 0x7F80 << 16),
}
# By format of quantised blocks (``splitup_deploy.frontends.decoder.quantised``): the places of
# float16 scales; all others have one scale, at the beginning.
_HALVES: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
_FLOAT8: Final = (1, 0x7F)  # of E4M3, which has no infinity


def _find_floats(kind: str, unit: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return where the floats of a unit are: start, end, bytes of each, bits of the exponent."""
    if kind in _FLOATS:
        return ((0, unit, *_FLOATS[kind]),)
    if kind in _HALVES:
        return tuple((place, place + 2, 2, _HALF) for place in _HALVES[kind])
    if kind == "MXFP4":
        return ((0, 1, 1, 0xFF),)
    numbers, _, scale = kind.partition("_")
    if scale not in _FLOATS:
        return ()
    width, mask = _FLOATS[scale]
    is_float8 = ((width, unit, *_FLOAT8),) if numbers == "F8" else ()
    return ((0, width, width, mask), *is_float8)


class FiniteCheck:
    """Looks at the bytes of numbers of one dtype, or of blocks of ``unit`` bytes of one format.

    Integers are always finite.
    """

    def __init__(self, kind: str, unit: int = 0) -> None:
        self.is_finite = True
        self._unit = unit or _FLOATS.get(kind, (1, 0))[0]
        self._floats = _find_floats(kind, self._unit)
        self._rest = b""

    def watch(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks again; ``is_finite`` is what they were so far."""
        for chunk in chunks:
            if self._floats and self.is_finite:
                self._look(chunk)
            yield chunk

    def _look(self, chunk: bytes) -> None:
        data = self._rest + chunk if self._rest else chunk
        count = len(data) // self._unit
        self._rest = data[count * self._unit :]
        units = np.frombuffer(data, np.uint8, count * self._unit).reshape(count, self._unit)
        for start, end, width, mask in self._floats:
            floats = np.ascontiguousarray(units[:, start:end]).view(f"<u{width}")
            if count and (floats & mask).max() == mask:
                self.is_finite = False
