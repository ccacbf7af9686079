"""What is tried again when an answer is lost, and what an answer may look like."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from splitup.chain.rpc import Rpc, RpcError
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable, ConfigurationError
from splitup.net.http import serve_app


class Endpoint:
    """Answers with ``answers`` in turn; None closes the connection instead."""

    def __init__(self) -> None:
        self.answers: list[str | None] = []
        self.asked: list[tuple[str, list[object]]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        for call in asked if isinstance(asked, list) else [asked]:
            self.asked.append((call["method"], call["params"]))
        answer = self.answers.pop(0)
        if answer == "401":
            raise web.HTTPUnauthorized
        if answer is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response(status=500)
        return web.Response(text=answer, content_type="application/json")


@pytest_asyncio.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoint]:
    monkeypatch.setattr(tuning, "RPC_BACKOFF_S", 0.0)
    made, app = Endpoint(), web.Application()
    app.router.add_post("/{rest:.*}", made.answer)
    server = await serve_app(app, "127.0.0.1", 0)
    made.url = server.url
    yield made
    await server.close()


DONE = json.dumps({"jsonrpc": "2.0", "id": 1, "result": "0x7"})


@pytest.mark.parametrize("method", ["eth_call", "eth_getLogs", "eth_sendRawTransaction"])
async def test_what_may_be_repeated_outlives_lost_answers(endpoint: Endpoint, method: str) -> None:
    endpoint.answers = [None, "no JSON", "[]", DONE]
    async with Rpc(endpoint.url) as rpc:
        assert await rpc.request(method, "0x1") == "0x7"
        assert rpc.requests == 4
    assert endpoint.asked == [(method, ["0x1"])] * 4


@pytest.mark.parametrize(
    "method", ["anvil_mine", "evm_increaseTime", "eth_sendTransaction", "eth_getFilterChanges"]
)
async def test_what_might_be_done_twice_has_one_try(endpoint: Endpoint, method: str) -> None:
    endpoint.answers = [None, DONE]
    async with Rpc(endpoint.url) as rpc:
        with pytest.raises(ChainUnavailable, match="does not answer"):
            await rpc.request(method, "0x1", tries=4)
    assert endpoint.asked == [(method, ["0x1"])]


async def test_a_refusal_is_not_tried_again(endpoint: Endpoint) -> None:
    error = {"code": 3, "message": "execution reverted", "data": {"data": "0x08c379a0"}}
    endpoint.answers = [json.dumps({"jsonrpc": "2.0", "id": 1, "error": error})]
    async with Rpc(endpoint.url) as rpc:
        with pytest.raises(RpcError) as caught:
            await rpc.request("eth_call", {})
    assert (caught.value.data, caught.value.is_revert) == ("0x08c379a0", True)


@pytest.mark.parametrize("answer", [None, "no JSON", "401", '{"error": {"message": "no"}}'])
async def test_no_error_holds_what_may_be_a_providers_key(
    endpoint: Endpoint, answer: str | None
) -> None:
    endpoint.answers = [answer] * tuning.RPC_TRIES
    url = endpoint.url.replace("http://", "http://somebody:KEY@") + "/v2/KEY?token=KEY"
    async with Rpc(url) as rpc:
        with pytest.raises(ChainUnavailable, match=endpoint.url) as caught:
            await rpc.request("eth_call", {})
    assert "KEY" not in str(caught.value)


async def test_a_url_that_is_none_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Rpc("wss://example.org/v2/KEY")
    assert "KEY" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="not valid") as caught:
        Rpc("http://[::1/v2/KEY")
    assert "KEY" not in str(caught.value)
    async with Rpc("http://example.org:KEY/") as rpc:
        with pytest.raises(ChainUnavailable) as failed:
            await rpc.request("eth_sendTransaction", {})
    assert "valid" in str(failed.value)


async def test_why_a_batch_is_refused_is_told(endpoint: Endpoint) -> None:
    calls = [("eth_chainId", []), ("eth_blockNumber", [])]
    endpoint.answers = ['{"error": {"code": 429, "message": "too many requests"}}', "{}", "[]"]
    async with Rpc(endpoint.url) as rpc:
        for reason in ("too many requests", "answers no batches", "answers no batches"):
            with pytest.raises(RpcError, match=reason):
                await rpc.request_all(*calls)
