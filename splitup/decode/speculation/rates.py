"""What is learnt while speculating: how often drafts come true, and how long steps take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

RANKS: Final = 8  # drafts of one source behind one token
_PRIOR_WEIGHT: Final = 10.0  # as many observations as the prior counts for
_MEMORY: Final = 2_000.0  # observations that count; older ones fade
_STEP_MEMORY: Final = 0.97  # weight of a step's time against that of the next one
_PRIOR_SLOPE: Final = 1 / 32  # a row takes this part of the mean step, until it is measured
_SLOPE_WEIGHT: Final = 10.0  # rows squared, by which the slope before any measurement counts
_LEAST_S: Final = 1e-6
_OUTLIER: Final = 4.0  # times the mean, such as a node that was replaced
_FIRST_PLAIN: Final = 2  # rounds without drafts, to compare with
_PLAIN_MEMORY: Final = 0.9  # weight of a round without drafts against that of the next one
_TOKEN_MEMORY: Final = 1 - 1 / 512  # the same of a round with drafts, by tokens that follow
_CONFIDENCE: Final = 1.5  # standard errors to the upper bound
_PRIOR_SPREAD: Final = 0.5  # tokens squared, of a round, before any is known
_SPREAD_WEIGHT: Final = 8.0  # as many rounds as that counts for


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
        self.line = 1.0, _PRIOR_SLOPE  # seconds of no row, and of each, until a step is measured

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
    without drafts takes p. Drafts are used as long as the upper confidence bound of the mean is
    above 0. Observations fade with the tokens that follow, so the bound of drafts that are not used
    rises again, the later the more they lost.
    """

    def __init__(self) -> None:
        self.is_paused = False  # whether to do without drafts for now
        self._plain_rounds = 0
        self._plain = np.zeros(2)  # without drafts: sums of tokens and seconds
        self._drafted = np.zeros(6)  # of ones, tokens, seconds, and their products two by two

    def learn(self, tokens: int, seconds: float, step_s: float) -> None:
        """Note a round, without drafts if these were paused; a step of one row takes ``step_s``.

        That is by the line over rows, which also steps with drafts tell.
        """
        self._drafted *= _TOKEN_MEMORY**tokens
        if self.is_paused:
            self._plain_rounds += 1
            self._plain = self._plain * _PLAIN_MEMORY + (tokens, seconds)
        else:
            products = tokens**2, tokens * seconds, seconds**2
            self._drafted += (1.0, tokens, seconds, *products)
        self.is_paused = self._plain_rounds < _FIRST_PLAIN or self._bound_saving(step_s) < 0

    def _bound_saving(self, step_s: float) -> float:
        """Return the upper confidence bound of the seconds that a round with drafts saves."""
        count, tokens, seconds, squares, products, squares_s = self._drafted
        if not count:
            return math.inf
        token_s = min(self._plain[1] / self._plain[0], step_s)
        saved_s = (token_s * tokens - seconds) / count
        spread = token_s**2 * squares - 2 * token_s * products + squares_s - count * saved_s**2
        spread += _SPREAD_WEIGHT * _PRIOR_SPREAD * token_s**2
        error = max(spread, 0.0) / (count + _SPREAD_WEIGHT) / count
        return float(saved_s + _CONFIDENCE * math.sqrt(error))
