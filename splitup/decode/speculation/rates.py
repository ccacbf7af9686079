"""What is learnt while speculating: how often drafts come true, and how long steps take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

RANKS: Final = 8  # drafts of one source behind one token
_PRIOR_WEIGHT: Final = 20.0  # as many observations as the prior counts for
_MEMORY: Final = 2_000.0  # observations that count; older ones fade
_STEP_MEMORY: Final = 0.9  # weight of a step's time against that of the next one
_PRIOR_SLOPE: Final = 1 / 200  # a row takes this part of the mean step, until it is measured
_SLOPE_WEIGHT: Final = 200.0  # rows squared, by which the slope before any measurement counts
_LEAST_S: Final = 1e-6
_FIRST_PLAIN: Final = 1.9  # rounds without drafts, to compare with
_PLAIN_KEPT: Final = 0.9
_TOKENS_KEPT: Final = 1 - 1 / 256
_CONFIDENCE: Final = 1.0
_PRIOR_SPREAD: Final = 1.0
_OUTLIER: Final = 4.0  # times the mean, such as a node that was replaced


class DraftRate:
    """How often the target's token is a source's first, second, … draft, in one situation."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._seen = _PRIOR_WEIGHT
        self._hits = [chance * _PRIOR_WEIGHT for chance in prior]
        self.chances = list(prior)

    def learn(self, rank: int | None) -> None:
        """Note the rank, from 0, that the target's token had; None for none."""
        if self._seen >= _MEMORY:
            self._seen /= 2
            self._hits = [hits / 2 for hits in self._hits]
        self._seen += 1
        if rank is not None and rank < len(self._hits):
            self._hits[rank] += 1
        self.chances = [hits / self._seen for hits in self._hits]


class StepTimes:
    """Seconds of a step as a line over its rows, by weighted least squares."""

    def __init__(self) -> None:
        # weighted sums: of ones, rows, seconds, rows squared, rows times seconds
        self._sums = 0.0, 0.0, 0.0, 0.0, 0.0
        self.line = 1.0, 0.0  # seconds of no row, and of each; a constant until a step is measured

    @property
    def is_known(self) -> bool:
        """Return whether a step was measured."""
        return self._sums[0] > 0

    def learn(self, rows: int, seconds: float) -> None:
        """Note a step that nothing else delayed."""
        weight, sum_rows, sum_s, squares, products = self._sums
        if weight:
            seconds = min(seconds, _OUTLIER * sum_s / weight)
        weight = _STEP_MEMORY * weight + 1
        sum_rows = _STEP_MEMORY * sum_rows + rows
        sum_s = _STEP_MEMORY * sum_s + seconds
        squares = _STEP_MEMORY * squares + rows * rows
        products = _STEP_MEMORY * products + rows * seconds
        self._sums = weight, sum_rows, sum_s, squares, products
        mean_rows, mean_s = sum_rows / weight, sum_s / weight
        spread = squares - mean_rows * sum_rows
        common = products - mean_rows * sum_s
        slope = (common + _SLOPE_WEIGHT * mean_s * _PRIOR_SLOPE) / (spread + _SLOPE_WEIGHT)
        slope = min(max(slope, 0.0), mean_s / (mean_rows + 1))
        self.line = max(mean_s - slope * mean_rows, _LEAST_S), slope

    def compute_s(self, rows: int) -> float:
        """Return the seconds to expect."""
        constant_s, row_s = self.line
        return constant_s + row_s * rows


class Pace:
    """Whether drafts pay, by what this pair and its nodes did so far.

    A round with drafts that gives n tokens in s seconds saves n * p - s seconds, where a token
    without drafts takes p. Drafts are used while the mean of that may be above 0: while its upper
    confidence bound is. Observations fade with the tokens that follow, so that the bound of drafts
    that are not used rises again, the later the more they lost.
    """

    def __init__(self) -> None:
        self._plain = 0.0, 0.0, 0.0  # rounds without drafts; sums of seconds, and of their squares
        # rounds with drafts; sums of tokens, seconds, tokens squared, the product, seconds squared
        self._drafted = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        self.is_paused = True  # whether to do without drafts for now

    def learn(self, tokens: int, seconds: float) -> None:
        """Note a round, which was one without drafts if these were paused."""
        kept = _TOKENS_KEPT**tokens
        if self.is_paused:
            each = seconds / tokens
            self._plain = _add(self._plain, _PLAIN_KEPT, (1.0, each, each**2))
            self._drafted = _add(self._drafted, kept)
        else:
            values = 1.0, tokens, seconds, tokens**2, tokens * seconds, seconds**2
            self._drafted = _add(self._drafted, kept, values)
        self.is_paused = self._plain[0] < _FIRST_PLAIN or self._bound_saving() < 0

    def _bound_saving(self) -> float:
        """Return the upper confidence bound of the seconds that a round with drafts saves."""
        count, tokens, seconds, tokens_2, both, seconds_2 = self._drafted
        if count < 1:
            return math.inf
        plain, plain_s, plain_s2 = self._plain
        mean_s = plain_s / plain
        token_s = min(mean_s, seconds / count)  # a round without drafts takes no longer
        saved = (token_s * tokens - seconds) / count
        squares = token_s**2 * (tokens_2 + _PRIOR_SPREAD) - 2 * token_s * both + seconds_2
        spread = max(squares / count - saved**2, 0.0)
        plain_spread = max(plain_s2 / plain - mean_s**2, 0.0)
        error = spread / count + (tokens / count) ** 2 * plain_spread / plain
        return saved + _CONFIDENCE * math.sqrt(error)


def _add(
    sums: tuple[float, ...], kept: float, values: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return sums of which a part is kept, and to which values are added."""
    added = values or (0.0,) * len(sums)
    return tuple(kept * total + value for total, value in zip(sums, added, strict=True))
