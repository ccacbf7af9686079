"""The tree of drafts below the last certain token, and which of its nodes a step should hold.

A node is a token that may come. Its ``chance`` is that the target chooses it if all before it are
right; its reach is the product of the chances on its path. A step that holds the last certain token
and other nodes gives as many tokens as their reaches add up to, on average, because the target's
token behind an accepted node needs no node of its own. So the best nodes are those of the greatest
reach, and one more is worth its row as long as it raises tokens per second (the idea of Sequoia,
arXiv 2402.12374).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.decode.speculation.rates import DraftRate

LEAST_REACH: Final = 0.004  # below it a node is not sent


@dataclass(slots=True, eq=False)
class TreeNode:
    """A token at a position; the root of a tree is certain."""

    token: int
    position: int
    parent: TreeNode | None = None
    chance: float = 1.0
    children: dict[int, TreeNode] = field(default_factory=dict)  # by token
    drafts: list[tuple[DraftRate, tuple[int, ...]]] = field(default_factory=list)  # of each source
    seen_by: list[object] = field(default_factory=list)  # the sources that have drafted here
    logits: npt.NDArray[np.float32] | None = None  # the target's
    extended: list[TreeNode] | None = None  # nodes of its tree with new drafts, for a Frontier

    def add_drafts(self, rate: DraftRate, tokens: Sequence[int], ends: frozenset[int]) -> None:
        """Add the children that one source proposes, likeliest first; none for tokens that end."""
        self.drafts.append((rate, tuple(tokens)))
        if self.extended is not None:
            self.extended.append(self)
        for token, chance in zip(tokens, rate.chances, strict=False):
            if token in ends:
                continue  # nothing follows it, so its logits are of no use
            child = self.children.get(token)
            if child is None:
                child = TreeNode(token, self.position + 1, self, chance, extended=self.extended)
                self.children[token] = child
            else:
                child.chance = max(child.chance, chance)

    def list_path(self, root: TreeNode) -> list[int] | None:
        """Return the tokens after ``root`` up to here; None if this is not below ``root``."""
        path: list[int] = []
        node: TreeNode | None = self
        while node is not root:
            if node is None:
                return None
            path.append(node.token)
            node = node.parent
        return path[::-1]


Place = tuple[float, int, TreeNode]  # minus a node's reach, its number, itself


def walk(place: TreeNode, last_position: int) -> Iterator[tuple[float, TreeNode, TreeNode]]:
    """Yield ``place`` and all below it with its reach and parent, greatest reach first.

    Parents come before their children; ``place`` is given as its own.
    """
    order = itertools.count()  # of equal reaches the first comes first
    heap: list[tuple[float, int, TreeNode, TreeNode]] = [(-1.0, next(order), place, place)]
    while heap:
        negative, _, node, parent = heapq.heappop(heap)
        yield -negative, node, parent
        if node.position >= last_position:
            continue
        for child in node.children.values():
            if -negative * child.chance >= LEAST_REACH:
                heapq.heappush(heap, (negative * child.chance, next(order), child, node))


class Frontier:
    """The nodes below a root that a step may take, sorted by reach, parents before children."""

    def __init__(self, root: TreeNode, last_position: int) -> None:
        """Take the root, whose tree notes what is ``extended``, and the last node's position."""
        self.root = root
        self.places: list[Place] = []
        self.reaches: dict[TreeNode, float] = {}
        self._extended = [] if root.extended is None else root.extended
        self._last_position = last_position

    def _begin(self) -> None:
        self.places[:] = [(-1.0, 0, self.root)]
        self.reaches.clear()
        self.reaches[self.root] = 1.0
        self._extended[:] = [self.root]

    def take_drafts(self) -> list[Place]:
        """Put nodes of new drafts, and at first the root, into their places; return those.

        Where another source is surer of a node than before, all begins anew.
        """
        places, reaches, extended = self.places, self.reaches, self._extended
        if not (before := len(places)):
            self._begin()
        while extended:
            node = extended.pop()
            above = reaches.get(node)
            if above is None or node.position >= self._last_position:
                continue
            least = LEAST_REACH / above
            for child in node.children.values():
                if child.chance < least:
                    continue
                reach = above * child.chance
                if (known := reaches.get(child)) is None:
                    places.append((-reach, len(places), child))
                    reaches[child] = reach
                    if child.children:
                        extended.append(child)
                elif known != reach:
                    before = 0
                    self._begin()
                    break
        new = places[before:]
        if new:
            places.sort()
        return new

    def expect(
        self,
        awaited: Iterable[TreeNode],
        chances: Sequence[float],
        price: float,
    ) -> float:
        """Return the tokens that drafts to come add to a step, less what their rows are worth.

        They are guessed to have these ``chances`` behind each ``awaited`` node, whose children are
        the first of them. A row costs the ``price``.
        """
        tokens = 0.0
        for node in awaited:
            reach = self.reaches.get(node)
            if reach is None or node.position >= self._last_position:
                continue
            for chance in chances[len(node.children) :]:
                if reach * chance <= price:
                    break
                tokens += reach * chance - price
        return tokens


@dataclass(frozen=True, slots=True)
class RowChoice:
    """How many nodes a step takes, and the tokens, and tokens per second, to expect."""

    rows: int
    tokens: float
    tokens_per_s: float


def choose_rows(places: Sequence[Place], limit: int, constant_s: float, row_s: float) -> RowChoice:
    """Return how many of these nodes give the most tokens per second, ``limit`` at most.

    They are sorted by reach; a step takes ``constant_s`` seconds and ``row_s`` for each row.
    """
    rows, tokens, step_s = 0, 0.0, constant_s
    for negative, _, _ in places:
        if rows >= limit or -negative * step_s <= tokens * row_s:
            break
        rows, tokens, step_s = rows + 1, tokens - negative, step_s + row_s
    return RowChoice(rows, tokens, tokens / step_s)
