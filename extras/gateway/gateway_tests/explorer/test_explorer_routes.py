"""How the explorer's pages go round by key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession
from splitup_gateway import explorer_routes
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKeys
from splitup_gateway.explorer_routes import ExplorerRoutes
from splitup_gateway.http_server import answer_errors
from splitup_gateway.timelines import Timelines

from splitup.net.http_server import make_app, serve_app
from tests.builders import HANG_S


async def test_s66_a_key_that_reads_many_pages_keeps_them_from_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer_routes, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(explorer_routes, "MOST_WAITING", 4)
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    eve, ann = keys.create("eve"), keys.create("ann")
    shown, gate = list[str](), asyncio.Event()

    async def search(text: str) -> dict[str, Any]:
        shown.append(text)
        await gate.wait()
        return {}

    routes = ExplorerRoutes(SimpleNamespace(search=search))  # type: ignore[arg-type]
    places = routes._places
    app = make_app(errors=answer_errors)
    routes.add_to(app, Timelines(), Access(keys))
    server = await serve_app(app, "127.0.0.1", 0)

    async def read(http: ClientSession, secret: str, text: str) -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        try:
            async with http.get(
                f"{server.url}/explorer/v1/search", params={"q": text}, headers=headers
            ) as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0

    async with asyncio.timeout(HANG_S), ClientSession() as http:
        flood = []
        for number in range(4):
            flood.append(asyncio.create_task(read(http, eve, f"eve {number}")))
            while len(places) <= number or not shown:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert await read(http, eve, "eve 4") == 429
        other = asyncio.create_task(read(http, ann, "ann"))
        assert await flood.pop() != 200  # cut off, or refused when the client tried again
        gate.set()
        assert [await one for one in (other, *flood)] == [200] * 4
    assert shown == ["eve 0", "eve 1", "ann", "eve 2"]
    await server.close()
    keys.close()
