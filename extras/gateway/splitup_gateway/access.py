"""Who may ask, and how much: keys, rates and budgets of one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, TypeVar

from aiohttp import web

from splitup.core import limits, tuning
from splitup.core.errors import Throttled
from splitup.core.places import RestingTurns
from splitup.net.http_server import get_admission, read_in_time
from splitup_gateway.api_keys import ApiKey, ApiKeys, get_principal
from splitup_gateway.charges import Charges
from splitup_gateway.errors import ApiError

T = TypeVar("T")
D = TypeVar("D", bytes, str)
MOST_BODIES: Final = 32  # large ones that are read at once; further requests wait
MOST_BODIES_OF_ONE: Final = 8  # principal
# Of the large ones whose requests one principal has running. In memory one is a few times as much.
MOST_BYTES_OF_ONE: Final = 64 * limits.MIB


@dataclass(slots=True)
class _LargeBodies:
    """Those of one principal."""

    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_BODIES_OF_ONE))
    size: int = 0  # bytes, of those that are read or answered


@dataclass(slots=True)
class Access:
    """Checks requests against the keys in a database, as they are when a request comes.

    While there is no key everybody may ask, unless the server ``needs_keys`` in any case: whoever
    reaches it from elsewhere. Rates are those of this server alone.
    """

    keys: ApiKeys | None  # None: there never is one
    needs_keys: bool = False
    clock: Callable[[], float] = monotonic
    charges: Charges = field(init=False)
    _turns: RestingTurns = field(init=False)  # of principals, at parsing
    # how many requests a key may begin, and when that was so; it fills up within a minute
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)
    _bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_BODIES))
    _large_of: dict[str, _LargeBodies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.charges = Charges(self.keys)
        self._turns = RestingTurns(tuning.LARGE_MESSAGE_REST, self.clock)

    async def has_keys(self) -> bool:
        """Return whether requests need a key now."""
        if self.needs_keys or self.keys is None:
            return self.needs_keys
        return await asyncio.to_thread(self.keys.has_any)

    async def let_in(
        self, request: web.Request, authorization: str | None = None, *, is_counted: bool = True
    ) -> ApiKey | None:
        """Authorise a request, by its header unless another one is given, and its connection.

        Clients of Anthropic's API have the key alone in ``x-api-key``. Raises what ``authorise``
        raises.
        """
        header = authorization or request.headers.get("Authorization")
        if header is None and (secret := request.headers.get("x-api-key")) is not None:
            header = f"Bearer {secret}"
        key = await self.authorise(header, is_counted=is_counted)
        if key is not None:
            get_admission(request).vouch(request, key.name)
        return key

    async def authorise(
        self, authorization: str | None, *, is_counted: bool = True
    ) -> ApiKey | None:
        """Return the key of an Authorization header, None when none are needed.

        Raises ApiError (401) without a valid key, (429) for too many requests that are counted.
        """
        kind, _, secret = (authorization or "").partition(" ")
        found = None
        if self.keys is not None and kind.lower() == "bearer" and len(secret) <= 200:
            found = await asyncio.to_thread(self.keys.find, secret.strip())
        if found is None:
            if not await self.has_keys():
                return None
            raise ApiError(
                "the request has no valid API key; send it as: Authorization: Bearer sk-splitup-…",
                status=401,
                code="invalid_api_key",
            )
        if is_counted:
            self.check_rate(found)
        return found

    async def list_keys(self) -> dict[str, ApiKey]:
        """Return all keys by name, also those that were revoked."""
        known = [] if self.keys is None else await asyncio.to_thread(self.keys.list)
        return {key.name: key for key in known}

    def check_rate(self, key: ApiKey) -> None:
        """Count a request of a key; raise ApiError (429) for too many."""
        if key.requests_per_minute is None:
            return
        now, most = self.clock(), float(key.requests_per_minute)
        left, at = self._buckets.get(key.name, (most, now))
        left = min(most, left + (now - at) * most / 60)
        self._buckets[key.name] = (left - 1 if left >= 1 else left), now
        if left < 1:
            wait_s = (1 - left) * 60 / most
            raise ApiError(
                f"key '{key.name}' may send {key.requests_per_minute} requests a minute",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(int(wait_s) + 1)},
            )

    @asynccontextmanager
    async def read(
        self, request: web.Request, key: ApiKey | None, parse: Callable[[bytes], T]
    ) -> AsyncIterator[tuple[bytes, T]]:
        """Give a request's body, and what ``parse`` makes of it, while the request is answered.

        Few large ones are read at once, and fewer of one principal. Raises Throttled when those of
        its requests that are not answered have too many bytes together.
        """
        length = request.content_length
        if length is not None and length <= tuning.HTTP_SMALL_BODY_BYTES:
            body = await read_in_time(request)
            yield body, parse(body)
            return
        size = request.client_max_size if length is None else length
        theirs = self._large_of.setdefault(get_principal(key), _LargeBodies())
        if theirs.size and theirs.size + size > MOST_BYTES_OF_ONE:
            raise Throttled("large requests of this key run already; try again in a few seconds")
        theirs.size += size
        try:
            async with theirs.places, self._bodies:
                body = await read_in_time(request)
            yield body, await self.parse(key, body, parse)
        finally:
            theirs.size -= size

    async def parse(self, key: ApiKey | None, data: D, parse: Callable[[D], T]) -> T:
        """Return what ``parse`` makes of what a principal sent.

        With much of it that takes up to a second, in which nothing else is done: its principal's
        next one waits longer.
        """
        if len(data) <= tuning.HTTP_SMALL_BODY_BYTES:
            return parse(data)
        principal = get_principal(key)
        async with self._turns.hold(principal):
            return self._turns.take(principal, parse, data)
