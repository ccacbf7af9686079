"""What is learnt while speculating: how often drafts come true, and how long steps take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RANKS: Final = 8  # drafts of one source behind one token
_PRIOR_WEIGHT: Final = 20.0  # as many observations as the prior counts for
_MEMORY: Final = 2_000.0  # observations that count; older ones fade
_STEP_MEMORY: Final = 0.9  # weight of a step's time against that of the next one
_PRIOR_SLOPE: Final = 1 / 200  # a row takes this part of the mean step, until it is measured
_SLOPE_WEIGHT: Final = 200.0  # rows squared, by which the slope before any measurement counts
_LEAST_S: Final = 1e-6
_LEAST_GAIN: Final = 1.05  # times the tokens per second of steps without drafts
_TRIAL_ROUNDS: Final = 8  # over which either is measured
_FEW_ROUNDS: Final = 2  # without drafts, where they should pay by what steps of each model take
_FIRST_PAUSE: Final = 64  # tokens without drafts before the next trial
_PAUSE_GROWTH: Final = 4
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
    """Whether drafts pay: tokens per second with them, against those of steps of one row."""

    def __init__(
        self,
        *,
        trial_rounds: int = _TRIAL_ROUNDS,
        first_pause: int = _FIRST_PAUSE,
        pause_growth: int = _PAUSE_GROWTH,
    ) -> None:
        """Take over how many rounds drafts are measured, and after how many tokens again."""
        self._trial_rounds, self._first_pause, self._growth = (
            trial_rounds,
            first_pause,
            pause_growth,
        )
        self._plain_s: float | None = None  # per token, without drafts
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0
        self._pause, self._next_pause = 0, first_pause

    @property
    def is_paused(self) -> bool:
        """Return whether to do without drafts for now."""
        return self._pause > 0

    def learn(self, tokens: int, seconds: float, *, is_doubtful: bool) -> None:
        """Note a round; first come some without drafts, more if these are ``is_doubtful``."""
        if self._pause:
            self._pause = max(self._pause - tokens, 0)
            known_s = seconds if self._plain_s is None else self._plain_s
            self._plain_s = known_s + (seconds / tokens - known_s) / 4
            return
        if self._plain_s is None:
            self._pause = _TRIAL_ROUNDS if is_doubtful else _FEW_ROUNDS
            return
        self._rounds += 1
        self._tokens += tokens
        self._seconds += seconds
        if self._rounds < self._trial_rounds:
            return
        if self._tokens * self._plain_s < _LEAST_GAIN * self._seconds:
            self._pause, self._next_pause = self._next_pause, self._growth * self._next_pause
        else:
            self._next_pause = self._first_pause
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0
