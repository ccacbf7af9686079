"""Lookahead's drafts: n-grams of the text, and of a window of Jacobi iterations (arXiv 2402.02057).

Beside the tree of drafts a step feeds a window of ``columns`` columns and ``length - 1`` levels of
possible next tokens. Each level was made from the one before by one Jacobi iteration: the logits of
the last level extend every column by a token, to an n-gram. Noise depends on the position alone, so
the window's tokens are drawn with the noise that the final ones will have.

These n-grams, and those of the certain text, are drafts wherever their first tokens come again,
one token or more. The window's rows are no drafts: they are not in the tree, and nothing that they
say is taken for the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.ngrams import Followers, InstantDrafts
from splitup.decode.speculation.rates import DraftRate
from splitup.decode.speculation.tree import TreeNode

# by tokens that agree, from one on: the chance of the newest follower, and of each older one as a
# part of that before it. Of the example model's tokens, greedy and at T = 0.8, 52, 74 and 78 % were
# the newest, and 6, 2 and 2 % the next; most of these texts repeat themselves, others do it less.
_PRIORS: Final = ((0.3, 0.4), (0.5, 0.2), (0.7, 0.1))
_MOST_NGRAMS: Final = 4_096  # of a length; the oldest make room


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """W, N and G of the paper: window columns, length of n-grams, guesses behind a token.

    Raises InvalidInput for impossible numbers; ``check_chunk`` for more than the model's chunk.
    """

    columns: int = 7
    length: int = 4
    guesses: int = 7

    def __post_init__(self) -> None:
        if self.columns < 0 or self.length < 2 or self.guesses < 1:
            raise InvalidInput(
                f"lookahead with {self.columns} columns, n-grams of {self.length} and "
                f"{self.guesses} guesses is not possible; give at least 0, 2 and 1"
            )

    def check_chunk(self, chunk: int) -> None:
        """Raise InvalidInput unless a step of ``chunk`` rows holds the window and a guess.

        Without this check the decoder would leave out what has no room: the text would be right,
        but the options would not be those asked for.
        """
        rows = 1 + (self.columns + 1) * (self.length - 1)
        if rows > chunk:
            raise InvalidInput(
                f"lookahead with a window of {self.columns} columns and n-grams of {self.length} "
                f"takes {rows} rows a step with its token and one guess, and the model takes "
                f"{chunk}; give fewer columns or shorter n-grams"
            )
        if self.guesses >= chunk:
            raise InvalidInput(
                f"lookahead with {self.guesses} guesses takes a row for each, and the model takes "
                f"{chunk} a step with the token itself; give fewer"
            )


class LookaheadDrafts(InstantDrafts):
    """The window and the n-grams of one text."""

    def __init__(self, request: TextRequest, options: LookaheadOptions) -> None:
        self._request = request
        self._options = options
        self._of_text = self._make_followers()
        self._of_window = self._make_followers()
        prompt = request.prompt
        self._window = [  # levels of columns, filled with tokens of the prompt at first
            [prompt[(column + level) % len(prompt)] for column in range(options.columns)]
            for level in range(options.length - 1)
        ]
        self._begin = len(prompt)  # the position of the first column's first level
        self._root: TreeNode | None = None  # of the last step that had the window
        self._placed: list[list[TreeNode]] = []  # its columns, until their logits are here

    def _make_followers(self) -> Followers:
        rates = {}
        for length in range(self._options.length - 1, 0, -1):
            first, less = _PRIORS[min(length, len(_PRIORS)) - 1]
            chances = [first * less**rank for rank in range(self._options.guesses)]
            rates[length] = DraftRate(chances)
        return Followers(rates, _MOST_NGRAMS)

    def draft(self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]) -> None:
        """Draft from n-grams of the text, then of the window, so many ``guesses`` behind a node."""
        self._of_text.read(text)
        for node in nodes:
            node.seen_by.append(self)
            last = [*text[-len(self._window) :], *(node.list_path(root) or ())]
            for followers in (self._of_text, self._of_window):
                for rate, found in followers.find(last):
                    if (room := self._options.guesses - len(node.children)) > 0:
                        node.add_drafts(rate, found[:room], self._request.eos_ids)

    def place_columns(self, root: TreeNode, room: int) -> list[list[TreeNode]]:
        """Return the window's rows, or none if there is no room for all."""
        request, columns, levels = self._request, self._options.columns, len(self._window)
        last = len(request.prompt) + request.max_tokens - 2  # position of a token that is fed
        far = root.position + columns + levels - 1
        if columns * levels > room or far >= request.context or root.position >= last:
            return []
        begin, self._begin = self._begin, root.position + 1
        drop = min(self._begin - begin, columns)
        self._window = [[*level[drop:], *level[:drop]] for level in self._window]
        self._root, self._placed, spine = root, [], root
        for column in range(columns):
            nodes, node = [], spine
            for level in self._window:
                node = TreeNode(level[column], node.position + 1, node)
                nodes.append(node)
            spine = nodes[0]
            self._placed.append(nodes)
        return self._placed

    def learn(
        self, text: Sequence[int], nodes: Sequence[TreeNode], logits: npt.NDArray[np.float32]
    ) -> None:
        """Extend every column by a token, which makes n-grams, and drop the first level for it."""
        fresh: list[int] = []
        for column in self._placed:
            tip = column[-1]
            assert self._root is not None
            if tip.logits is None or np.isnan(tip.logits).any():
                return  # they come with another step, or say nothing
            known, path = tip.logits[: self._request.vocab], tip.list_path(self._root) or []
            [(token, _)] = self._request.sampler.rank(known, tip.position, 1, path)
            self._of_window.add([node.token for node in column], token)
            fresh.append(token)
        if fresh:
            self._window = [*self._window[1:], fresh]
            self._begin += 1
            self._placed = []


def make_lookahead_decoder(
    request: TextRequest,
    options: LookaheadOptions | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> SpeculativeDecoder:
    """Return a decoder with this source alone, which sends one step at a time."""
    drafts = LookaheadDrafts(request, options or LookaheadOptions())
    return SpeculativeDecoder(request, [drafts], Experience(), clock=clock)
