"""What HTTP servers accept, and what HTTP clients accept."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from aiohttp import web

from splitup.core import tuning
from splitup.core.errors import (
    BadSignature,
    ConfigurationError,
    InvalidInput,
    PeerFault,
    Refused,
    Unavailable,
    describe,
)
from splitup.crypto.jws import ReplayCache
from splitup.crypto.keys import generate_identity
from splitup.messages.api import Route
from splitup.messages.base import Message
from splitup.net.http import SignedClient
from splitup.net.http_server import (
    Server,
    get_admission,
    make_app,
    read_json,
    read_signed,
    serve_app,
)
from tests.builders import HANG_S

BODY_LIMIT = 4096
ECHO = Route[Message]("POST", "/echo", "anybody", typ="t")
ONCE = Route[Message]("POST", "/once", "anybody", typ="t")
ERRORS = {
    "peer": (PeerFault("that was wrong"), 400),
    "input": (InvalidInput("that was no input"), 400),
    "signature": (BadSignature("not yours"), 401),
    "refused": (Refused("not now", status=409), 409),
    "unavailable": (Unavailable("come back"), 503),
    "bug": (RuntimeError("secret detail"), 500),
}
REPLAYS = ReplayCache()


async def echo(request: web.Request) -> web.Response:
    claims, _ = await read_signed(request, ECHO, audience="me")
    return web.json_response({"issuer": claims.issuer, "body": claims.body})


async def once(request: web.Request) -> web.Response:
    claims, _ = await read_signed(request, ONCE, audience="me")
    with REPLAYS.once(claims, int(time.time())):
        return web.json_response({})


async def parse(request: web.Request) -> web.Response:
    return web.json_response(await read_json(request))


async def fail(request: web.Request) -> web.Response:
    raise ERRORS[request.match_info["what"]][0]


async def answer(request: web.Request) -> web.Response:
    match request.match_info["what"]:
        case "long":
            return web.Response(body=b"x" * 1000)
        case "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(1000):
                await response.write(b"x" * 1000)
            return response
        case "list":
            return web.json_response([1])
        case "text":
            return web.Response(text="hello")
        case "away":
            raise web.HTTPFound("/answer/list")
        case "gzip":
            body = gzip.compress(b"{}" + b" " * 10**6)
            return web.Response(body=body, headers={"Content-Encoding": "gzip"})
        case "busy":
            raise web.HTTPTooManyRequests
        case "silent":
            return web.Response(status=404)
        case _:
            await asyncio.sleep(30)
            raise AssertionError


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    app = make_app(max_body_bytes=BODY_LIMIT)
    app.add_routes(
        [
            web.post(ECHO.path, echo),
            web.post(ONCE.path, once),
            web.post("/parse", parse),
            web.get("/fail/{what}", fail),
            web.get("/answer/{what}", answer),
        ]
    )
    running = await serve_app(app, "127.0.0.1", 0)
    yield running
    await running.close()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[SignedClient]:
    async with SignedClient(generate_identity()) as client:
        yield client


async def test_a_signed_message_arrives_with_its_signer(
    server: Server, client: SignedClient
) -> None:
    reply = await client.post_signed(ECHO, server.url, "me", {"n": 1})
    assert reply["body"] == {"n": 1}
    assert reply["issuer"] == client._identity.signing_key_hex  # type: ignore[union-attr]


@pytest.mark.parametrize(("typ", "audience"), [("u", "me"), ("t", "you")])
async def test_another_type_or_audience_is_refused(
    server: Server, client: SignedClient, typ: str, audience: str
) -> None:
    with pytest.raises(Refused) as refused:
        await client.post_signed(replace(ECHO, typ=typ), server.url, audience, {})
    assert refused.value.status == 400


async def test_a15_a_token_counts_once_where_it_matters(
    server: Server, client: SignedClient
) -> None:
    token = client.sign(ONCE, "me", {})
    await client.post_token(ONCE, server.url, token)
    with pytest.raises(Refused, match="used before"):
        await client.post_token(ONCE, server.url, token)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 4000])
async def test_a25_bodies_that_are_no_object_are_refused(
    server: Server, client: SignedClient, body: bytes
) -> None:
    async with client.session.post(f"{server.url}/parse", data=body) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]


async def test_a09_a_body_over_the_limit_is_refused(server: Server, client: SignedClient) -> None:
    with pytest.raises(Refused) as refused:
        await client.post_json(f"{server.url}/parse", {"x": "y" * BODY_LIMIT})
    assert refused.value.status == 413


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a07_a_compressed_body_is_not_unpacked(
    server: Server, client: SignedClient, encoding: str
) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    for body in (b"{}", b"{}" + b" " * (BODY_LIMIT - 2)):
        async with client.session.post(
            f"{server.url}/parse", data=pack(body), headers={"Content-Encoding": encoding}
        ) as response:
            assert response.status == 400
            assert "not JSON" in (await response.json())["error"]


async def send_head(server: Server, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(head.replace("\n", "\r\n").encode())
    await writer.drain()
    return reader, writer


LARGE = "POST /parse HTTP/1.1\nHost: x\nContent-Length: 100000\n\n{"


async def test_a25_a_body_that_dribbles_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setattr(tuning, "HTTP_READ_S", 0.05)
    reader, writer = await send_head(server, LARGE)
    async with asyncio.timeout(HANG_S):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_a25_a_head_that_dribbles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "HTTP_IDLE_S", 0.05)
    running = await serve_app(make_app(), "127.0.0.1", 0)
    reader, writer = await send_head(running, "POST /parse HTTP/1.1\nHost:")
    async with asyncio.timeout(HANG_S):
        assert await reader.read() == b""
    writer.close()
    await running.close()


async def greet(request: web.Request) -> web.Response:
    get_admission(request).vouch(request, "a key that was authorised")
    return web.json_response({})


async def test_a25_a_flood_of_large_bodies_waits_and_small_ones_pass(
    monkeypatch: pytest.MonkeyPatch, client: SignedClient
) -> None:
    """Strangers' bodies beyond the places are refused; those of known parties wait."""
    monkeypatch.setattr(tuning, "HTTP_LARGE_BODIES", 1)
    app = make_app()
    app.add_routes([web.post("/parse", parse), web.get("/greet", greet)])
    running = await serve_app(app, "127.0.0.1", 0)
    strangers = [await send_head(running, LARGE) for _ in range(2)]
    known = [await send_head(running, "GET /greet HTTP/1.1\nHost: x\n\n") for _ in range(2)]
    async with asyncio.timeout(HANG_S):
        for reader, writer in known:
            await reader.readuntil(b"{}")
            writer.write(LARGE.replace("\n", "\r\n").encode())
        assert await client.post_json(f"{running.url}/parse", {"small": 1}) == {"small": 1}
        assert b" 503 " in await strangers[1][0].readline()
        for reader, writer in (strangers[0], *known):
            writer.write(b'"a": 1}'.rjust(99_999))
            assert b" 200 " in await reader.readline()
    for _, writer in (*strangers, *known):
        writer.close()
    await running.close()


