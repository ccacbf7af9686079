"""Quotes: what a request may cost, and headers that bind it."""

from __future__ import annotations

import pytest
from splitup_gateway.errors import ApiError
from splitup_gateway.quotes import MAX_COST_HEADER, QUOTE_HEADER, QUOTE_S, Quotes


def test_a_request_costs_no_more_than_its_quote() -> None:
    quotes = Quotes(clock=lambda: 1_000.0)
    quote, until = quotes.make("m", 50)
    assert until == 1_000 + QUOTE_S
    quotes.check({}, "m", 10**9)
    quotes.check({QUOTE_HEADER: quote}, "m", 50)
    quotes.check({MAX_COST_HEADER: "50"}, "m", 50)
    for headers in ({QUOTE_HEADER: quote}, {MAX_COST_HEADER: "50", QUOTE_HEADER: quote}):
        with pytest.raises(ApiError, match="allows 50") as caught:
            quotes.check(headers, "m", 51)
        assert caught.value.code == "max_cost_exceeded"


def test_a_quote_is_of_this_server_this_model_and_this_hour() -> None:
    now = [1_000.0]
    quotes = Quotes(clock=lambda: now[0])
    quote, _ = quotes.make("m", 50)
    forged = quote.replace("quote-50-", "quote-99-")
    other, _ = Quotes(clock=lambda: now[0]).make("m", 50)
    for bad in (forged, other, "", "quote-1-2-é", "quote-²-2-x", "-" * 300, quote + "0"):
        with pytest.raises(ApiError) as caught:
            quotes.check({QUOTE_HEADER: bad}, "m", 1)
        assert caught.value.code == "quote_invalid" and caught.value.param == QUOTE_HEADER
    with pytest.raises(ApiError, match="model 'n'"):
        quotes.check({QUOTE_HEADER: quote}, "n", 1)
    now[0] += QUOTE_S
    with pytest.raises(ApiError, match="another one"):
        quotes.check({QUOTE_HEADER: quote}, "m", 1)


@pytest.mark.parametrize("amount", ["", "-1", "1.5", "²", "9" * 30])
def test_a_bound_is_an_integer(amount: str) -> None:
    with pytest.raises(ApiError, match="an integer"):
        Quotes().check({MAX_COST_HEADER: amount}, "m", 0)
