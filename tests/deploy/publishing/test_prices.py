from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from splitup_deploy.publishing.prices import divide_price


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30), st.integers(0, 10**12))
def test_shares_add_up_and_follow_the_weights(weights: list[int], more: int) -> None:
    total = len(weights) + more
    shares = divide_price(total, weights)
    assert sum(shares) == total and min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        exact = 1 + more * weight / sum(weights)
        assert abs(share - exact) <= 1 + exact * 1e-9
