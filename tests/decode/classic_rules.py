"""The classic rules of stochastic verification, as a reference for what the product does not need.

A drafter without the sampler's noise proposes siblings behind a token: drawn from its distribution
q (independently, or without replacement), or the largest of q. The target, of distribution p,
accepts one of them or draws a token by itself, so that the result has distribution p
(arXiv 2211.17192, 2305.09781). SplitUp's decoder draws the target's token first and looks whether
it was proposed, which is exact for any proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Chances = npt.NDArray[np.float64]
Drawn = tuple[float, tuple[int, ...]]  # a probability, and siblings
Rule = Callable[[Chances, Chances, Sequence[int]], Chances]  # p, q, siblings -> token's chances


def normalise(values: Chances) -> Chances:
    total = values.sum()
    return values / total if total > 0 else values


def verify_independent(p: Chances, q: Chances, siblings: Sequence[int]) -> Chances:
    """Accept x with min(1, p(x) / q(x)), else p becomes the normalised positive part of p - q."""
    return _verify(p, q, siblings, removes=False)


def verify_without_replacement(p: Chances, q: Chances, siblings: Sequence[int]) -> Chances:
    """Do the same; after a rejection x is also taken out of q."""
    return _verify(p, q, siblings, removes=True)


def _verify(p: Chances, q: Chances, siblings: Sequence[int], *, removes: bool) -> Chances:
    result, left = np.zeros_like(p), 1.0
    for x in siblings:
        accepted = min(1.0, p[x] / q[x]) if q[x] else 1.0
        result[x] += left * accepted
        left *= 1 - accepted
        p = normalise(np.maximum(p - q, 0.0))
        if removes:
            q = q.copy()
            q[x] = 0.0
            q = normalise(q)
    return result + left * p


def verify_deterministic(p: Chances, q: Chances, siblings: Sequence[int]) -> Chances:
    """Accept x with p(x), else p loses x and is normalised."""
    result, left = np.zeros_like(p), 1.0
    for x in siblings:
        result[x] += left * p[x]
        left *= 1 - p[x]
        p = p.copy()
        p[x] = 0.0
        p = normalise(p)
    return result + left * p


def accept_any_branch(p: Chances, q: Chances, siblings: Sequence[int]) -> Chances:
    """Test every sibling by itself and take the first that passes: not p, and often seen."""
    result, left = np.zeros_like(p), 1.0
    for x in siblings:
        accepted = min(1.0, p[x] / q[x])
        result[x] += left * accepted
        left *= 1 - accepted
    return result + left * normalise(np.maximum(p - q, 0.0))


def draw_independent(q: Chances, count: int) -> Iterator[Drawn]:
    """Yield every outcome of ``count`` independent draws, with its probability."""
    yield from _draw(q, count, removes=False)


def draw_without_replacement(q: Chances, count: int) -> Iterator[Drawn]:
    """Yield every outcome of draws of different tokens, with its probability."""
    yield from _draw(q, count, removes=True)


def _draw(q: Chances, count: int, *, removes: bool) -> Iterator[Drawn]:
    if not count:
        yield 1.0, ()
        return
    for x, chance in enumerate(q):
        if chance > 0:
            rest = q.copy()
            if removes:
                rest[x] = 0.0
                rest = normalise(rest)
            for other, drawn in _draw(rest, count - 1, removes=removes):
                yield chance * other, (x, *drawn)


def take_largest(q: Chances, count: int) -> Iterator[Drawn]:
    """Yield the one outcome: the tokens of the largest chances."""
    yield 1.0, tuple(int(x) for x in np.argsort(-q, kind="stable")[:count])
