"""What is tried again when an answer is lost, and what an answer may look like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from splitup.chain.abi import CONTRACTS, load_abi
from splitup.chain.client import Chain
from splitup.chain.event_stream import decode_logs
from splitup.chain.rpc import Rpc, RpcError
from splitup.core import limits, tuning
from splitup.core.errors import ChainUnavailable, ConfigurationError
from splitup.messages.network import Deployment
from splitup.net.http_server import serve_app


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
HASH, ADDRESS = "0x" + "ab" * 32, "0x" + "cd" * 20
LOG = {"address": ADDRESS, "topics": [HASH], "data": "0x", "blockNumber": "0x1", "logIndex": "0x0"}
LOG |= {"blockHash": HASH, "transactionHash": HASH}
BLOCK = {"number": "0x1", "hash": HASH, "parentHash": HASH, "timestamp": "0x65"}
RECEIPT = {"transactionHash": HASH, "blockNumber": "0x1", "blockHash": HASH, "gasUsed": "0x5208"}
RECEIPT |= {"status": "0x1", "to": None, "contractAddress": ADDRESS, "logs": [LOG]}


def answer_with(result: object) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 0, "result": result})


@pytest.mark.parametrize("method", ["eth_chainId", "eth_estimateGas", "eth_blockNumber"])
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


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("eth_call", None),
        ("eth_call", "0x123"),
        ("eth_call", "0xzz"),
        ("eth_getCode", {}),
        ("eth_blockNumber", "0x"),
        ("eth_blockNumber", "0x" + "f" * 17),  # no clock reaches it
        ("eth_estimateGas", 21_000),
        ("eth_gasPrice", "0x" + "f" * 65),
        ("eth_sendRawTransaction", None),
        ("eth_getBlockByNumber", {}),
        ("eth_getBlockByNumber", BLOCK | {"hash": None}),
        ("eth_getBlockByHash", BLOCK | {"timestamp": "soon"}),
        ("eth_getLogs", None),
        ("eth_getLogs", [None]),
        ("eth_getLogs", [LOG | {"topics": HASH}]),
        ("eth_getLogs", [LOG | {"data": "0x1"}]),
        ("eth_getTransactionReceipt", RECEIPT | {"logs": [{}]}),
        ("eth_getTransactionReceipt", []),
    ],
)
async def test_s54_what_is_no_result_counts_as_no_answer(
    endpoint: Endpoint, method: str, result: object
) -> None:
    endpoint.answers = [answer_with(result)] * tuning.RPC_TRIES
    async with Rpc(endpoint.url) as rpc:
        with pytest.raises(ChainUnavailable, match="does not answer"):
            await rpc.request(method)
    assert not endpoint.answers, "another server behind the same URL may be whole"


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("eth_call", "0x"),
        ("eth_getBlockByNumber", None),
        ("eth_getBlockByNumber", BLOCK | {"baseFeePerGas": "0x7", "size": "0x1"}),
        ("eth_getLogs", [LOG]),
        ("eth_getTransactionReceipt", RECEIPT),
        ("eth_getTransactionReceipt", None),
        ("anvil_anything", [1, 2]),
    ],
)
async def test_results_come_as_they_are(endpoint: Endpoint, method: str, result: object) -> None:
    endpoint.answers = [answer_with(result)]
    async with Rpc(endpoint.url) as rpc:
        assert await rpc.request(method) == result


async def test_s54_a_batch_is_checked_by_what_each_call_asked(endpoint: Endpoint) -> None:
    calls = [("eth_getBlockByNumber", []), ("eth_getLogs", [])]
    bad = [{"id": 1, "result": BLOCK}, {"id": 0, "result": [LOG]}]
    good = [{"id": 1, "result": [LOG]}, {"id": 0, "result": BLOCK}]
    endpoint.answers = [json.dumps(bad), "[null, null]", json.dumps(good)]
    async with Rpc(endpoint.url) as rpc:
        assert await rpc.request_all(*calls) == [BLOCK, [LOG]]


async def test_s54_an_answer_has_a_length(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_RPC_ANSWER_BYTES", 1_000)
    endpoint.answers = [answer_with("0x" + "00" * 500), answer_with("0x" + "00" * 400)]
    async with Rpc(endpoint.url) as rpc:
        with pytest.raises(RpcError, match="more than 1000 bytes"):  # so ranges become smaller
            await rpc.request("eth_call")
        assert await rpc.request("eth_call") == "0x" + "00" * 400


async def test_s54_an_error_is_repeated_in_part(endpoint: Endpoint) -> None:
    endpoint.answers = [json.dumps({"error": {"message": "no" * 1_000}}), '{"error": [1]}']
    async with Rpc(endpoint.url) as rpc:
        with pytest.raises(RpcError) as caught:
            await rpc.request("eth_call")
        assert len(str(caught.value)) < 700
        with pytest.raises(RpcError, match="refused eth_call"):
            await rpc.request("eth_call")


DEPLOYED = Deployment(chain_id=1, genesis_hash=HASH, **{name: ADDRESS for name in CONTRACTS})


@pytest.mark.parametrize("result", ["0x", "0x" + "ff" * 32, "0x" + "ff" * 2_000])
@pytest.mark.parametrize("function", ["nodesPage", "nodeCount", "nodeOf", "isActive"])
async def test_s54_a_result_of_another_form_is_the_endpoints_fault(
    endpoint: Endpoint, function: str, result: str
) -> None:
    arguments = {"nodesPage": [0, 1], "nodeCount": []}.get(function, [ADDRESS])
    if function == "nodeCount" and result != "0x":
        return  # any number is one
    endpoint.answers = [answer_with(result)]
    async with Chain(Rpc(endpoint.url), DEPLOYED, None) as chain:
        with pytest.raises(ChainUnavailable, match="something else than its result"):
            await chain.call("nodes", function, *arguments)


async def test_s54_a_damaged_event_is_the_endpoints_fault(endpoint: Endpoint) -> None:
    [topic] = [t for t, e in load_abi("market").events.items() if e["name"] == "BalanceFrozen"]
    for change in ({"topics": [topic]}, {"topics": [topic, HASH]}, {"topics": [topic] * 4}):
        with pytest.raises(ChainUnavailable, match="damaged"):
            decode_logs(DEPLOYED, [LOG | change])


async def test_an_endpoint_that_answers_nothing_is_named_soon_and_asked_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "RPC_TIMEOUT_S", 0.3)
    monkeypatch.setattr(tuning, "RPC_BACKOFF_S", 0.0)
    monkeypatch.setattr(tuning, "QUIET_S", 0.0)
    asked, gone = 0, asyncio.Event()

    async def hang(_request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await gone.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/{rest:.*}", hang)
    server = await serve_app(app, "127.0.0.1", 0)
    async with Rpc(f"{server.url}/v2/KEY") as rpc:
        with pytest.raises(ChainUnavailable, match=f"{server.url} does not answer"):
            await rpc.request("eth_chainId")
    gone.set()
    await server.close()
    assert asked == tuning.RPC_SILENCES < tuning.RPC_TRIES
    assert f"the chain at {server.url} has not answered" in caplog.text and "KEY" not in caplog.text


@pytest.mark.parametrize("refusal", [web.HTTPFound, web.HTTPPermanentRedirect])
async def test_s97_an_endpoint_that_redirects_does_not_answer(
    endpoint: Endpoint, refusal: type[web.HTTPFound]
) -> None:
    """It could send who believes it into that one's own network."""

    async def redirect(request: web.Request) -> web.Response:
        raise refusal(f"{endpoint.url}/inside")

    app = web.Application()
    app.router.add_post("/key", redirect)
    endpoint.answers = [DONE]
    server = await serve_app(app, "127.0.0.1", 0)
    async with Rpc(f"{server.url}/key") as rpc:
        with pytest.raises(
            ChainUnavailable, match=r"redirects elsewhere \(status 30[28]\)"
        ) as error:
            await rpc.request("eth_blockNumber")
    await server.close()
    assert endpoint.answers == [DONE] and "key" not in str(error.value)
