"""A device's connection to its server, where the server behaves badly."""

from __future__ import annotations

import pytest
from aiohttp import web
from splitup_private.split.connection import SplitServerConnection, SplitTransport
from splitup_private.split.messages import PATH, Ping, Pong

from splitup.core.errors import Unavailable
from splitup.net.http_server import serve_app


@pytest.mark.parametrize("uses_http", [False, True])
async def test_s97_hidden_states_go_to_no_other_server(uses_http: bool) -> None:
    seen: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        seen.append(request.path)
        raise web.HTTPTemporaryRedirect("/inside")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", redirect)
    server = await serve_app(app, "127.0.0.1", 0)
    connection = SplitServerConnection(server.url, "key")
    connection.open()
    transport = SplitTransport(connection)
    transport._uses_http = uses_http
    for ask in (
        connection.fetch_models(),
        connection.fetch_file("ab", max_bytes=8),
        transport.ask(Ping(type="ping"), bytes(8), Pong),
    ):
        with pytest.raises(Unavailable, match="redirects elsewhere"):
            await ask
    await connection.close()
    await server.close()
    last = "forward" if uses_http else "stream"
    assert seen == [f"{PATH}/{each}" for each in ("models", "files/ab", last)]
