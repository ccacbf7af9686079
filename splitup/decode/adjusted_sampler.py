"""Sampling that depends on the text so far: penalties, biases, grammars, recorded probabilities.

It counts the tokens that it chooses, so it serves one text and a decoder that chooses every token
once, in order (``SequentialDecoder``), or it is told the text before each choice (``follow``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.decode.sampler import Sampler, find_largest

MAX_PENALTY: Final = 2.0
MAX_REPETITION: Final = 10.0
MAX_BIAS: Final = 100.0
MAX_TOP_LOGPROBS: Final = 20


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What changes the logits before they are sampled, in this order.

    ``repetition_penalty`` divides positive logits of tokens that the prompt or the text has, and
    multiplies negative ones (CTRL, arXiv 1909.05858). ``frequency_penalty`` is subtracted once per
    earlier choice of a token, ``presence_penalty`` once if there was any; tokens of the prompt do
    not count for these two. ``bias`` is added to single tokens.
    ``top_logprobs``: how many of the likeliest tokens are recorded with each choice, None for no
    record. Raises InvalidInput for values out of range.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("frequency_penalty", "presence_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give a number from -2 to 2")
        if not 1 / MAX_REPETITION <= self.repetition_penalty <= MAX_REPETITION:
            raise InvalidInput(
                f"repetition_penalty is {self.repetition_penalty}; give a number from 0.1 to 10"
            )
        for token, value in self.bias:
            if token < 0 or not abs(value) <= MAX_BIAS:
                raise InvalidInput(f"the bias of token {token} is {value}; give -100 to 100")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidInput(f"top_logprobs is {self.top_logprobs}; give 0 to {MAX_TOP_LOGPROBS}")

    @property
    def is_empty(self) -> bool:
        """Return whether the plain sampler does the same."""
        return self == Adjustments()


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token: natural logarithms of the model's own probabilities, before adjustments."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenFilter(Protocol):
    """Which tokens may follow one text, as a grammar says."""

    async def ready(self) -> None:
        """Compute the mask of the next token. A decoder waits for it while logits are computed."""
        ...

    def get_mask(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow, bool [vocab], after ``ready``."""
        ...

    def accept(self, token: int) -> None:
        """Continue the text by a token."""
        ...


class AdjustedSampler:
    """A ``Sampler`` behind ``Adjustments`` and a ``TokenFilter``, for one text."""

    def __init__(
        self,
        sampler: Sampler,
        adjustments: Adjustments,
        vocab: int,
        allowed: TokenFilter | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        unknown = [token for token, _ in adjustments.bias if token >= vocab]
        if unknown:
            raise InvalidInput(f"token {unknown[0]} of logit_bias is outside the {vocab} tokens")
        self._sampler = sampler
        self._adjustments = adjustments
        self._allowed = allowed
        self.follow(prompt)
        self.choices: list[Choice] = []  # in order, also a token that ends the text

    def follow(self, prompt: Sequence[int], chosen: Sequence[int] = ()) -> None:
        """Take this as the text so far: a prompt, and the tokens chosen behind it."""
        self._prompt = frozenset(prompt)
        self._counts: dict[int, int] = dict(Counter(chosen))

    async def ready(self) -> None:
        """Wait until it is known which tokens may follow."""
        if self._allowed is not None:
            await self._allowed.ready()

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """Return the token that follows ``position``; raise InvalidInput as ``Sampler`` does."""
        token = self._sampler.choose(self._adjust(logits), position)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._allowed is not None:
            self._allowed.accept(token)
        if self._adjustments.top_logprobs is not None:
            self.choices.append(_describe(token, logits, self._adjustments.top_logprobs))
        return token

    def rank(
        self, logits: npt.NDArray[np.float32], position: int, count: int, ahead: Sequence[int]
    ) -> list[tuple[int, float]]:
        """Return what may be chosen after ``ahead``, with its penalties; grammars are left out."""
        return self._sampler.rank(self._penalise(logits, ahead), position, count, ahead)

    def prepare(self, position: int, count: int) -> None:
        """Compute the noise of a position ahead."""
        self._sampler.prepare(position, count)

    def _adjust(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        adjusted = self._penalise(logits, ())
        if self._allowed is not None:
            adjusted = np.where(self._allowed.get_mask(), adjusted, np.float32(-np.inf))
            if np.isneginf(adjusted.max()):
                raise InvalidInput("the model gives no token that the grammar allows a probability")
        return adjusted

    def _penalise(
        self, logits: npt.NDArray[np.float32], ahead: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """Return the logits after penalties and biases, as if ``ahead`` were chosen already."""
        ours = self._adjustments
        repetition = np.float32(ours.repetition_penalty)
        is_plain = not ours.frequency_penalty and not ours.presence_penalty and repetition == 1
        if is_plain and not ours.bias:
            return logits
        adjusted = logits.copy()
        counts = Counter(self._counts)
        counts.update(ahead)
        if repetition != 1:
            repeated = list(self._prompt.union(counts))
            found = adjusted[repeated]
            adjusted[repeated] = np.where(found > 0, found / repetition, found * repetition)
        for token, count in counts.items():
            adjusted[token] -= ours.frequency_penalty * count + ours.presence_penalty
        for token, value in ours.bias:
            adjusted[token] += value
        return adjusted


def _describe(token: int, logits: npt.NDArray[np.float32], count: int) -> Choice:
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    top: tuple[tuple[int, float], ...] = ()
    if count:
        top = tuple((int(each), float(logprobs[each])) for each in find_largest(logprobs, count))
    return Choice(token, float(logprobs[token]), top)
