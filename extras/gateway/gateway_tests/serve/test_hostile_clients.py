"""What hostile, slow and broken clients of the HTTP server get, and what they cost it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from splitup_gateway import access, http_server
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKeys
from splitup_gateway.apis import streams
from splitup_gateway.apis.answers import AnswerChoice, CompletionForm
from splitup_gateway.charges import Charge
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Piece, Report
from splitup_gateway.http_server import ApiServer
from splitup_gateway.names import AnswerNames
from splitup_gateway.streaming import stream_routes
from splitup_gateway.streaming.stream import Stream
from splitup_gateway.tcp_relay import make_certificate
from splitup_gateway.timelines import Timelines

from bench.report import read_rss_bytes
from splitup.client.leases import LeaseOptions
from splitup.client.text.generation import Token
from splitup.core import tuning
from splitup.core.errors import Throttled
from splitup.net.http_server import read_in_time, serve_app
from tests.builders import HANG_S

IDLE = 1_000
HUGE = 100 * 2**20
MOST_GROWTH = 150e6
ASKED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/quote")


@asynccontextmanager
async def run_server(
    keys: ApiKeys | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Run a server without models: what is refused here is refused before a model is looked up."""
    api = ApiServer(SimpleNamespace(), LeaseOptions(), Access(keys), Timelines())  # type: ignore[arg-type]
    server = await serve_app(api.make_app(), "127.0.0.1", 0, cancels_handlers=True, tls=tls)
    try:
        yield server.url
    finally:
        await server.close()


async def post(http: aiohttp.ClientSession, url: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Post; return the status and the error, which has all four fields of OpenAI's form."""
    async with asyncio.timeout(HANG_S), http.post(url, **options) as reply:
        found = json.loads(await reply.read())
        assert list(found) == ["error"] and reply.content_type == "application/json"
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert found["error"]["message"] and found["error"]["type"] == "invalid_request_error"
        return reply.status, found["error"]


async def send_zeros(count: int) -> AsyncIterator[bytes]:
    for _ in range(count // 2**20):
        yield bytes(2**20)


@pytest.mark.parametrize("has_length", [True, False])
async def test_a_huge_body_is_refused_and_not_kept(has_length: bool) -> None:
    headers = {"Content-Length": str(HUGE)} if has_length else {}
    async with run_server() as url, aiohttp.ClientSession() as http:
        await post(http, f"{url}/v1/completions", data=b"{")
        before = read_rss_bytes(os.getpid())
        status, error = await post(
            http, f"{url}/v1/completions", data=send_zeros(HUGE), headers=headers
        )
        assert status == 413 and "Too Large" in error["message"]
        assert read_rss_bytes(os.getpid()) - before < HUGE / 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "m", "prompt": "\\ud800", "unknown\\ud800": 1}',
        b'{"model": "m", "prompt": "x", "max_tokens": 1e400}',
        b'{"model": "m", "prompt": "x", "max_tokens": NaN}',
        b'{"model": "m", "prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"model": "m", "model": ["m"], "prompt": "x"}',
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"model": "m", "prompt": ' + b"[" * 60 + b"]" * 60 + b"}",
    ],
)
async def test_bodies_that_are_no_request_are_errors_of_the_api(body: bytes) -> None:
    async with run_server() as url, aiohttp.ClientSession() as http:
        for path in ASKED:
            status, _ = await post(http, f"{url}{path}", data=body)
            assert status == 400, path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_an_unknown_field_is_named(path: str, body: dict[str, Any]) -> None:
    async with run_server() as url, aiohttp.ClientSession() as http:
        sent = {"model": "m", "surprise": 1, **body}
        status, error = await post(http, f"{url}{path}", json=sent)
        assert status == 400 and error["param"] == "surprise"
        status, error = await post(http, f"{url}{path}", json={"model": "m", **body})
        assert status == 404 and error["code"] == "model_not_found" and error["param"] == "model"


async def test_a_base_url_without_v1_is_named() -> None:
    async with run_server() as url, aiohttp.ClientSession() as http:
        status, error = await post(http, f"{url}/chat/completions", json={})
        assert status == 404 and error["message"].endswith("; let the base URL end with /v1")
        status, error = await post(http, f"{url}/nowhere", json={})
        assert status == 404 and error["message"] == "POST /nowhere: Not Found"


async def test_a_wrong_key_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    keys.create("ann")
    try:
        async with run_server(keys) as url, aiohttp.ClientSession() as http:
            for value in (
                "",
                "Bearer",
                "Bearer sk-splitup-wrong",
                f"Bearer {'x' * 4_000}",
                "Basic",
            ):
                headers = {"Authorization": value} if value else {}
                for path in ASKED:
                    status, error = await post(http, f"{url}{path}", data=b"[", headers=headers)
                    assert status == 401 and error["code"] == "invalid_api_key"
    finally:
        keys.close()


