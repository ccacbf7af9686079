"""Which tokens a model's cache holds, so that a later text can go on behind a common prefix."""

from __future__ import annotations

from collections.abc import Sequence

from splitup.core.errors import InvalidInput
from splitup.decode.step import StepInput, check_path


class CacheContents:
    """The valid rows of one cache, after the steps that were fed so far, in order.

    ``is_recurrent``: the model has layers that cannot go back (``splitup.decode.step.check_path``).
    ``steps_back``: how far a step may start before the furthest start, as in ``TextInfo``.
    ``block_size``: a row saw its whole block, so blocks are in common or not.
    """

    def __init__(
        self, *, is_recurrent: bool = False, steps_back: int | None = None, block_size: int = 1
    ) -> None:
        self._is_recurrent = is_recurrent
        self._steps_back = steps_back
        self._block_size = block_size
        self._furthest = 0  # start of the steps since one that started at 0
        self._before: list[int] = []  # tokens of the rows before the last step's start
        self._last: StepInput | None = None

    def feed(self, step: StepInput) -> None:
        """Note a step that is fed next; raise InvalidInput for one that the model cannot follow."""
        if self._is_recurrent:
            check_path(step, self._last)
        if 0 < step.start < self._first_start:
            raise InvalidInput(
                f"a step starts at {step.start}, {self._furthest - step.start} before the furthest "
                f"one: this model goes back by at most {self._steps_back}; start at 0 and feed the "
                "sequence again"
            )
        self._furthest = max(self._furthest, step.start) if step.start else 0
        if self._last is not None:
            rows = [*self._before, *self._last.tokens]
            first = step.start - len(step.kept)
            for place, row in enumerate(step.kept):
                rows[first + place] = self._last.tokens[row]
            self._before = rows[: step.start]
        self._last = step

    def count_common(self, tokens: Sequence[int]) -> int:
        """Return how many leading ``tokens`` need not be fed again.

        At least one token is always left to feed, because its logits are wanted.
        """
        if self._last is None:
            return 0
        valid = [*self._before, *_list_causal(self._last)]
        count = 0
        for held, wanted in zip(valid, tokens[:-1], strict=False):
            if held != wanted:
                break
            count += 1
        count = count // self._block_size * self._block_size
        if count < self._first_start or (self._is_recurrent and count < self._last.start):
            return 0
        return count

    @property
    def _first_start(self) -> int:
        """Return the first position besides 0 at which a step may start."""
        return 0 if self._steps_back is None else self._furthest - self._steps_back


def _list_causal(step: StepInput) -> Sequence[int]:
    """Return the tokens of the leading rows that form one sequence behind the start."""
    for row, seen in enumerate(step.sees):
        if step.positions[row] != step.start + row or sorted(seen) != list(range(row + 1)):
            return step.tokens[:row]
    return step.tokens
