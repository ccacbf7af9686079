"""Drafts from the target's own guesses: what it says behind rows that turn out wrong.

A step pays for rows whose tokens are not accepted, and their logits come back too. The target's
token behind such a row is a guess of the target itself, by one Jacobi iteration, as those of the
window of lookahead decoding are (arXiv 2402.02057), but without a row of its own. Often the text
goes on like that behind another token: these n-grams are kept in a pool and drafted at once, while
a draft model is still computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest
from splitup.decode.speculation.ngrams import FollowerDrafts
from splitup.decode.speculation.rates import DraftRate
from splitup.decode.speculation.tree import TreeNode

_LENGTHS: Final = (3, 2, 1)  # tokens that have to agree, the longest first
_PRIOR: Final = (0.2,)
_MOST_ROWS: Final = 32  # of a step, the likeliest: each is ranked
_MOST_LOGITS: Final = 2**17  # that are ranked for a step: about a millisecond
_MOST_NGRAMS: Final = 4_096  # of a length; the oldest make room


class TargetNgramRates:
    """How often the pool's drafts come true, by how many tokens agree."""

    def __init__(self) -> None:
        self.by_length = {length: DraftRate(_PRIOR) for length in _LENGTHS}


class TargetNgrams(FollowerDrafts):
    """The pool of one text."""

    def __init__(self, request: TextRequest, rates: TargetNgramRates) -> None:
        super().__init__(request, rates.by_length, _MOST_NGRAMS)

    def learn(
        self, text: Sequence[int], nodes: Sequence[TreeNode], logits: npt.NDArray[np.float32]
    ) -> None:
        """Take a step's logits, float32 [R, vocab], behind ``nodes``, the likeliest first."""
        most_rows = min(_MOST_ROWS, _MOST_LOGITS // self._request.vocab)
        for node, row in zip(nodes[:most_rows], logits, strict=False):
            if np.isnan(row).any():
                continue
            path, top = [node.token], node
            while top.parent is not None:
                top = top.parent
                path.append(top.token)
            path.reverse()
            sampler, vocab = self._request.sampler, self._request.vocab
            ranked = sampler.rank(row[:vocab], node.position, 1, path[1:])
            if not ranked:  # a target worker keeps its logits
                continue
            before = (*text[max(top.position - self._longest, 0) : top.position], *path)
            self._followers.add(before, ranked[0][0])
