"""A contract's answer may ask the caller to fetch a URL of its choice (EIP-3668): nobody does."""

from __future__ import annotations

import pytest
from aiohttp import web
from eth_abi.abi import encode

from splitup.chain.client import Chain
from splitup.chain.rpc import Rpc
from splitup.core.errors import ChainRejected
from splitup.net.http_server import serve_app
from tests.chain.conftest import Network

OFFCHAIN_LOOKUP = "0x556f1830"  # OffchainLookup(address,string[],bytes,bytes4,bytes)


async def test_a14_offchain_lookup_makes_no_request(network: Network) -> None:
    fetched: list[str] = []
    usdc = network.deployment.usdc

    async def answer(request: web.Request) -> web.Response:
        call = await request.json()
        types = ("address", "string[]", "bytes", "bytes4", "bytes")
        urls = [f"{server.url}/{{sender}}/{{data}}.json"]
        data = OFFCHAIN_LOOKUP + encode(types, (usdc, urls, b"", bytes(4), b"")).hex()
        error = {"code": 3, "message": "execution reverted", "data": data}
        return web.json_response({"jsonrpc": "2.0", "id": call["id"], "error": error})

    async def fetch(request: web.Request) -> web.Response:
        fetched.append(request.path)
        return web.json_response({"data": "0x"})

    app = web.Application()
    app.router.add_post("/", answer)
    app.router.add_route("*", "/{path:.+}", fetch)
    server = await serve_app(app, "127.0.0.1", 0)
    async with Rpc(server.url) as rpc:
        with pytest.raises(ChainRejected):
            await Chain(rpc, network.deployment, None).call("usdc", "balanceOf", usdc)
    assert fetched == []
    await server.close()
