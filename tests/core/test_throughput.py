from __future__ import annotations

from splitup.core.throughput import Rate


def test_a_rate_is_unknown_then_exact_then_follows_the_latest_samples() -> None:
    rate = Rate()
    assert rate.per_ms(10**9) == 0
    rate.add(0, 5)
    rate.add(5, 0)
    assert rate == Rate()
    rate.add(3_000_000, 1_000_000)
    assert rate.per_ms(10**9) == 3_000_000
    for _ in range(60):
        rate.add(500_000, 1_000_000)
    assert 500_000 <= rate.per_ms(10**9) < 505_000
    assert rate.per_ms(1_000) == 1_000


def test_what_took_long_counts_for_more() -> None:
    rate = Rate()
    rate.add(10, 1_000_000)
    rate.add(10_000, 100_000_000)
    assert 99 <= rate.per_ms(10**9) <= 100
