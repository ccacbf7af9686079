"""Drafts that need no step: what followed the last tokens where they occurred before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest
from splitup.decode.speculation.rates import DraftRate
from splitup.decode.speculation.tree import TreeNode

_NGRAM_PRIORS: Final = {4: (0.75, 0.08), 3: (0.6, 0.1), 2: (0.3, 0.1)}  # by tokens that agree


class InstantDrafts(ABC):
    """A source that drafts at once, behind every node that it is given."""

    @abstractmethod
    def draft(self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]) -> None:
        """Draft behind ``nodes`` of the tree below ``root``, which is the last token of ``text``.

        It adds itself to ``seen_by`` of all of them.
        """

    def learn(  # noqa: B027 - most sources have nothing to learn
        self, text: Sequence[int], nodes: Sequence[TreeNode], logits: npt.NDArray[np.float32]
    ) -> None:
        """Take a step's logits, float32 [R, vocab], behind ``nodes``, the likeliest first."""

    def place_columns(self, root: TreeNode, room: int) -> list[list[TreeNode]]:
        """Return further rows for a step that begins at ``root``: at most ``room`` nodes.

        They are no drafts and not in the tree. Each node's parent is ``root`` or an earlier one; of
        each column the last node's logits are wanted.
        """
        return []


class Followers:
    """The newest followers of every few tokens that occurred."""

    def __init__(self, rates: Mapping[int, DraftRate], most: int | None = None) -> None:
        """Take the rates by how many tokens have to agree, most first.

        A rate has as many followers as ``chances``. After the ``most`` n-grams of a length the
        oldest make room.
        """
        self._rates = rates
        self._most = most
        self._known: dict[int, dict[tuple[int, ...], list[int]]] = {each: {} for each in rates}
        self._read = 0  # tokens of the text that are known as followers

    def read(self, text: Sequence[int]) -> None:
        """Note what is new in the text, which only grows."""
        longest = max(self._rates)
        for place in range(self._read, len(text)):
            self.add(text[max(place - longest, 0) : place], text[place])
        self._read = len(text)

    def add(self, before: Sequence[int], token: int) -> None:
        """Note that ``token`` followed the tokens ``before``."""
        for length, known in self._known.items():
            if len(before) < length:
                continue
            key = tuple(before[-length:])
            others = (each for each in known.pop(key, ()) if each != token)
            known[key] = [token, *others][: len(self._rates[length].chances)]
            if self._most is not None and len(known) > self._most:
                del known[next(iter(known))]

    def find(self, last: Sequence[int]) -> Iterator[tuple[DraftRate, list[int]]]:
        """Yield what followed the ``last`` tokens, newest first, where most of them agree first."""
        for length, known in self._known.items():
            if len(last) >= length and (found := known.get(tuple(last[-length:]))):
                yield self._rates[length], found


class NgramRates:
    """How often n-grams come true, by their length."""

    def __init__(self) -> None:
        self.by_length = {length: DraftRate(prior) for length, prior in _NGRAM_PRIORS.items()}


class FollowerDrafts(InstantDrafts):
    """What followed the last tokens, newest first, as far as it was noted."""

    def __init__(
        self, request: TextRequest, rates: Mapping[int, DraftRate], most: int | None = None
    ) -> None:
        self._request = request
        self._longest = max(rates)
        self._followers = Followers(rates, most)

    def draft(self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]) -> None:
        """Draft from what is known now."""
        for node in nodes:
            node.seen_by.append(self)
            last = [*text[-self._longest :], *(node.list_path(root) or ())]
            for rate, found in self._followers.find(last):
                node.add_drafts(rate, found, self._request.eos_ids)
                break


class NgramDrafts(FollowerDrafts):
    """What followed the last tokens where they occurred before in the text."""

    def __init__(self, request: TextRequest, rates: NgramRates) -> None:
        super().__init__(request, rates.by_length)

    def draft(self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]) -> None:
        """Draft from the text as it is now."""
        self._followers.read(text)
        super().draft(text, root, nodes)
