"""What an account was paid, and what it lost, by day: from the Market's events alone."""

from __future__ import annotations

import asyncio
import bisect
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from splitup.chain.client import Chain
from splitup.chain.event_stream import ChainEvent
from splitup.chain.mentions import find_mentions

_DAY: Final = datetime.timedelta(days=1)


@dataclass(slots=True)
class Day:
    """One day in UTC; amounts in micro-USDC. ``rewards`` are its share of others' slashes."""

    date: datetime.date
    executions: int = 0
    paid: int = 0
    rewards: int = 0
    slashed: int = 0


def list_dates(days: int, now_s: float) -> list[datetime.date]:
    """Return the last ``days`` days in UTC, the earliest first; today is the last."""
    today = datetime.datetime.fromtimestamp(now_s, datetime.UTC).date()
    return [today - _DAY * back for back in reversed(range(days))]


async def fetch_days(chain: Chain, address: str, *, days: int, now_s: float) -> list[Day]:
    """Return the last ``days`` days, the earliest first; today is the last.

    Raises ChainUnavailable.
    """
    dates = list_dates(days, now_s)
    blocks = await asyncio.gather(*(chain.find_block(get_begin_s(date)) for date in dates))
    events = await chain.fetch_events("market", from_block=blocks[0])
    return sum_days(dates, blocks, events, address)


def sum_days(
    dates: Sequence[datetime.date],
    blocks: Sequence[int],
    events: Iterable[ChainEvent],
    address: str,
) -> list[Day]:
    """Return the days' sums; ``blocks`` are the numbers of each day's first block, ascending."""
    found = [Day(date) for date in dates]
    for event in events:
        if event.block_number < blocks[0]:
            continue
        day = found[bisect.bisect_right(blocks, event.block_number) - 1]
        for subject, role, amount in find_mentions(event):
            if subject != address or amount is None:
                continue
            match role:
                case "payout":
                    day.executions += 1
                    day.paid += amount
                case "reward":
                    day.rewards += amount
                case "slashed":
                    day.slashed += amount
    return found


def get_begin_s(date: datetime.date) -> int:
    """Return when a day begins, Unix time."""
    midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
    return int(midnight.timestamp())
