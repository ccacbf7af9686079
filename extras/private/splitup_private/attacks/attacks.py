"""Attacks that recover tokens from activations.

Who knows the weights computes what every token would have sent, and compares; behind the right
tokens before it, that is exact (SipIt, arXiv 2510.15511). Who does not learns from pairs of tokens
and activations, such as those of texts that he sent himself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.decode.step import make_causal_step, make_tree_step
from splitup_private.attacks.split_model import AttackedModel, AttackedText, Rows

Tokens = npt.NDArray[np.int64]

_SAME: Final = 1e-3  # relative distance of activations that rounding may explain
_PENALTIES: Final = (1e-4, 1e-2, 1.0)  # of the regression, relative to the features' variance
_HELD_BACK: Final = 8  # a pair in so many chooses the penalty


def invert(model: AttackedModel, tokens: Sequence[int], vocab: int, guesses: Tokens) -> int:
    """Return how many of a text's tokens are recovered from what is sent, with the weights.

    ``guesses``, int64 [tokens, any], are tried first; all others of the vocabulary follow. The
    attacker's own run of the model continues behind what he recovered, right or wrong.
    """
    victim, attacker = AttackedText(model), AttackedText(model)
    right = 0
    for place, token in enumerate(tokens):
        (seen,) = victim.send(make_causal_step([token], place))
        size = float(np.linalg.norm(seen)) or 1.0
        best, least = 0, np.inf
        for candidates in _list_candidates(guesses[place], vocab, model.chunk):
            step = make_tree_step(candidates, [-1] * len(candidates), place)
            distances = np.linalg.norm(attacker.send(step) - seen, axis=1) / size
            nearest = int(distances.argmin())
            if distances[nearest] < least:
                best, least = candidates[nearest], distances[nearest]
            if least < _SAME:
                break
        right += best == token
        attacker.send(make_causal_step([best], place))
    return right


def _list_candidates(guesses: Tokens, vocab: int, chunk: int) -> Iterator[list[int]]:
    first = [int(token) for token in guesses]
    known = set(first)
    order = first + [token for token in range(vocab) if token not in known]
    for begin in range(0, vocab, chunk):
        yield order[begin : begin + chunk]


class TokenDecoder:
    """A linear map from activations to tokens, and the nearest pair, learnt from pairs."""

    def __init__(self, activations: Rows, tokens: Tokens) -> None:
        """Learn from activations float32 [pairs, features] and tokens int64 [pairs]."""
        self._mean = activations.mean(axis=0)
        centred = (activations - self._mean).astype(np.float64)
        self._classes, labels = np.unique(tokens, return_inverse=True)
        held = np.arange(len(tokens)) % _HELD_BACK == 0
        scale = float(np.square(centred).mean()) or 1.0
        best = -1.0
        for penalty in _PENALTIES:
            weights = self._fit(centred[~held], labels[~held], penalty * scale)
            hits = (centred[held] @ weights).argmax(axis=1) == labels[held]
            if hits.mean() > best:
                best, chosen = float(hits.mean()), penalty
        self._weights = self._fit(centred, labels, chosen * scale)
        spread = np.linalg.cholesky(self._covariance(centred, chosen * scale))
        self._whiten = np.linalg.inv(spread).T
        self._pairs, self._labels = centred @ self._whiten, labels

    def _covariance(self, centred: npt.NDArray[Any], penalty: float) -> npt.NDArray[Any]:
        features = centred.shape[1]
        found: npt.NDArray[Any] = centred.T @ centred / len(centred) + penalty * np.eye(features)
        return found

    def _fit(
        self, centred: npt.NDArray[Any], labels: npt.NDArray[Any], penalty: float
    ) -> npt.NDArray[Any]:
        """Return the ridge regression of one-hot tokens, float64 [features, tokens]."""
        sums = np.zeros((len(self._classes), centred.shape[1]))
        np.add.at(sums, labels, centred)
        found: npt.NDArray[Any] = np.linalg.solve(
            self._covariance(centred, penalty), sums.T / len(centred)
        )
        return found

    def rank(self, activations: Rows, count: int) -> Tokens:
        """Return the likeliest tokens by the linear map, best first, int64 [rows, count]."""
        scores = (activations - self._mean) @ self._weights
        order = np.argsort(-scores, axis=1)[:, :count]
        found: Tokens = self._classes[order]
        return found

    def count_right(self, activations: Rows, tokens: Tokens) -> int:
        """Return how many tokens the better of both ways recovers."""
        linear = self.rank(activations, 1)[:, 0] == tokens
        points = (activations - self._mean) @ self._whiten
        squares = np.square(self._pairs).sum(axis=1)
        nearest = np.empty(len(points), np.int64)
        for begin in range(0, len(points), 256):
            part = points[begin : begin + 256]
            nearest[begin : begin + 256] = (squares - 2 * part @ self._pairs.T).argmin(axis=1)
        near = self._classes[self._labels[nearest]] == tokens
        return int(max(linear.sum(), near.sum()))
