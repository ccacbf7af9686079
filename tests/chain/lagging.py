"""An RPC endpoint in front of a chain that can fall behind, as one behind a load balancer does."""

from __future__ import annotations

import json
import random
from typing import Any

import aiohttp
from aiohttp import web

from splitup.net.http_server import Server, serve_app


class LaggingRpc:
    """Passes calls on; while ``at_block`` is set it knows nothing of any later block."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._session = aiohttp.ClientSession()
        self._server: Server | None = None
        self.at_block: int | None = None
        self.alternate = False  # every other call is answered by an endpoint that is up to date
        self.chances: random.Random | None = None  # or it is up to chance which one answers
        self.answers_batches = True
        self.most_blocks: int | None = None  # of one eth_getLogs
        self.words = "block range is too wide"
        self.ranges: list[int] = []  # that were asked for while there is such a limit
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
        asked = json.loads(await request.read())
        self._calls += 1
        is_fresh = self.alternate and self._calls % 2
        if self.chances is not None:
            is_fresh = self.chances.random() < 0.5
        is_late = self.at_block is not None and not is_fresh
        if not isinstance(asked, list):
            return web.json_response(await self._answer(asked, is_late))
        if not self.answers_batches:
            return web.json_response({"jsonrpc": "2.0", "error": {"message": "no batches here"}})
        return web.json_response([await self._answer(call, is_late) for call in asked])

    async def _answer(self, call: dict[str, Any], is_late: bool) -> dict[str, Any]:
        if call["method"] == "eth_getLogs" and (refusal := self._refuse(call["params"][0])):
            error = {"code": -32005, "message": refusal}
            return {"jsonrpc": "2.0", "id": call["id"], "error": error}
        if is_late and self.at_block is not None:
            return await self._answer_late(call, self.at_block)
        return await self._pass_on(call)

    def _refuse(self, where: dict[str, Any]) -> str:
        """Return why a range of blocks is too large, in the words of a provider."""
        if self.most_blocks is None or "blockHash" in where:
            return ""
        blocks = int(where["toBlock"], 16) - int(where["fromBlock"], 16) + 1
        self.ranges.append(blocks)
        return self.words if blocks > self.most_blocks else ""

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
        if call["method"] == "eth_getLogs":
            return await self._answer_logs_late(call, block)
        late = [hex(block) if param == "latest" else param for param in params]
        return await self._pass_on({**call, "params": late})

    async def _answer_logs_late(self, call: dict[str, Any], block: int) -> dict[str, Any]:
        """Answer with the logs of the blocks that are here, which may be none: nobody says so."""
        where = call["params"][0]
        if "blockHash" in where:
            found = await self._pass_on(
                {**call, "method": "eth_getBlockByHash", "params": [where["blockHash"], False]}
            )
            if int(found["result"]["number"], 16) > block:
                error = {"code": -32000, "message": "unknown block"}
                return {"jsonrpc": "2.0", "id": call["id"], "error": error}
            return await self._pass_on(call)
        if int(where["fromBlock"], 16) > block:
            return {"jsonrpc": "2.0", "id": call["id"], "result": []}
        last = hex(min(block, int(where["toBlock"], 16)))
        return await self._pass_on({**call, "params": [{**where, "toBlock": last}]})

    async def _pass_on(self, call: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._target, json=call) as response:
            answer: dict[str, Any] = await response.json()
            return answer
