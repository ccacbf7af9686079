"""HTTP clients, and what they and servers (``splitup.net.http_server``) say to each other.

A signed request is a POST of ``{"jws": "<compact>"}``. A reply is a JSON object; an error is a
status of 400 or more with ``{"error": "<sentence>"}``. Redirects are faults and are not followed.
``splitup.messages.api`` lists the routes.
"""

from __future__ import annotations

import io
import json
import time
from typing import Any, Final

import aiohttp

from splitup.core import limits, tuning
from splitup.core.background import Closing
from splitup.core.codec import parse_json
from splitup.core.errors import (
    InvalidInput,
    PeerFault,
    Refused,
    Throttled,
    Unavailable,
    describe,
)
from splitup.core.http_session import Redirected, open_session
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import Identity
from splitup.messages.api import M, Route
from splitup.messages.base import Message, count_values
from splitup.net.endpoints import make_socket_factory

_SILENT: Final = "it gave no reason"


class SignedClient(Closing):
    """An HTTP session that signs with one identity. Close it, or use ``async with``.

    Every call raises Unavailable when the server does not answer or answers 5xx, Throttled for 429,
    Refused for any other 4xx, and PeerFault for redirects and for malformed or too long replies.
    """

    def __init__(
        self, identity: Identity | None = None, *, allow_loopback: bool | None = None
    ) -> None:
        """Leave ``allow_loopback`` None for URLs of one's own configuration and the committee's.

        For endpoints that strangers chose it says whether they may be private (``endpoints``).
        """
        self._identity = identity
        self._session: aiohttp.ClientSession | None = None
        self._socket_factory = (
            None if allow_loopback is None else make_socket_factory(allow_loopback=allow_loopback)
        )

    @property
    def session(self) -> aiohttp.ClientSession:
        """Return the session, for presigned URLs and WebSockets; it is created on first use."""
        if self._session is None:
            self._session = open_session(
                connector=aiohttp.TCPConnector(
                    limit=0,  # limited per host: one slow peer must not block the others
                    limit_per_host=tuning.HTTP_CONNECTIONS_PER_HOST,
                    socket_factory=self._socket_factory,
                ),
                timeout=aiohttp.ClientTimeout(
                    total=tuning.HTTP_TIMEOUT_S, sock_connect=tuning.HTTP_CONNECT_S
                ),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,  # a limit on compressed bytes would not limit memory
            )
        return self._session

    async def close(self) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def sign(self, route: Route[M], audience: str, body: M | dict[str, Any]) -> str:
        """Return a token over a route's message, valid from now; send it with ``post_token``."""
        if self._identity is None:
            raise InvalidInput("this HTTP client was opened without an identity and cannot sign")
        value = body.model_dump(mode="json") if isinstance(body, Message) else body
        return sign_jws(
            self._identity,
            typ=route.typ,
            audience=audience,
            body=value,
            now_s=int(time.time()),
            ttl_s=limits.JWS_TTL_S,
        )

    async def post_signed(
        self, route: Route[M], endpoint: str, audience: str, body: M | dict[str, Any]
    ) -> dict[str, Any]:
        """Sign and POST one message; return the reply."""
        return await self.post_token(route, endpoint, self.sign(route, audience, body))

    async def post_token(self, route: Route[Any], endpoint: str, token: str) -> dict[str, Any]:
        """POST an already signed token: one signature serves every receiver of one audience."""
        url = route.url(endpoint)
        return await self.post_json(
            url, {"jws": token}, timeout_s=route.timeout_s, max_bytes=route.max_reply_bytes
        )

    async def post_json(
        self,
        url: str,
        body: Message | dict[str, Any],
        *,
        timeout_s: float = tuning.HTTP_TIMEOUT_S,
        max_bytes: int = limits.SHORT_REPLY_BYTES,
    ) -> dict[str, Any]:
        """POST a JSON object that needs no signature; return the reply."""
        if isinstance(body, Message):
            data = body.canonical_bytes()
        else:
            data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
        reply = await self._request(
            "POST", url, data=data, timeout_s=timeout_s, max_bytes=max_bytes
        )
        return _parse_reply(url, reply, max_bytes)

    async def get_json(
        self,
        url: str,
        *,
        timeout_s: float = tuning.HTTP_TIMEOUT_S,
        max_bytes: int = limits.HTTP_BODY_BYTES,
    ) -> dict[str, Any]:
        """GET a JSON object."""
        body = await self.get_bytes(url, timeout_s=timeout_s, max_bytes=max_bytes)
        return _parse_reply(url, body, max_bytes)

    async def get_bytes(
        self,
        url: str,
        *,
        timeout_s: float = tuning.HTTP_TIMEOUT_S,
        max_bytes: int = limits.HTTP_BODY_BYTES,
    ) -> bytes:
        """GET a body of at most ``max_bytes``; the caller checks its digest."""
        return await self._request("GET", url, data=None, timeout_s=timeout_s, max_bytes=max_bytes)

    async def post_bytes(self, url: str, data: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
        """POST bytes that are no JSON; return a reply of at most ``max_bytes``."""
        return await self._request(
            *("POST", url),
            data=io.BytesIO(data),  # aiohttp warns of bytes as large as this
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            content_type="application/octet-stream",
        )

    async def _request(
        self,
        method: str,
        url: str,
        *,
        data: bytes | io.BytesIO | None,
        timeout_s: float,
        max_bytes: int,
        content_type: str = "application/json",
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=tuning.HTTP_CONNECT_S)
        headers = {} if data is None else {"Content-Type": content_type}
        try:
            async with self.session.request(
                method, url, data=data, headers=headers, timeout=timeout
            ) as response:
                body = await read_bounded(response, max_bytes)
        except TimeoutError:
            raise Unavailable(f"{url} did not answer within {timeout_s:g} s") from None
        except Redirected as error:
            raise PeerFault(f"{url} cannot be used: {error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"{url} cannot be reached: {describe(error)}") from None
        if response.status == 200:
            return body
        if response.status == 429:
            raise Throttled(f"{url} answered 429: {_get_error(body) or _SILENT}")
        if response.status >= 500:
            raise Unavailable(f"{url} answered {response.status}: {_get_error(body) or _SILENT}")
        if response.status >= 400:
            said = _get_error(body) or f"{url} answered {response.status}: {_SILENT}"
            raise Refused(said, status=response.status)
        raise PeerFault(f"{url} answered {response.status} instead of a reply", peer=url)


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return an answer's body; raise PeerFault for one of more than ``max_bytes``."""
    announced = response.content_length
    if announced is not None and announced > max_bytes:
        raise PeerFault(f"{response.url} announces {announced} bytes; the limit is {max_bytes}")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise PeerFault(f"{response.url} sent more than the {max_bytes} bytes allowed")
    return bytes(body)


def _parse_reply(url: str, body: bytes, max_bytes: int = limits.HTTP_BODY_BYTES) -> dict[str, Any]:
    try:
        value = parse_json(body, max_values=count_values(max_bytes))
    except (ValueError, RecursionError):
        raise PeerFault(f"{url} answered something that is not JSON", peer=url) from None
    if not isinstance(value, dict):
        raise PeerFault(f"{url} answered JSON that is not an object", peer=url)
    return value


def _get_error(body: bytes) -> str:
    try:
        value = parse_json(body)
    except (ValueError, RecursionError):
        value = None
    text = value.get("error") if isinstance(value, dict) else None
    return text[: tuning.MAX_ERROR_CHARS] if isinstance(text, str) else ""
