"""Seed-coupled sampling: the token at a position is a pure function of logits, seed and position.

``argmax(logits / temperature + Gumbel(seed, position))`` draws from the softmax exactly (the
Gumbel-max trick), and because the noise depends on nothing but (seed, position), every decoder
that computes the same logits emits the same tokens, and a verifier can replay the choice.

Before the noise, in this order: divide by the temperature; keep the ``top_k`` largest; of these
keep the fewest that have a probability of ``top_p`` together, and of these the ones that are at
least ``min_p`` times as likely as the likeliest. Of equal logits the first counts as larger.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from splitup.core import tuning
from splitup.core.errors import Implausible, InvalidInput

_MAX_SEED = 2**64 - 1
_MAX_TEMPERATURE = 100.0  # above it tokens are practically uniform
_LIKELY = 1_024  # largest logits, which nearly always hold all that ``top_p`` keeps


class TokenChooser(Protocol):
    """What chooses tokens for a decoder."""

    async def ready(self) -> None:
        """Wait for what the next choice needs besides its logits."""
        ...

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """Return the token that follows ``position``; ``logits`` is float32 [vocab]."""
        ...

    def rank(
        self, logits: npt.NDArray[np.float32], position: int, count: int, ahead: Sequence[int]
    ) -> list[tuple[int, float]]:
        """Return what ``choose`` might choose from similar logits, likeliest first.

        At most ``count`` tokens with their scores, in the unit of logits. ``ahead`` are tokens that
        are not chosen yet but would be, up to ``position``.
        """
        ...

    def prepare(self, position: int, count: int) -> None:
        """Compute ahead what ``choose`` will need for ``count`` logits at this position."""
        ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """How tokens are chosen: ``temperature`` 0 takes the largest logit, ``seed`` keys the noise.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or not 0 <= self.temperature <= _MAX_TEMPERATURE:
            raise InvalidInput(
                f"temperature is {self.temperature}; give a number from 0 to {_MAX_TEMPERATURE:g}"
            )
        if not 0 <= self.seed <= _MAX_SEED:
            raise InvalidInput(f"seed is {self.seed}; give an integer from 0 to 2^64 - 1")
        if self.top_k < 0:
            raise InvalidInput(f"top_k is {self.top_k}; give 0 for all tokens, or how many")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p is {self.top_p}; give a number above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise InvalidInput(f"min_p is {self.min_p}; give a number from 0 to 1")

    async def ready(self) -> None:
        """Return at once: a choice needs nothing but its logits."""

    def choose(self, logits: npt.NDArray[np.float32], position: int, iteration: int = 0) -> int:
        """Return the token that follows ``position``.

        ``logits`` is float32 [vocab]. The first of equal maxima wins. Every ``iteration`` at a
        position has noise of its own. Raises Implausible when the logits hold a NaN.
        """
        if np.isnan(logits).any():
            raise Implausible(
                f"the logits at position {position} contain NaN: a node computes wrongly, or the "
                "model is broken; try again, with other nodes"
            )
        if self.temperature == 0:
            return int(np.argmax(logits))
        kept, scores = self._score(logits, position, iteration)
        best = int(np.argmax(scores))
        return best if kept is None else int(kept[best])

    def compute_probabilities(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return with which probability ``choose`` takes each token, float64 [vocab].

        At temperature 0, where it takes the likeliest, they are those of temperature 1.
        """
        scaled = logits.astype(np.float64) / (self.temperature or 1.0)
        with np.errstate(invalid="ignore"):  # of infinite logits all are NaN
            powers = np.exp(scaled - scaled.max())
        if self.temperature and (0 < self.top_k < logits.size or self.top_p < 1 or self.min_p):
            kept = self._find_kept(scaled)
            chosen = np.zeros_like(powers)
            chosen[kept] = powers[kept]
            powers = chosen
        return np.asarray(powers / powers.sum())

    def rank(
        self, logits: npt.NDArray[np.float32], position: int, count: int, ahead: Sequence[int] = ()
    ) -> list[tuple[int, float]]:
        """Return the tokens of the largest scores under the noise of this position."""
        if self.temperature == 0:
            kept, scores = None, logits.astype(np.float64)
        else:
            kept, scores = self._score(logits, position)
        best = find_largest(scores, count)
        tokens = best if kept is None else kept[best]
        found = scores[best] * (self.temperature or 1.0)
        return list(zip(tokens.tolist(), found.tolist(), strict=True))[:count]

    def prepare(self, position: int, count: int) -> None:
        """Compute the noise of a position ahead, while the ``count`` logits are awaited.

        It is most of the time that ``choose`` takes.
        """
        if self.temperature and not self.top_k and self.top_p == 1 and not self.min_p:
            _get_gumbel(self.seed, position, count, 0)

    def _score(
        self, logits: npt.NDArray[np.float32], position: int, iteration: int = 0
    ) -> tuple[npt.NDArray[np.intp] | None, npt.NDArray[np.float64]]:
        """Return the tokens that may be chosen, None for all, and their scores with noise."""
        scaled = logits.astype(np.float64) / self.temperature
        if 0 < self.top_k < logits.size or self.top_p < 1 or self.min_p:
            kept = self._find_kept(scaled)
            raw = _draw(self.seed, position, logits.size, iteration)
            return kept, scaled[kept] + _to_gumbel(raw[kept])
        return None, scaled + _get_gumbel(self.seed, position, logits.size, iteration)

    def _find_kept(self, scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """Return the tokens that the three limits leave, in the order of the vocabulary."""
        kept = self._find_top(scaled)
        if self.min_p:
            kept = kept[scaled[kept] >= scaled.max() + math.log(self.min_p)]
        return kept

    def _find_top(self, scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """Return the tokens that ``top_k`` and ``top_p`` leave, in the order of the vocabulary."""
        if self.top_p == 1:
            return np.sort(find_largest(scaled, self.top_k or scaled.size))
        for count in (self.top_k or _LIKELY, scaled.size):
            order = find_largest(scaled, count)
            powers = np.exp(scaled[order] - scaled[order[0]])
            whole = powers.sum() if self.top_k else np.exp(scaled - scaled[order[0]]).sum()
            enough = np.count_nonzero(np.cumsum(powers) - powers < self.top_p * whole)
            if self.top_k or enough < count:
                break  # otherwise smaller logits may have to be kept too
        return np.sort(order[: max(1, enough)])


def find_largest(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the ``count`` largest, largest first; of equal ones the first."""
    if count >= values.size:
        return np.argsort(-values, kind="stable")
    least = np.partition(values, -count)[-count]
    found = np.flatnonzero(values >= least)  # a tie at the end may be one too many
    return found[np.argsort(-values[found], kind="stable")][:count]


def compute_gumbel(
    seed: int, position: int, count: int, iteration: int = 0
) -> npt.NDArray[np.float64]:
    """Return ``count`` standard Gumbel values, float64 [count], of (seed, position, iteration).

    The raw Philox4x64-10 stream (Salmon et al., SC 2011) is the same in every numpy version and
    on every machine; numpy's own distributions are not.
    """
    return _to_gumbel(_draw(seed, position, count, iteration))


_get_gumbel = functools.lru_cache(tuning.NOISE_POSITIONS)(compute_gumbel)


def _draw(seed: int, position: int, count: int, iteration: int) -> npt.NDArray[np.uint64]:
    # an explicit counter: numpy would otherwise fill it from the operating system. Its highest word
    # is the iteration, so no iteration reaches the numbers of the next one.
    key = np.array([seed, position], dtype=np.uint64)
    counter = np.array([0, 0, 0, iteration], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(count)


def _to_gumbel(raw: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    uniform = (
        (raw >> np.uint64(11)).astype(np.float64) + 0.5
    ) * 2.0**-53  # in (0, 1), never an end
    return np.asarray(-np.log(-np.log(uniform)))
