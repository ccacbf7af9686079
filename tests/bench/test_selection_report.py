"""The published evidence about selection is what the code gives, and it says what it claims."""

from __future__ import annotations

import pytest

from bench.economics.lottery import (
    compute_ks_distance,
    compute_p_value,
    compute_shares,
    make_market,
)
from bench.modes.selection import (
    DRAWS,
    KS_BOUND,
    MIXED,
    PAGE,
    SEEDS,
    UNEQUAL_NAMES,
    compute_split,
    draw_shares,
    make_page,
    run_both,
)


def test_the_page_is_what_the_code_gives() -> None:
    page = PAGE.read_text()
    assert make_page(page) == page, "run: python -m bench selection"


def test_shares_follow_weights_over_seeds() -> None:
    wins, p_values = draw_shares()
    assert compute_ks_distance(p_values) < KS_BOUND
    totals = [sum(won[row] for won in wins) for row in range(len(MIXED))]
    assert compute_p_value(totals, compute_shares(make_market(MIXED))) > 0.001


def test_the_test_can_fail() -> None:
    """The same wins against shares that are off by a tenth."""
    wins, _ = draw_shares()
    shares = compute_shares(make_market(MIXED))
    wrong = [shares[0] * 1.1, shares[1] - shares[0] * 0.1, *shares[2:]]
    totals = [sum(won[row] for won in wins) for row in range(len(MIXED))]
    assert sum(totals) == SEEDS * DRAWS
    assert compute_p_value(totals, wrong) < 0.001


def test_credit_shortens_the_longest_waits_and_feeds_the_slow() -> None:
    plain, fair = run_both()
    slowest = max(UNEQUAL_NAMES)
    assert max(fair.longest_gaps) < max(plain.longest_gaps) / 2
    assert max(fair.longest_gaps) <= 16, "twice the eight snapshots that fill a credit"
    assert fair.shares[slowest] > 1.5 * plain.shares[slowest] > 0


@pytest.mark.parametrize("stake", [1, 2, 3, 4])
def test_a22_a_split_gains_nothing_up_to_the_cap(stake: int) -> None:
    one, many = compute_split(stake)
    assert many == pytest.approx(one)


def test_a22_beyond_the_cap_nodes_earn_by_their_stakes() -> None:
    one, many = compute_split(16)
    assert one == pytest.approx(4 / 44)
    assert many == pytest.approx(16 / 56)
