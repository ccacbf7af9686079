"""What a lie costs whoever gains outside the market, and what bit flips cost an honest node.

The floor F of exposures and the rules of ``NodeRegistry.sol`` decide: after k offences within a
week the floor is 4^k times as large, and all convictions of one hour count as one offence. Money is
in USDC. A node that was slashed adds to its stake what it lost, because it gets no work before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup.core import limits

FLOOR: Final = limits.EXPOSURE_FLOOR_MICRO_USDC / 1e6
RESERVE: Final = limits.VALIDATION_RESERVE_MICRO_USDC / 1e6
RAISE: Final = 4  # per offence
WINDOW_H: Final = 7 * 24.0  # an offence counts for so long after the one before
YEAR_H: Final = 365 * 24.0
HONEST_JUDGES: Final = 0.9**2  # (1-r)^k of the contract's condition
P: Final = 0.08
PER_HOUR: Final = 15

# An honest node at full load: 200 executions at once of two minutes each. Each runs two of the
# eight tasks that it holds; a conviction is final a minute after the execution's end.
EXECUTIONS: Final = 200
MINUTES: Final = 2.0
SHARE_OF_TASK: Final = 2 / 8
VERDICT_MINUTES: Final = 1.0
IN_WEIGHTS: Final = 0.9  # of the memory, so of the flips


def deter(sampling: float, offences: int = 0) -> float:
    """Return the largest gain outside, per lie, at which lying does not pay."""
    return sampling * HONEST_JUDGES * FLOOR * RAISE**offences


def count_executions(stake: float, offences: int = 0) -> int:
    """Return how many executions a stake covers at once, for tasks whose S is small."""
    free, count = stake - RESERVE, 0
    if offences == 0:
        return int(free / FLOOR)
    while free >= FLOOR:  # a raised exposure takes at most half of what is free
        free -= max(FLOOR, min(FLOOR * RAISE**offences, free / 2))
        count += 1
    return count


@dataclass(slots=True)
class Record:
    """A node's offences, as the registry counts them, and what it lost."""

    offences: int = 0
    offended_h: float = -WINDOW_H
    lost: float = 0.0

    def get_floor(self, now_h: float, stake: float) -> float:
        """Return what an execution that begins now locks besides S."""
        if now_h - self.offended_h >= WINDOW_H:
            self.offences = 0
        raised: float = FLOOR * RAISE**self.offences
        return max(FLOOR, min(raised, (stake - RESERVE) / 2))

    def convict(self, now_h: float, floor: float, times: int) -> None:
        """Take what as many executions locked; all within one hour."""
        if times:
            self.lost += floor * times
            self.offences = min(self.offences + 1, 8)
            self.offended_h = now_h


def lie_for_ever(seed: int, gain: float, stake: float) -> float:
    """Return what one more lie brings on average until the losses reach the stake, or for a week.

    The node lies in ``PER_HOUR`` executions an hour, and every first judge that is drawn is honest
    with the probability of a market with 10 % colluding nodes.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    record, lies = Record(), 0
    for hour in range(int(WINDOW_H)):
        floor = record.get_floor(hour, stake)
        found = int(rng.binomial(PER_HOUR, P * 0.9))
        lies += PER_HOUR
        record.convict(hour, floor, found)
        if record.lost >= stake:
            break
    return gain - record.lost / lies


def flip_bits(seed: int, flips_per_year: float, stake: float) -> float:
    """Return the share of its stake that an honest node keeps in a year of flipping bits.

    No flip is small enough to cost a tenth of F only. One in the weights makes all executions of a
    task wrong, until the first conviction takes the node off the market; those under way then still
    end wrong. Any other makes one execution wrong.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    record = Record()
    per_minute = EXECUTIONS / MINUTES * SHARE_OF_TASK
    for flip_h in np.sort(rng.random(rng.poisson(flips_per_year))) * YEAR_H:
        floor = record.get_floor(float(flip_h), stake)
        if rng.random() < IN_WEIGHTS:
            more = round(per_minute * (VERDICT_MINUTES + MINUTES))
            found = 1 + int(rng.binomial(more, P))
        else:
            found = int(rng.binomial(1, P))
        record.convict(float(flip_h), floor, found)
    return max(0.0, 1 - record.lost / stake)
