"""One step of a sequence model: its rows, their attention masks, what is kept and returned.

All decoders use a model through this one form (``docs/adr/0006-one-step-function.md``), which is
three inputs of the model. For a step of T rows, at most C (the model's chunk):

    tokens   int32 [T]          the rows' tokens
    outputs  int32 [R]          the rows whose logits are wanted, 1 to C of them
    layout   int32 [T, 2 + 2C]  per row
        column 0                its position in the sequence
        column 1                start: the number of valid cache rows; read from the first row
        columns 2 … 1 + C       1 + the new row whose key it attends to at position start + column,
                                0 for none; it attends to every cache row before the start
        columns 2 + C …         shifts of kept rows; read from the first row. Before anything else,
                                cache row start - C + column takes the row this many rows later

The T new rows are written to the cache from row ``start`` on; the next step says which of them it
keeps. Cache rows after them are lost. A valid row n of the cache holds position n. (Layers that see
a window keep the last rows only; how far steps may go back, the manifest says: ``steps_back``.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step feeds; row i has ``tokens[i]``, ``positions[i]`` and ``sees[i]``.

    ``start`` cache rows are valid. ``sees[i]`` are the new rows that row i attends to, itself
    included: one per position at most. ``kept`` are the rows of the step before that stay, in the
    order of their positions; rows that stay where they are need not be named. ``outputs`` are the
    rows whose logits are wanted.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    start: int
    sees: tuple[Sequence[int], ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.tokens)


class Decoder(ABC):
    """A decoding algorithm without I/O: it returns steps, takes logits, and returns tokens.

    A step may be run as soon as ``next_step`` returns it, before the logits of earlier steps are
    back. ``receive_logits`` is called with the number of the step, in order. ``request`` is what is
    generated, after which prompt; no token follows when it is ``finished``.
    """

    def __init__(self, request: TextRequest) -> None:
        self.request = request
        self.finished = False

    @property
    @abstractmethod
    def max_steps(self) -> int:
        """Return the largest number of further steps that may be needed."""

    @abstractmethod
    def next_step(self) -> StepInput | None:
        """Return the next step, or None while logits are awaited or all is done."""

    @abstractmethod
    def receive_logits(self, step: int, logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the logits of a step, float32 [R, vocab]; return the tokens they make certain.

        An end token finishes the machine and is not returned. Logits inside the prompt give
        nothing.
        """


def make_causal_step(
    tokens: Sequence[int],
    start: int,
    outputs: Sequence[int] | None = None,
    images: Sequence[range] = (),
) -> StepInput:
    """Return a step of consecutive tokens, each of which attends to those before it.

    Those at the positions of one of the ``images`` attend to all of it. By default the last token's
    logits are wanted.
    """
    count = len(tokens)
    sees = [range(row + 1) for row in range(count)]
    for image in images:
        for position in range(max(image.start, start), min(image.stop, start + count)):
            sees[position - start] = range(min(image.stop - start, count))
    return StepInput(
        tokens=tuple(tokens),
        positions=tuple(range(start, start + count)),
        start=start,
        sees=tuple(sees),
        outputs=(count - 1,) if outputs is None else tuple(outputs),
    )


def make_tree_step(
    tokens: Sequence[int],
    parents: Sequence[int],
    start: int,
    outputs: Sequence[int] | None = None,
    kept: Sequence[int] = (),
) -> StepInput:
    """Return a step of a tree of tokens: row i continues row ``parents[i]``, an earlier one.

    A parent of -1 is the end of the cache. By default all logits are wanted.
    """
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), row))
    return StepInput(
        tokens=tuple(tokens),
        positions=tuple(start + len(path) - 1 for path in paths),
        start=start,
        sees=tuple(paths),
        outputs=tuple(range(len(tokens))) if outputs is None else tuple(outputs),
        kept=tuple(kept),
    )