@pytest.mark.parametrize("bound", ["MOST_BODIES", "MOST_BODIES_OF_ONE"])
async def test_few_large_bodies_are_read_at_once(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two senders that stop in the middle hold up a third, until one of them goes away."""
    begun: asyncio.Queue[None] = asyncio.Queue()

    async def read(request: web.Request) -> bytes:
        if (request.content_length or 0) > tuning.HTTP_SMALL_BODY_BYTES:
            begun.put_nowait(None)
        return await read_in_time(request)

    monkeypatch.setattr(access, bound, 2)
    monkeypatch.setattr(access, "read_in_time", read)
    async with run_server() as url, aiohttp.ClientSession() as http:
        port = int(url.rpartition(":")[2])
        large = b"[" * (tuning.HTTP_SMALL_BODY_BYTES + 1)
        length = str(len(large)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + length
        head += b"\r\n\r\n{"
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in slow:
            writer.write(head)
            await asyncio.wait_for(begun.get(), HANG_S)
        third = asyncio.create_task(post(http, f"{url}/v1/completions", data=large))
        assert (await post(http, f"{url}/v1/completions", data=b"{"))[0] == 400  # small ones pass
        done, _ = await asyncio.wait({third}, timeout=0.5)
        assert not done
        slow[0][1].close()
        assert (await third)[0] == 400
        slow[1][1].close()


async def test_s111_who_sends_much_to_parse_is_waited_for_by_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, pauses = 100.0, []

    async def read_body(request: web.Request) -> bytes:
        return bytes(request.content_length or 100_000)

    async def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(max(seconds, 0.0))
        now += pauses[-1]

    def parse(_: bytes) -> float:
        nonlocal now
        now += 2.0
        if not large:
            raise ApiError("refused")
        return now

    monkeypatch.setattr(access, "read_in_time", read_body)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    server = Access(None, clock=lambda: now)
    keys = [SimpleNamespace(name=name, group="") for name in "ab"]
    for key, large in ((0, True), (0, True), (1, True), (0, False), (0, True)):
        request: Any = SimpleNamespace(content_length=None, client_max_size=2**23)
        with contextlib.nullcontext() if large else pytest.raises(ApiError):
            async with server.read(request, keys[key], parse):  # type: ignore[arg-type]
                pass
    # three times as long as its own last one took, less what another's took meanwhile
    assert pauses == [0, 6, 0, 4, 6]
    small: Any = SimpleNamespace(content_length=2)
    async with server.read(small, keys[0], parse):  # type: ignore[arg-type]
        assert len(pauses) == 5


async def test_s122_a_key_fills_no_memory_by_large_requests_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are counted until they are answered, and also those whose length nobody told."""

    async def read_body(request: Any) -> bytes:
        return bytes(request.content_length or 100_000)

    monkeypatch.setattr(access, "read_in_time", read_body)
    monkeypatch.setattr(tuning, "LARGE_MESSAGE_REST", 0.0)
    monkeypatch.setattr(access, "MOST_BYTES_OF_ONE", 16 * 2**20)
    server, ann, bob = Access(None), *(SimpleNamespace(name=name, group="") for name in "ab")

    def ask(key: Any, length: int | None) -> Any:
        request: Any = SimpleNamespace(content_length=length, client_max_size=8 * 2**20)
        return server.read(request, key, len)

    async with ask(ann, None), ask(ann, 7 * 2**20):
        with pytest.raises(Throttled, match="run already"):
            async with ask(ann, 2 * 2**20):
                pass
        async with ask(ann, 60_000), ask(ann, 2**20) as (_, size), ask(bob, 15 * 2**20):
            assert size == 2**20
    async with ask(ann, 50 * 2**20):  # one is always tried; the server's own limit is smaller
        pass


async def test_s22_a_key_that_is_created_closes_a_server_that_runs(tmp_path: Path) -> None:
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    elsewhere = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")  # splitup keys
    try:
        async with run_server(keys) as url, aiohttp.ClientSession() as http:
            ask = partial(post, http, f"{url}/v1/completions", json={"model": "m", "prompt": "x"})
            assert (await ask())[0] == 404  # let in: there is no such model
            ann = {"Authorization": f"Bearer {elsewhere.create('ann')}"}
            bob = {"Authorization": f"Bearer {elsewhere.create('bob')}"}
            assert (await ask())[0] == 401
            assert (await ask(headers=ann))[0] == (await ask(headers=bob))[0] == 404
            elsewhere.revoke("ann")
            assert (await ask(headers=ann))[0] == 401 and (await ask(headers=bob))[0] == 404
            elsewhere.revoke("bob")
            assert (await ask())[0] == 401  # keys that are revoked open nothing
    finally:
        keys.close()
        elsewhere.close()


async def test_s22_a_server_that_others_reach_needs_keys_even_if_there_are_none(
    tmp_path: Path,
) -> None:
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    with pytest.raises(ApiError, match="no valid API key"):
        await Access(keys, needs_keys=True).authorise(None)
    assert await Access(keys).authorise(None) is None
    keys.close()


@pytest.mark.parametrize("field", ["Authorization", "Host", "Origin", "Last-Event-ID", "X-\xff"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/\xff", "/health?x=\xff", "/v1/quote"])
async def test_a25_a_head_that_is_not_utf8_is_refused(
    field: str, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    keys.create("ann")
    async with run_server(keys) as url, asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        host = "" if field == "Host" else "Host: localhost\r\n"
        head = f"GET {path} HTTP/1.1\r\n{host}{field}: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"
        writer.write(head.encode("latin-1"))
        status = (await reader.read()).split(b" ")[1]
        writer.close()
    keys.close()
    assert status == b"400" and not caplog.records


async def test_s24_slow_connections_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """More slow heads of one address than there are places: others, and it, are served."""
    monkeypatch.setattr(tuning, "STRANGERS", 32)
    async with run_server() as url, asyncio.timeout(HANG_S):
        port = int(url.rpartition(":")[2])
        kept = aiohttp.ClientSession()
        async with kept.get(f"{url}/health") as reply:
            assert reply.status == 200
        slow = []
        for _ in range(64):
            slow.append(await asyncio.open_connection("127.0.0.1", port))
            slow[-1][1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        for address in ("127.0.0.1", "127.0.0.2"):
            connector = aiohttp.TCPConnector(local_addr=(address, 0))
            async with aiohttp.ClientSession(connector=connector) as http:
                async with http.get(f"{url}/health") as reply:
                    assert reply.status == 200
        for reader, _ in slow[:32]:  # the oldest ones made room
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        async with kept.get(f"{url}/health") as reply:  # on the connection that it had
            assert reply.status == 200
        await kept.close()
        for _, writer in slow:
            writer.transport.abort()


async def test_s24_connections_are_counted_before_tls_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Handshakes that never end make room, too; a body that comes with the last one is read."""
    monkeypatch.setattr(tuning, "STRANGERS", 8)
    context, _ = make_certificate(["127.0.0.1"])
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with run_server(tls=context) as url, asyncio.timeout(HANG_S):
        port = int(url.rpartition(":")[2])
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with aiohttp.ClientSession(connector=connector) as http:
            for size in (1, 200_000, 1_000_000):
                status, _ = await post(http, f"{url}/v1/completions", data=b"[" * size)
                assert status == 400
        for reader, _ in slow[:8]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for _, writer in slow:
            writer.transport.abort()


async def test_a_thousand_idle_connections_take_little_memory() -> None:
    """Half of them have begun a request; both ends are in this process."""
    async with run_server() as url, aiohttp.ClientSession() as http:
        await post(http, f"{url}/v1/completions", data=b"{")
        port = int(url.rpartition(":")[2])
        before = read_rss_bytes(os.getpid())
        with contextlib.ExitStack() as stack:
            for number in range(IDLE):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                if number % 2:
                    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
                if number % 50 == 0:  # the server takes them meanwhile: its queue is short
                    await asyncio.sleep(0)
            status, _ = await post(http, f"{url}/v1/completions", data=b"{")
            assert status == 400
            assert read_rss_bytes(os.getpid()) - before < MOST_GROWTH


async def test_a_reader_that_falls_behind_stops_the_work_and_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text is computed as far as is kept, no further; then the lease is given back."""
    monkeypatch.setattr(stream_routes, "WRITE_S", 1.0)
    monkeypatch.setattr(tuning, "STREAM_GRACE_S", 0.1)
    made, ended = [0], asyncio.Event()

    async def write_without_end(*_: object) -> AsyncGenerator[Piece, None]:
        try:
            while True:
                made[0] += 1
                yield Piece(Token(id=1, text="word " * 100), None)
                await asyncio.sleep(0)
        finally:
            ended.set()

    monkeypatch.setattr(streams, "generate_text", write_without_end)
    model: Any = SimpleNamespace(name="m")
    routes = stream_routes.StreamRoutes(Access(None))

    async def work(stream: Stream) -> None:
        form = CompletionForm(model, is_chat=False, wants_usage=False, names=AnswerNames())
        choices = [AnswerChoice(0, Report((1,)))]
        pieces = streams.generate_all(None, None, model, [None], choices, Charge())  # type: ignore
        async with contextlib.aclosing(pieces):
            await streams.write_events(stream, form, choices, pieces, Charge())

    async def answer(request: web.Request) -> web.StreamResponse:
        return await routes.answer(request, "", b"", work)

    await answer_nobody(answer, ended)
    assert tuning.STREAM_BYTES < 500 * made[0] < 20 * tuning.STREAM_BYTES


async def test_a_whole_answer_that_is_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_routes, "WRITE_S", 1.0)
    ended = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        async def make(_: web.Request) -> web.StreamResponse:
            return web.Response(body=bytes(HUGE))

        try:
            return await http_server.answer_errors(request, make)
        except ConnectionError:
            ended.set()
            raise

    await answer_nobody(answer, ended)


async def answer_nobody(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], ended: asyncio.Event
) -> None:
    """Answer a client that does not read, until the server has given up."""
    app = web.Application()
    app.router.add_get("/", answer)
    server = await serve_app(app, "127.0.0.1", 0, cancels_handlers=True)
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(HANG_S):
                await ended.wait()
    finally:
        await server.close()