@pytest.mark.parametrize("what", ERRORS)
async def test_errors_travel_as_one_sentence(
    server: Server, client: SignedClient, what: str
) -> None:
    error, status = ERRORS[what]
    expected = Unavailable if status >= 500 else Refused
    with pytest.raises(expected) as raised:
        await client.get_json(f"{server.url}/fail/{what}")
    if isinstance(raised.value, Refused):
        assert raised.value.status == status
    if status == 500:
        assert "secret" not in str(raised.value)
    else:
        assert str(error) in str(raised.value)


async def test_a_refusal_without_a_reason_names_who_refused(
    server: Server, client: SignedClient
) -> None:
    url = f"{server.url}/answer/silent"
    with pytest.raises(Refused, match=f"{url} answered 404: it gave no reason"):
        await client.get_json(url)


def test_a_failure_that_says_nothing_is_named_by_its_type() -> None:
    assert describe(TimeoutError()) == "TimeoutError" and describe(OSError("full")) == "full"


@pytest.mark.parametrize("what", ["long", "endless", "list", "text", "away", "gzip"])
async def test_a09_malformed_long_and_redirecting_answers_are_the_peers_fault(
    server: Server, client: SignedClient, what: str
) -> None:
    with pytest.raises(PeerFault):
        await client.get_json(f"{server.url}/answer/{what}", max_bytes=500)


async def test_silence_and_overload_are_worth_another_try(
    server: Server, client: SignedClient
) -> None:
    with pytest.raises(Unavailable, match="did not answer within"):
        await client.get_json(f"{server.url}/answer/never", timeout_s=0.1)
    with pytest.raises(Unavailable, match="429"):
        await client.get_json(f"{server.url}/answer/busy")
    await server.close()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await client.get_json(f"{server.url}/answer/list")


async def test_a_busy_port_is_named(server: Server) -> None:
    with pytest.raises(ConfigurationError, match=f"{server.port}.*choose another"):
        await serve_app(make_app(), "127.0.0.1", server.port)


async def test_without_an_identity_nothing_is_signed() -> None:
    async with SignedClient() as client:
        with pytest.raises(InvalidInput, match="without an identity"):
            client.sign(ONCE, "me", {})
