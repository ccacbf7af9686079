"""Quotes: the most that a request will cost, said before it is made.

A quote is not stored: its id is the amount and a time, authenticated with a key that the server
draws when it starts.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final

from splitup_gateway.errors import ApiError

QUOTE_S: Final = 600
QUOTE_HEADER: Final = "x-splitup-quote"
MAX_COST_HEADER: Final = "x-splitup-max-cost"  # micro-USDC
_QUOTE: Final = re.compile(r"quote-([0-9]{1,50})-([0-9]{1,50})-([0-9a-f]{64})")


class Quotes:
    """The quotes of one server."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)

    def make(self, model: str, most_micro_usdc: int) -> tuple[str, int]:
        """Return the id of a quote for a request to a model, and until when it is valid."""
        until = int(self._clock()) + QUOTE_S
        return f"quote-{most_micro_usdc}-{until}-{self._sign(model, most_micro_usdc, until)}", until

    def check(self, headers: Mapping[str, str], model: str, most_micro_usdc: int) -> int | None:
        """Return the most that a request's headers allow; raise ApiError if it may cost more."""
        limits = {}
        if QUOTE_HEADER in headers:
            limits[QUOTE_HEADER] = self._read(headers[QUOTE_HEADER], model)
        if MAX_COST_HEADER in headers:
            limits[MAX_COST_HEADER] = _read_amount(headers[MAX_COST_HEADER])
        for name, limit in limits.items():
            if most_micro_usdc > limit:
                raise ApiError(
                    f"the request may cost {most_micro_usdc} micro-USDC, and its header {name} "
                    f"allows {limit}; ask for fewer tokens, or for another quote",
                    param=name,
                    code="max_cost_exceeded",
                )
        return min(limits.values(), default=None)

    def _read(self, quote: str, model: str) -> int:
        if (parts := _QUOTE.fullmatch(quote)) is not None:
            most, until = int(parts[1]), int(parts[2])
            is_ours = hmac.compare_digest(self._sign(model, most, until), parts[3])
            if is_ours and self._clock() < until:
                return most
        raise ApiError(
            f"the quote is not one of this server for model '{model}', or it is older than "
            f"{QUOTE_S} s; ask for another one with POST /v1/quote",
            param=QUOTE_HEADER,
            code="quote_invalid",
        )

    def _sign(self, model: str, most: int, until: int) -> str:
        text = f"{most} {until} {model}".encode(errors="replace")
        return hmac.digest(self._key, text, hashlib.sha256).hex()


def _read_amount(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ApiError(
            f"the header {MAX_COST_HEADER} is micro-USDC, an integer", param=MAX_COST_HEADER
        )
    return int(text)
