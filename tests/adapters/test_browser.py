"""A client of another implementation, node-seal in Chromium, and the same host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from playwright.async_api import Error, async_playwright

from splitup.adapters.host import AdapterHost, HostOptions
from splitup.net.http import serve_app
from tests.adapters.weights import make_random
from tests.page_build import find_browser

NPM = Path(__file__).resolve().parents[1] / "npm"
RUN = """async ([url, name, states]) => {
  const { applyAll } = await import("/npm/adapter.mjs");
  return await applyAll(url, name, states);
}"""


async def answer_empty_page(request: web.Request) -> web.Response:
    return web.Response(text="<!doctype html>", content_type="text/html")


async def test_a_browser_gets_the_same() -> None:
    adapters = [make_random(1536, 16, name="wide"), make_random(37, 5, name="odd")]
    pages = web.Application()
    pages.router.add_get("/", answer_empty_page)
    pages.router.add_static("/npm", NPM)
    server = await serve_app(pages, "127.0.0.1", 0)  # of another origin than the host
    host = AdapterHost(adapters, HostOptions(origins=("https://other.example", server.url)))
    closed = AdapterHost(adapters, HostOptions(origins=("https://other.example",)))
    hosts = [await serve_app(one.make_app(), "127.0.0.1", 0) for one in (host, closed)]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page()
        await page.goto(server.url)
        for adapter in adapters:
            states = np.random.default_rng(4).normal(size=(5, adapter.info.width))
            found = await page.evaluate(RUN, [hosts[0].url, adapter.info.name, states.tolist()])
            np.testing.assert_allclose(found["answers"], adapter.compute(states), atol=1e-5)
            assert found["sent"] + found["received"] <= 260 * 1024  # without compression
        with pytest.raises(Error, match="Failed to fetch"):
            await page.evaluate(RUN, [hosts[1].url, "odd", []])
        await browser.close()
    for one in (server, *hosts):
        await one.close()
    host.close()
    closed.close()
