"""Simulate the protocol's selection of nodes over many seeds and snapshots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from splitup.messages.snapshots import Snapshot
from splitup.protocol.planning.sampling_clocks import EXECUTOR, compute_weight
from splitup.protocol.planning.selection import CandidatePool, Index, rank
from splitup.protocol.snapshots.fairness import compute_credits
from tests.builders import NO_TERMS, make_snapshot

UNIT = 1_000_000_000  # micro-USDC of stake that weigh 1


@dataclass(frozen=True)
class Kind:
    """A node of the market: stake in units, round trip in ms, its credit at the start."""

    stake: float = 1
    rtt_ms: int = 99  # an ETA of 100 ms
    credit_milli: int = 0


def make_market(kinds: Sequence[Kind]) -> Snapshot:
    """Return a snapshot of nodes 1 … n of these kinds."""
    numbered = dict(enumerate(kinds, start=1))
    return make_snapshot(
        len(kinds),
        0,
        stakes={n: round(kind.stake * UNIT) for n, kind in numbered.items()},
        rtts={n: kind.rtt_ms for n, kind in numbered.items()},
        figures={n: {"credit_milli": kind.credit_milli} for n, kind in numbered.items()},
    )


def make_seed(number: int) -> str:
    return "0x" + sha256(f"lottery {number}".encode()).hexdigest()


def count_wins(snapshot: Snapshot, seed: int, draws: int) -> list[int]:
    """Return how often each node is first, in as many tasks of one seed."""
    rows = np.arange(len(snapshot.entries))
    pools = [CandidatePool(task, NO_TERMS, rows) for task in range(draws)]
    orders = rank(make_seed(seed), EXECUTOR, pools, snapshot.once(Index), 1)
    wins = Counter(order[0] for order in orders)
    return [wins[row] for row in range(len(rows))]


def compute_shares(snapshot: Snapshot) -> list[float]:
    """Return the expected shares, by weight."""
    reference = snapshot.once(Index).reference
    weights = [compute_weight(entry, NO_TERMS, reference) for entry in snapshot.entries]
    return [weight / sum(weights) for weight in weights]


def compute_p_value(wins: Sequence[int], shares: Sequence[float]) -> float:
    """Return the p-value of a χ² test with an even number of degrees of freedom."""
    half, rest = divmod(len(wins) - 1, 2)
    assert rest == 0, "the closed form is for an odd number of nodes"
    draws = sum(wins)
    pairs = zip(wins, shares, strict=True)
    x = sum((won - draws * share) ** 2 / (draws * share) for won, share in pairs) / 2
    return math.exp(-x) * sum(x**i / math.factorial(i) for i in range(half))


def compute_ks_distance(values: Sequence[float]) -> float:
    """Return the largest distance of the values' distribution from the uniform one."""
    ordered, count = sorted(values), len(values)
    return max(
        max((place + 1) / count - value, value - place / count)
        for place, value in enumerate(ordered)
    )


@dataclass(frozen=True)
class History:
    """The work of each node over the snapshots of a run."""

    shares: list[float]
    longest_gaps: list[int]  # snapshots in a row without work


def run_market(
    kinds: Sequence[Kind],
    *,
    rounds: int,
    tasks: int,
    seed: int,
    is_fair: bool = True,
    quitters: Collection[int] = (),
) -> History:
    """Assign ``tasks`` equal tasks per snapshot; ``quitters`` come back whenever they are in debt.

    Coming back means missing one snapshot, and its work, to begin at credit 0.
    """
    nodes = [entry.node for entry in make_market(kinds).entries]
    stakes = {node: round(kind.stake * UNIT) for node, kind in zip(nodes, kinds, strict=True)}
    credits: Mapping[str, int] = {}
    won, gaps, longest = ([0] * len(kinds) for _ in range(3))
    for number in range(rounds):
        away = {row for row in quitters if credits.get(nodes[row], 0) < 0}
        here = [row for row in range(len(kinds)) if row not in away]
        present = [
            Kind(kinds[row].stake, kinds[row].rtt_ms, credits.get(nodes[row], 0) * is_fair)
            for row in here
        ]
        wins = count_wins(make_market(present), seed * rounds + number, tasks)
        assigned = dict(zip((nodes[row] for row in here), wins, strict=True))
        alive = {nodes[row]: stakes[nodes[row]] for row in here}
        credits = compute_credits(alive, credits, assigned)
        for row in range(len(kinds)):
            got = assigned.get(nodes[row], 0)
            won[row] += got
            gaps[row] = 0 if got else gaps[row] + 1
            longest[row] = max(longest[row], gaps[row])
    return History([count / (rounds * tasks) for count in won], longest)
