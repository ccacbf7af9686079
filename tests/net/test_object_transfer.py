"""Transfers of objects with a server that misbehaves; tests/storage uses a real S3 server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from splitup.core import tuning
from splitup.core.errors import InvalidInput, PeerFault, SplitUpError, StorageUnavailable
from splitup.core.http_session import open_session
from splitup.messages.storage import Grant
from splitup.net.object_transfer import compute_sha256, count_bytes, get_object, put_object
from tests.builders import HANG_S

SECRET = "X-Amz-Signature=5ec2e7"
DATA = b"some tensor"
DIGEST = hashlib.sha256(DATA).hexdigest()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Script:
    """Answers with the next entry (a status, bytes, or a handler), then repeats the last."""

    def __init__(self) -> None:
        self.answers: list[int | bytes | Handler] = []
        self.requests: list[tuple[str, bytes]] = []
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, await request.read()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            location = {"Location": "/elsewhere"} if 300 <= answer < 400 else {}
            return web.Response(
                status=answer, text=f"<Error>{request.url}</Error>", headers=location
            )
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return await answer(request)

    def grant(self, method: str, key: str = "e/1", length_bytes: int | None = None) -> Grant:
        return Grant.from_value(
            {
                "method": method,
                "key": key,
                "url": f"http://127.0.0.1:{self.port}/bucket/{key}?{SECRET}",
                "headers": {},
                "length_bytes": length_bytes,
                "expires_at_s": int(time.time()) + 60,
            }
        )


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.port = runner.addresses[0][1]
    yield script
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as opened:
        yield opened


async def drop(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(DATA))})
    await response.prepare(request)
    await response.write(DATA[:4])
    assert request.transport is not None
    request.transport.abort()
    return response


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b"x" * 65536)
    except ConnectionError:
        return response


async def stall(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        await asyncio.Event().wait()
    finally:
        return response  # noqa: B012 (the client has gone)


async def garble(request: web.Request) -> web.StreamResponse:
    """Answer with no HTTP: the library's error quotes the whole URL."""
    assert request.transport is not None
    request.transport.write(b"garbage without meaning\r\n\r\n")
    request.transport.close()
    return web.Response()


async def get(script: Script, session: aiohttp.ClientSession, **changes: float) -> bytes:
    deadline_s = changes.get("deadline_s", HANG_S)
    return await get_object(
        session, script.grant("GET"), max_bytes=100, expected_digest=DIGEST, deadline_s=deadline_s
    )


@pytest.mark.parametrize("trouble", [503, 500, 429, drop, half])
async def test_f20_trouble_is_tried_again(
    script: Script, session: aiohttp.ClientSession, trouble: int | Handler
) -> None:
    script.answers = [trouble, trouble, DATA]
    assert await get(script, session) == DATA
    assert len(script.requests) == 3
    script.answers = [trouble, 200]
    await put_object(session, script.grant("PUT"), DATA, deadline_s=HANG_S)
    assert script.requests[-1] == ("PUT", DATA)


async def test_f21_a_corrupted_answer_is_fetched_again(
    script: Script, session: aiohttp.ClientSession
) -> None:
    script.answers = [b"other", b"noise", DATA]
    assert await get(script, session) == DATA


async def test_f21_a_wrong_object_is_a_peers_fault_after_three_fetches(
    script: Script, session: aiohttp.ClientSession
) -> None:
    script.answers = [b"wrong"]
    with pytest.raises(PeerFault, match="another digest"):
        await get(script, session)
    assert len(script.requests) == tuning.OBJECT_FETCHES


@pytest.mark.parametrize("answer", [b"x" * 101, endless])
async def test_a09_a_long_answer_is_cut_at_the_limit(
    script: Script, session: aiohttp.ClientSession, answer: bytes | Handler
) -> None:
    script.answers = [answer]
    with pytest.raises(PeerFault, match="longer than 100"):
        await get(script, session)
    assert len(script.requests) == 1


