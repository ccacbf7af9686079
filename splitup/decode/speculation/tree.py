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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
        self._is_sorted = True
        if self.root.extended is not None:
            self.root.extended.clear()

    def take_drafts(self, first: int = 0) -> None:
        """Put the nodes of new drafts into their places, behind the ``first`` ones.

        Where another source is surer of a node that was there before, the next call sorts anew.
        """
        if first == 0 and not self._is_sorted:
            self._sort()
        extended = self.root.extended or set()
        waiting = [node for node in extended if node in self.reaches]
        extended.clear()
        while waiting:
            node = waiting.pop()
            if node.position >= self._last_position:
                continue
            for child in node.children.values():
                reach = self.reaches[node] * child.chance
                if (known := self.reaches.get(child)) is not None:
                    self._is_sorted = self._is_sorted and known == reach
                elif reach >= LEAST_REACH:
                    self.reaches[child] = reach
                    bisect.insort(self.places, (-reach, len(self.places), child), first)
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
        self, place: Node, awaited: Collection[Node], chances: Sequence[float]
    ) -> list[float]:
        """Return the reaches of ``list_unsent`` when drafts have come, greatest first.

        Those behind the ``awaited`` nodes are guessed: they have these ``chances``.
        """
        together: set[Node | None] = {place if place.is_sent else place.parent}
        extended = [place] if place.is_sent and place in awaited else []
        found = []
        for negative, _, node in self.places if not extended else ():
            if not node.is_sent and node.parent in together:
                found.append(-negative)
                if node in awaited:
                    extended.append(node)
                else:
                    together.add(node)
        for node in extended:
            if node.position < self._last_position:
                found += [self.reaches[node] * chance for chance in chances]
        found.sort(reverse=True)
        return found

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
    reaches: Iterable[float], compute_s: Callable[[int], float], *, limit: int, wait_s: float = 0.0
) -> Choice:
    """Return how many nodes, of these reaches, give the most tokens per second.

    ``reaches`` decrease. ``compute_s`` gives the time of a step from its rows, ``limit`` is the
    most rows; the step begins ``wait_s`` seconds from now.
    """
    rows, tokens, best = 0, 0.0, 0.0
    for reach in itertools.islice(reaches, limit):
        rate = (tokens + reach) / (wait_s + compute_s(rows + 1))
        if rate <= best:
            break
        rows, tokens, best = rows + 1, tokens + reach, rate
    return Choice(rows, tokens, best)
