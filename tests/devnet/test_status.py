"""What a network's status says of its object store."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from splitup.core import tuning
from splitup.devnet import status
from splitup.net.http import SignedClient
from splitup.net.http_server import serve_app


async def test_a_store_that_refuses_answers_and_one_that_hangs_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/hung":
            await gone.wait()
        raise web.HTTPForbidden

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = await serve_app(app, "127.0.0.1", 0)
    async with SignedClient() as http:
        assert await status._store_answers(http, server.url)
        monkeypatch.setattr(tuning, "QUIET_S", 0.2)
        assert not await status._store_answers(http, f"{server.url}/hung")
    gone.set()
    await server.close()
    async with SignedClient() as http:
        assert not await status._store_answers(http, server.url)


async def test_who_is_silent_is_not_waited_for_when_others_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "_SILENCE_S", 0.01)

    async def answer(is_fine: bool) -> bool:
        return is_fine

    hangs = asyncio.Event()
    answers = {"yes": answer(True), "no": answer(False), "hung": hangs.wait()}
    assert await status._find_answering(answers) == {"yes"}
