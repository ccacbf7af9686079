"""Shares of time in which nodes were listed."""

from __future__ import annotations

from splitup_gateway.explorer.uptimes import HOURS, Uptimes


def test_shares_are_of_the_samples_of_the_last_day() -> None:
    uptimes = Uptimes()
    assert uptimes.get_share("a", 0) is None
    for minute in range(60):
        uptimes.add(["a", "b"] if minute % 4 else ["a"], minute * 60)
    assert uptimes.get_share("a", 3_599) == 1
    assert uptimes.get_share("b", 3_599) == 0.75
    assert uptimes.get_share("c", 3_599) == 0
    uptimes.add(["c"], 2 * 3_600)
    assert uptimes.get_share("a", 2 * 3_600) == 60 / 61
    assert uptimes.get_share("c", (HOURS + 1) * 3_600) == 1, "the first hour is forgotten"
    assert uptimes.get_share("c", (HOURS + 2) * 3_600) is None


def test_memory_is_bounded_by_hours_and_nodes() -> None:
    uptimes = Uptimes()
    for hour in range(100):
        uptimes.add([str(hour)], hour * 3_600)
    assert len(uptimes._hours) == HOURS
