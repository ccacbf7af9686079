"""One step of an encoder: whole texts side by side, without padding.

A step is paid for as many rows as it may have, so that short texts share one. It has three inputs,
for T rows of at most C (the model's chunk), which are R texts:

    tokens   int32 [T]      the tokens of all texts, one after the other
    layout   int32 [T, 4]   per row: its position in its text, the text's first row, the text's
                            number of rows, and the row's token type (1 in the second text of a
                            pair)
    texts    int32 [R, 2]   per text: its first row, and its number of rows

A result does not depend on the other texts of its step, nor on the place in it: it is equal byte
for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput

LAYOUT_COLUMNS: Final = 4
SPAN_COLUMNS: Final = 2


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The tokens of a text, or of a pair of texts, and the type of each: by default 0."""

    tokens: tuple[int, ...]
    types: tuple[int, ...] = ()


def pack_texts(lengths: Sequence[int], chunk: int) -> list[list[int]]:
    """Return the texts of each step, by number: few steps of at most ``chunk`` rows.

    The longest text goes first, each into the first step that has room for it. Raises InvalidInput
    for a text without tokens or with more than ``chunk``.
    """
    steps: list[list[int]] = []
    rooms: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        if not 1 <= length <= chunk:
            raise InvalidInput(f"text {number} has {length} tokens; the model takes 1 to {chunk}")
        place = next((place for place, room in enumerate(rooms) if room >= length), len(steps))
        if place == len(steps):
            steps.append([])
            rooms.append(chunk)
        steps[place].append(number)
        rooms[place] -= length
    return [sorted(step) for step in steps]


def make_text_arrays(texts: Sequence[EncodedText]) -> dict[str, npt.NDArray[Any]]:
    """Return a step of these texts as a model takes it, by name."""
    layout, spans, first = [], [], 0
    for text in texts:
        length = len(text.tokens)
        spans.append((first, length))
        kinds = text.types or (0,) * length
        layout += [(place, first, length, kind) for place, kind in enumerate(kinds)]
        first += length
    tokens = [token for text in texts for token in text.tokens]
    return {
        "tokens": np.array(tokens, np.int32),
        "layout": np.array(layout, np.int32),
        "texts": np.array(spans, np.int32),
    }