def make_block_step(
    tokens: Sequence[int],
    start: int,
    outputs: Sequence[int] | None = None,
    *,
    block_size: int | None = None,
) -> StepInput:
    """Return a step of consecutive tokens that all attend to each other.

    With ``block_size`` they are several blocks, of which each attends to itself and to those before
    it. By default all logits are wanted.
    """
    count = len(tokens)
    size = block_size or count
    return StepInput(
        tokens=tuple(tokens),
        positions=tuple(range(start, start + count)),
        start=start,
        sees=tuple(range(min(row // size * size + size, count)) for row in range(count)),
        outputs=tuple(range(count)) if outputs is None else tuple(outputs),
    )


def check_path(step: StepInput, last: StepInput | None) -> None:
    """Raise InvalidInput for a step that a model with recurrent layers cannot follow.

    Such layers cannot remove rows from their state. So a step starts where the ``last`` one started
    or later, or anew at 0; and every row continues one row before it: it attends to that row, to
    all that this row attends to, and to itself.
    """
    if last is not None and 0 < step.start < last.start:
        raise InvalidInput(
            f"a step starts at {step.start}, and the last one at {last.start}: this model has "
            "recurrent layers, which cannot go back; start at 0 and feed the sequence again"
        )
    for row, seen in enumerate(step.sees):
        path = sorted(seen, key=lambda other: step.positions[other])
        places = [step.positions[other] for other in path]
        leads = set(step.sees[path[-2]]) if len(path) > 1 else set()
        if (
            places != list(range(step.start, step.positions[row] + 1))
            or path[-1] != row
            or leads != set(path[:-1])
        ):
            raise InvalidInput(
                f"row {row} of a step does not follow one row before it: this model has recurrent "
                "layers, which take sequences and trees, and no blocks that see themselves"
            )


def make_arrays(step: StepInput, chunk: int) -> dict[str, npt.NDArray[Any]]:
    """Return a step as a model of this chunk takes it, by name.

    Raises InvalidInput for a step that the layout cannot hold: too many rows, a row that attends to
    two rows at one position, or to a position too far after the start.
    """
    count = len(step.tokens)
    if not 1 <= count <= chunk or not 1 <= len(step.outputs) <= chunk:
        raise InvalidInput(
            f"a step has {count} rows and {len(step.outputs)} wanted ones; "
            f"the model takes 1 to {chunk}"
        )
    layout = np.zeros((count, 2 + 2 * chunk), np.int32)
    layout[:, 0] = step.positions
    layout[0, 1] = step.start
    for row, seen in enumerate(step.sees):
        places = [step.positions[other] - step.start for other in seen]
        if len(set(places)) != len(places) or not all(0 <= place < chunk for place in places):
            raise InvalidInput(f"row {row} of a step sees two rows at a position, or none there")
        for place, other in zip(places, seen, strict=True):
            layout[row, 2 + place] = other + 1
    first = 2 + chunk + chunk - len(step.kept)
    for place, row in enumerate(step.kept):
        layout[0, first + place] = row - place
    return {
        "tokens": np.array(step.tokens, np.int32),
        "layout": layout,
        "outputs": np.array(step.outputs, np.int32),
    }


def read_arrays(arrays: Mapping[str, npt.NDArray[Any]], last_start: int) -> StepInput:
    """Return the step that ``make_arrays`` made these of; the one before began at ``last_start``.

    Its kept rows are all that lie between that and its own start.
    """
    layout = arrays["layout"]
    chunk, start = layout.shape[1] // 2 - 1, int(layout[0, 1])
    shifts = layout[0, layout.shape[1] - max(start - last_start, 0) :].tolist()
    return StepInput(
        tokens=tuple(arrays["tokens"].tolist()),
        positions=tuple(layout[:, 0].tolist()),
        start=start,
        sees=tuple(tuple((row[row > 0] - 1).tolist()) for row in layout[:, 2 : 2 + chunk]),
        outputs=tuple(arrays["outputs"].tolist()),
        kept=tuple(shift + place for place, shift in enumerate(shifts)),
    )
