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
from collections.abc import Callable, Collection, Iterator, Sequence
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

    def add_drafts(self, rate: Rate, tokens: Sequence[int], ends: frozenset[int]) -> None:
        """Add the children that one source proposes, likeliest first; none for tokens that end."""
        self.drafts.append((rate, tuple(tokens)))
        for token, chance in zip(tokens, rate.chances, strict=False):
            if token in ends:
                continue  # nothing follows it, so its logits are of no use
            child = self.children.get(token)
            if child is None:
                self.children[token] = Node(token, self.position + 1, self, chance)
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


@dataclass(frozen=True, slots=True)
class Choice:
    """The nodes of a step, parents first, and the tokens per second to expect."""

    nodes: tuple[Node, ...]
    tokens: float
    tokens_per_s: float


Found = tuple[float, Node | None, Node]  # reach, a node or None for a guessed one, its parent


def walk(
    place: Node,
    reach: float,
    last_position: int,
    awaited: Collection[Node] = (),
    guessed: Sequence[float] = (),
) -> Iterator[Found]:
    """Yield ``place``, of this ``reach``, and all below it, greatest reach first.

    Parents come before their children; ``place`` is given as its own. Nodes whose drafts are
    ``awaited`` have children of the ``guessed`` chances.
    """
    order = itertools.count()  # of equal reaches the first comes first
    heap: list[tuple[float, int, Node | None, Node]] = [(-reach, next(order), place, place)]
    while heap:
        negative, _, node, parent = heapq.heappop(heap)
        yield -negative, node, parent
        if node is None or node.position >= last_position:
            continue
        if awaited and node in awaited:
            for chance in guessed:
                if -negative * chance >= LEAST_REACH:
                    heapq.heappush(heap, (negative * chance, next(order), None, node))
            continue
        for child in node.children.values():
            if -negative * child.chance >= LEAST_REACH:
                heapq.heappush(heap, (negative * child.chance, next(order), child, node))


def choose_nodes(
    found: Iterator[Found], compute_s: Callable[[int], float], *, limit: int, wait_s: float = 0.0
) -> Choice:
    """Return the nodes, of the greatest reach, that give the most tokens per second.

    ``compute_s`` gives the time of a step from its rows, ``limit`` is the most rows; the step
    begins ``wait_s`` seconds from now.
    """
    nodes: list[Node] = []
    tokens, best = 0.0, 0.0
    for rows, (reach, node, _) in enumerate(itertools.islice(found, limit), 1):
        rate = (tokens + reach) / (wait_s + compute_s(rows))
        if rate <= best:
            break
        tokens, best = tokens + reach, rate
        if node is not None:
            nodes.append(node)
    return Choice(tuple(nodes), tokens, best)
