"""The tree of drafts below the last certain token, and which of its nodes a step should hold.

A node is a token that may come. Its ``chance`` is that the target chooses it if all before it are
right; its reach is the product of the chances on its path. A step that holds the last certain token
and other nodes gives as many tokens as their reaches add up to, on average, because the target's
token behind an accepted node needs no node of its own. So the best nodes are those of the greatest
reach, and one more is worth its row as long as it raises tokens per second (the idea of Sequoia,
arXiv 2402.12374).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.decode.speculation.rates import Rate

LEAST_REACH: Final = 0.004  # below it a node is not sent


@dataclass(slots=True, eq=False)
class Node:
    """A token at a position; the root of a tree is certain."""

    token: int
    position: int
    parent: Node | None = None
    chance: float = 1.0
    children: dict[int, Node] = field(default_factory=dict)  # by token
    drafts: list[tuple[Rate, tuple[int, ...]]] = field(default_factory=list)  # of each source
    seen_by: list[object] = field(default_factory=list)  # the sources that have drafted here
    is_sent: bool = False  # it is in a step whose logits are here or will come
    logits: npt.NDArray[np.float32] | None = None  # the target's
    extended: set[Node] | None = None  # nodes of its tree with new drafts, for a Frontier

    def add_drafts(self, rate: Rate, tokens: Sequence[int], ends: frozenset[int]) -> None:
        """Add the children that one source proposes, likeliest first; none for tokens that end."""
        self.drafts.append((rate, tuple(tokens)))
        if self.extended is not None:
            self.extended.add(self)
        for token, chance in zip(tokens, rate.chances, strict=False):
            if token in ends:
                continue  # nothing follows it, so its logits are of no use
            child = self.children.get(token)
            if child is None:
                child = Node(token, self.position + 1, self, chance, extended=self.extended)
                self.children[token] = child
            else:
                child.chance = max(child.chance, chance)

    def list_path(self, root: Node) -> list[int] | None:
        """Return the tokens after ``root`` up to here; None if this is not below ``root``."""
        path: list[int] = []
        node: Node | None = self
        while node is not root:
            if node is None:
                return None
            path.append(node.token)
            node = node.parent
        return path[::-1]


Place = tuple[float, int, Node]  # minus a node's reach, its number, itself


def walk(place: Node, last_position: int) -> Iterator[tuple[float, Node, Node]]:
    """Yield ``place`` and all below it with its reach and parent, greatest reach first.

    Parents come before their children; ``place`` is given as its own.
    """
    order = itertools.count()  # of equal reaches the first comes first
    heap: list[tuple[float, int, Node, Node]] = [(-1.0, next(order), place, place)]
    while heap:
        negative, _, node, parent = heapq.heappop(heap)
        yield -negative, node, parent
        if node.position >= last_position:
            continue
        for child in node.children.values():
            if -negative * child.chance >= LEAST_REACH:
                heapq.heappush(heap, (negative * child.chance, next(order), child, node))


class Frontier:
    """The nodes below a root that a step may take, sorted by reach, parents before children.

    They are sorted once for each root; nodes of new drafts are put into their places.
    """

    def __init__(self, root: Node, last_position: int) -> None:
        """Take the root, whose tree notes what is ``extended``, and where texts end."""
        self.root = root
        self._last_position = last_position
        self._sort()

    def _sort(self) -> None:
        self.places: list[Place] = []
        self.reaches: dict[Node, float] = {}
        for reach, node, _ in walk(self.root, self._last_position):
            self.places.append((-reach, len(self.places), node))
            self.reaches[node] = reach
        self.undrafted = list(self.places)
        self._is_sorted = True
        if self.root.extended is not None:
            self.root.extended.clear()

    def sort(self) -> None:
        """Take new drafts, and sort anew where another source is surer of a node than before."""
        self.take_drafts()
        if not self._is_sorted:
            self._sort()

    def take_drafts(self) -> None:
        """Put the nodes of new drafts into their places, which are behind their parents'."""
        extended = self.root.extended or set()
        waiting = [node for node in extended if node in self.reaches]
        extended.clear()
        while waiting:
            node = waiting.pop()
            if node.position >= self._last_position:
                continue
            above = self.reaches[node]
            for child in node.children.values():
                reach = above * child.chance
                if reach < LEAST_REACH:
                    continue
                if (known := self.reaches.get(child)) is not None:
                    self._is_sorted = self._is_sorted and known == reach
                    continue
                self.reaches[child] = reach
                place = (-reach, len(self.places), child)
                bisect.insort(self.places, place)
                bisect.insort(self.undrafted, place)
                if child.children:
                    waiting.append(child)

    def list_unsent(self, place: Node) -> Sequence[Place]:
        """Return the nodes that no step has taken, as far as they hang together with ``place``."""
        if not place.is_sent:  # the root; what is below a node that is not sent is not sent either
            return self.places
        together: set[Node | None] = {place}
        found = []
        for each in self.places:
            node = each[2]
            if not node.is_sent and node.parent in together:
                together.add(node)
                found.append(each)
        return found

    def expect(
        self,
        place: Node,
        unsent: Sequence[Place],
        awaited: Collection[Node],
        chances: Sequence[float],
    ) -> list[float]:
        """Return the reaches of those ``unsent`` below ``place`` when drafts have come.

        Greatest first. The drafts of the ``awaited`` nodes are guessed: they have these
        ``chances``, and take the place of what is below these nodes now.
        """
        if any(node.children for node in awaited):
            hidden: set[Node | None] = set(awaited)
            shown = []
            for found in unsent:
                if found[2] is not place and found[2].parent in hidden:
                    hidden.add(found[2])
                else:
                    shown.append(found)
            unsent = shown
        reaches = [-negative for negative, _, _ in unsent]
        nodes = {node for _, _, node in unsent}
        for node in awaited:
            if (node is place or node in nodes) and node.position < self._last_position:
                reach = self.reaches[node]
                least = LEAST_REACH / reach
                reaches += [reach * chance for chance in chances if chance >= least]
        reaches.sort(reverse=True)
        return reaches

    def find_unsent(self, awaited: Collection[Node], chances: Sequence[float]) -> Node | None:
        """Return the likeliest node that is sent and has a child that is not, or awaits one."""
        best, place = 0.0, None
        for negative, _, node in self.places:
            parent = node.parent
            if not node.is_sent and parent is not None and parent.is_sent:
                if parent not in awaited:
                    best, place = -negative, parent
                    break
        for node in awaited:
            reach = self.reaches.get(node, 0.0) * max(chances, default=0.0)
            if node.is_sent and node.position < self._last_position and reach >= LEAST_REACH:
                best, place = (reach, node) if reach > best else (best, place)
        return place


@dataclass(frozen=True, slots=True)
class Choice:
    """How many nodes a step takes, and the tokens, and tokens per second, to expect."""

    rows: int
    tokens: float
    tokens_per_s: float


def choose_rows(
    reaches: Iterable[float], seconds: Sequence[float], *, wait_s: float = 0.0
) -> Choice:
    """Return how many nodes, of these reaches, give the most tokens per second.

    ``reaches`` decrease. ``seconds`` are the times of steps of one row, two, …, as many as are
    allowed; the step begins ``wait_s`` seconds from now.
    """
    rows, tokens, best = 0, 0.0, 0.0
    for reach, step_s in zip(reaches, seconds, strict=False):
        rate = (tokens + reach) / (wait_s + step_s)
        if rate <= best:
            break
        rows, tokens, best = rows + 1, tokens + reach, rate
    return Choice(rows, tokens, best)
