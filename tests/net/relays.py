"""A relay for tests."""

from __future__ import annotations

import asyncio

from aiohttp import web

from splitup.errors import Unavailable
from splitup.net.http import Server, make_app, read_signed, serve_app
from splitup.net.relay import Relay
from splitup.wire import ReachRequest

REACH_TYP = "splitup-reach"


class RelayServer:
    """A relay on a port of its own that knows some nodes, and as a member says who is reached."""

    def __init__(self, problem: str | None = None, audience: str = "") -> None:
        self.problem, self.audience = problem, audience
        self.asked: list[ReachRequest] = []
        self.registering = asyncio.Event()
        self.keys: dict[str, str] = {}
        self.server: Server | None = None
        self.port = 0

    async def find_key(self, address: str) -> str:
        self.registering.set()
        return self.keys.get(address, "")

    async def start(self) -> None:
        self.relay = Relay(lambda: self.url, self.find_key)
        app = make_app()
        self.relay.add_routes(app)
        app.router.add_post("/v1/reach", self._on_reach)
        self.server = await serve_app(app, "127.0.0.1", self.port)
        self.port = self.server.port

    async def stop(self) -> None:
        assert self.server is not None
        await self.relay.close()
        await self.server.close()

    async def _on_reach(self, request: web.Request) -> web.Response:
        claims = await read_signed(request, typ=REACH_TYP, audience=self.audience)
        self.asked.append(ReachRequest.from_value(claims.body))
        if self.problem is None:
            raise Unavailable("this member does not know")
        return web.json_response({"problem": self.problem})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
