"""The one place that makes HTTP sessions: none of them follows a redirect.

Whoever answers chooses where a redirect leads: into the network of who asks, or with what was sent
to another server. aiohttp follows those of WebSocket handshakes, too, and has no option against it.
"""

from __future__ import annotations

from typing import Any

import aiohttp


class Redirected(aiohttp.ClientConnectionError):
    """The server answered with a redirect, which is not followed."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it redirects elsewhere (status {status})")
        self.status = status


async def _refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise Redirected(response.status)
    return response


def open_session(**options: Any) -> aiohttp.ClientSession:
    """Return a session with aiohttp's ``options``, whose requests raise Redirected.

    It uses neither proxies nor passwords of the environment, and keeps no cookies.
    """
    return aiohttp.ClientSession(
        middlewares=(_refuse_redirects,), cookie_jar=aiohttp.DummyCookieJar(), **options
    )
