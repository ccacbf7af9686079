"""Find NaN and infinity in a weight while its bytes are read.

Such a number is legal, and masks of exported graphs hold infinities, but in the weights of a layer
it is a sign of a broken file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

# By dtype or storage format: the bytes of a unit, the places in it of its floats, and the bits of
# their exponents. All ones in an exponent are NaN or infinity. A unit is one number, or a block of
# a quantised weight with float16 scales (``splitup_deploy.frontends.decoder.quantised``).
_HALF: Final = 0x7C00
_UNITS: Final[dict[str, tuple[int, tuple[int, ...], int]]] = {
    "float16": (2, (0,), _HALF),
    "bfloat16": (2, (0,), 0x7F80),
    "float32": (4, (0,), 0x7F80 << 16),
    "float64": (8, (0,), 0x7FF0 << 48),
    "Q4_0": (18, (0,), _HALF),
    "Q4_1": (20, (0, 2), _HALF),
    "Q5_0": (22, (0,), _HALF),
    "Q5_1": (24, (0, 2), _HALF),
    "Q8_0": (34, (0,), _HALF),
    "Q4_K": (144, (0, 2), _HALF),
    "Q5_K": (176, (0, 2), _HALF),
    "Q6_K": (210, (208,), _HALF),
}


class FiniteCheck:
    """Looks at the bytes of numbers of one dtype or storage format. Integers are always finite."""

    def __init__(self, kind: str) -> None:
        self.is_finite = True
        self._unit, self._places, self._mask = _UNITS.get(kind, (1, (), 0))
        self._rest = b""

    def watch(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks again; ``is_finite`` is what they were so far."""
        for chunk in chunks:
            if self._places and self.is_finite:
                self._look(chunk)
            yield chunk

    def _look(self, chunk: bytes) -> None:
        data = self._rest + chunk if self._rest else chunk
        count = len(data) // self._unit
        self._rest = data[count * self._unit :]
        for place in self._places:
            units = np.frombuffer(data, np.uint8, count * self._unit).reshape(count, self._unit)
            width = self._unit if self._unit <= 8 else 2
            floats = np.ascontiguousarray(units[:, place : place + width]).view(f"<u{width}")
            if count and (floats & self._mask).max() == self._mask:
                self.is_finite = False
