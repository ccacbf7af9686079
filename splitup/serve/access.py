"""Who may ask, and how much: keys, rates and budgets of one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from aiohttp import web

from splitup.client.inputs import format_usdc
from splitup.net.http import read_in_time
from splitup.serve.api_keys import ApiKey, ApiKeys
from splitup.serve.errors import ApiError

MOST_BODIES: Final = 32  # that are read at once; further requests wait


@dataclass(slots=True)
class Charge:
    """What a request may cost at most, and what it did cost once it has ended; micro-USDC."""

    most: int
    used: int = 0


@dataclass(slots=True)
class _Bucket:
    """How many requests a key may begin now; it fills up within a minute."""

    left: float
    at: float


@dataclass(slots=True)
class Access:
    """Checks requests against the keys in a database; without one everybody may ask.

    Rates are those of this server alone.
    """

    keys: ApiKeys | None
    clock: Callable[[], float] = monotonic
    _buckets: dict[str, _Bucket] = field(default_factory=dict)
    _bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_BODIES))

    async def authorise(
        self, authorization: str | None, *, is_counted: bool = True
    ) -> ApiKey | None:
        """Return the key of an Authorization header, None when none are needed.

        Raises ApiError (401) without a valid key, (429) for too many requests that are counted.
        """
        if self.keys is None:
            return None
        kind, _, secret = (authorization or "").partition(" ")
        found = None
        if kind.lower() == "bearer" and len(secret) <= 200:
            found = await asyncio.to_thread(self.keys.find, secret.strip())
        if found is None:
            raise ApiError(
                "the request has no valid API key; send it as: Authorization: Bearer sk-splitup-…",
                status=401,
                code="invalid_api_key",
            )
        if is_counted:
            self.check_rate(found)
        return found

    def check_rate(self, key: ApiKey) -> None:
        """Count a request of a key; raise ApiError (429) for too many."""
        if key.requests_per_minute is None:
            return
        now, most = self.clock(), float(key.requests_per_minute)
        bucket = self._buckets.setdefault(key.name, _Bucket(most, now))
        bucket.left = min(most, bucket.left + (now - bucket.at) * most / 60)
        bucket.at = now
        if bucket.left < 1:
            wait_s = (1 - bucket.left) * 60 / most
            raise ApiError(
                f"key '{key.name}' may send {key.requests_per_minute} requests a minute",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(int(wait_s) + 1)},
            )
        bucket.left -= 1

    async def read_body(self, request: web.Request) -> bytes:
        """Return a request's body; few are read at once, so that they take little memory."""
        async with self._bodies:
            return await read_in_time(request)

    @asynccontextmanager
    async def charge(self, key: ApiKey | None, most_micro_usdc: int) -> AsyncIterator[Charge]:
        """Charge a key the most that a request may cost; afterwards give back what is left.

        Raises ApiError (429, insufficient_quota) beyond its budget.
        """
        charge = Charge(most_micro_usdc)
        if self.keys is None or key is None:
            yield charge
            return
        if not await asyncio.to_thread(self.keys.charge, key.name, charge.most):
            raise ApiError(
                f"the request may cost {format_usdc(charge.most)}, which the budget of key "
                f"'{key.name}' no longer covers; ask for fewer tokens, or for a larger budget",
                status=429,
                kind="insufficient_quota",
                code="insufficient_quota",
            )
        try:
            yield charge
        finally:
            left = charge.most - charge.used
            if left > 0:  # shielded: a client that leaves must not keep it
                giving = asyncio.to_thread(self.keys.give_back, key.name, left)
                await asyncio.shield(asyncio.ensure_future(giving))