@pytest.mark.parametrize("trouble", [503, drop, stall])
async def test_f20_the_deadline_holds(
    script: Script, session: aiohttp.ClientSession, trouble: int | Handler
) -> None:
    script.answers = [trouble]
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match="in time"):
        await get(script, session, deadline_s=0.3)
    assert time.monotonic() - started < HANG_S


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (403, StorageUnavailable),
        (404, StorageUnavailable),
        (301, StorageUnavailable),
        (307, StorageUnavailable),
        (400, InvalidInput),
    ],
)
async def test_refusals_are_not_repeated_and_redirects_not_followed(
    script: Script, session: aiohttp.ClientSession, status: int, error: type[SplitUpError]
) -> None:
    script.answers = [status]
    with pytest.raises(error):
        await get(script, session)
    assert len(script.requests) == 1


async def test_a_taken_key_counts_only_with_equal_bytes(
    script: Script, session: aiohttp.ClientSession
) -> None:
    put = script.grant("PUT")
    script.answers = [412, DATA]
    await put_object(session, put, DATA, existing=script.grant("GET"))
    script.answers = [412, b"other bytes"]
    with pytest.raises(PeerFault):
        await put_object(session, put, DATA, existing=script.grant("GET"))
    script.answers = [412]
    with pytest.raises(PeerFault, match="exists already"):
        await put_object(session, put, DATA)
    with pytest.raises(InvalidInput, match="another key"):
        await put_object(session, put, DATA, existing=script.grant("GET", key="e/2"))


async def test_what_a_grant_does_not_allow_is_not_sent(
    script: Script, session: aiohttp.ClientSession
) -> None:
    script.answers = [200]
    with pytest.raises(InvalidInput, match="allows GET"):
        await put_object(session, script.grant("GET"), DATA)
    with pytest.raises(InvalidInput, match="must have 3 bytes"):
        await put_object(session, script.grant("PUT", length_bytes=3), DATA)
    old = script.grant("PUT").model_copy(update={"expires_at_s": int(time.time()) - 1})
    with pytest.raises(StorageUnavailable, match="expired"):
        await put_object(session, old, DATA)
    assert script.requests == []


@pytest.mark.parametrize(
    "answer", [403, 404, 400, 301, 503, drop, half, garble, b"wrong", b"x" * 101]
)
async def test_a12_no_url_in_errors_and_logs(
    script: Script,
    session: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    answer: int | bytes | Handler,
) -> None:
    import traceback

    caplog.set_level(logging.DEBUG)
    script.answers = [answer]
    with pytest.raises(SplitUpError) as caught:
        await get(script, session, deadline_s=0.2)
    text = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in text and "?" not in str(caught.value)


async def test_a12_no_url_when_nobody_listens(session: aiohttp.ClientSession) -> None:
    import socket
    import traceback

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = Script()
    script.port = port
    with pytest.raises(StorageUnavailable) as caught:
        await get(script, session, deadline_s=0.2)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "sizes", [[5], [10, 0, 300_000, 7], [90_000] * 4 + [3], [262_145, 1, 70_000]]
)
async def test_parts_arrive_as_one_object(
    script: Script, session: aiohttp.ClientSession, sizes: list[int]
) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    script.answers = [200]
    await put_object(session, script.grant("PUT", length_bytes=sum(sizes)), parts, pause_s=1e-4)
    assert script.requests == [("PUT", b"".join(parts))]
    digest = await compute_sha256([memoryview(part) for part in parts])
    assert digest == hashlib.sha256(b"".join(parts)).digest() and count_bytes(parts) == sum(sizes)


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_f20_a_store_that_answers_nothing_is_named_soon_and_given_up(
    script: Script,
    session: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    monkeypatch.setattr(tuning, "TRANSFER_STALL_S", 0.3)
    monkeypatch.setattr(tuning, "QUIET_S", 0.0)
    gone = asyncio.Event()

    async def hang(_request: web.Request) -> web.StreamResponse:
        await gone.wait()
        return web.Response()

    script.answers = [hang]
    place = f"the object store at http://127.0.0.1:{script.port}"
    with pytest.raises(StorageUnavailable, match=f"{place} did not .*nothing within 0.3 s") as told:
        async with asyncio.timeout(HANG_S):  # its own deadline is later
            if method == "GET":
                await get(script, session, deadline_s=2 * HANG_S)
            else:
                await put_object(session, script.grant("PUT"), DATA, deadline_s=2 * HANG_S)
    gone.set()
    assert len(script.requests) == 1
    assert f"{place} has not answered" in caplog.text
    assert SECRET not in caplog.text + str(told.value)
