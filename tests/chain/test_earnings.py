from __future__ import annotations

import datetime
from typing import Any

from splitup.chain.earnings import Day, sum_days
from splitup.chain.event_stream import ChainEvent
from splitup.crypto.quorum import pack_words
from tests.builders import address

OURS, OTHER = address(1), address(2)
FIRST = datetime.date(2026, 3, 1)
SECOND = datetime.date(2026, 3, 2)


def make_event(block_number: int, name: str, **args: Any) -> ChainEvent:
    args = {"executionId": f"0x{block_number:064x}", **args}
    return ChainEvent(name, args, block_number, f"0x{block_number:064x}", 0, "0x", "market")


def test_payments_and_losses_go_to_the_day_of_their_block() -> None:
    events = [
        make_event(9, "Settled", paid=5, fee=0, payouts=pack_words([(OURS, 5)])),  # a day earlier
        make_event(10, "Settled", paid=9, fee=1, payouts=pack_words([(OURS, 7), (OTHER, 2)])),
        make_event(19, "Rewarded", to=OURS, amount=3),
        make_event(19, "Rewarded", to=OTHER, amount=100),
        make_event(20, "Settled", paid=11, fee=0, payouts=pack_words([(OURS, 11)])),
        make_event(21, "Slashed", taken=pack_words([(OURS, 1_000), (OTHER, 1)])),
        make_event(22, "Settled", paid=1, fee=0, payouts=pack_words([(OTHER, 1)])),
    ]
    assert sum_days([FIRST, SECOND], [10, 20], events, OURS) == [
        Day(FIRST, executions=1, paid=7, rewards=3),
        Day(SECOND, executions=1, paid=11, slashed=1_000),
    ]


def test_a_day_without_a_block_is_empty() -> None:
    events = [make_event(10, "Settled", paid=5, fee=0, payouts=pack_words([(OURS, 5)]))]
    days = sum_days([FIRST, SECOND], [10, 10], events, OURS)
    assert [day.paid for day in days] == [0, 5]
