"""An RPC endpoint in front of a chain that can fall behind, as one behind a load balancer does."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from aiohttp import web

from splitup.net.http import Server, serve_app


class LaggingRpc:
    """Passes calls on; while ``at_block`` is set it knows nothing of any later block."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._session = aiohttp.ClientSession()
        self._server: Server | None = None
        self.at_block: int | None = None
        self.alternate = False  # every other call is answered by an endpoint that is up to date
        self._calls = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def open(self) -> None:
        app = web.Application()
        app.router.add_post("/", self._handle)
        self._server = await serve_app(app, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        await self._server.close()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.Response:
        call = json.loads(await request.read())
        self._calls += 1
        if self.at_block is not None and not (self.alternate and self._calls % 2):
            answer = await self._answer_late(call, self.at_block)
        else:
            answer = await self._pass_on(call)
        return web.json_response(answer)

    async def _answer_late(self, call: dict[str, Any], block: int) -> dict[str, Any]:
        params = call["params"]
        if call["method"] == "eth_getBlockByNumber" and params[0].startswith("0x"):
            if int(params[0], 16) > block:
                return {"jsonrpc": "2.0", "id": call["id"], "result": None}
        if call["method"] == "eth_call" and isinstance(params[1], dict):
            found = await self._pass_on(
                {**call, "method": "eth_getBlockByHash", "params": [params[1]["blockHash"], False]}
            )
            if int(found["result"]["number"], 16) > block:
                error = {"code": -32000, "message": "header not found"}
                return {"jsonrpc": "2.0", "id": call["id"], "error": error}
        late = [hex(block) if param == "latest" else param for param in params]
        return await self._pass_on({**call, "params": late})

    async def _pass_on(self, call: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._target, json=call) as response:
            answer: dict[str, Any] = await response.json()
            return answer
