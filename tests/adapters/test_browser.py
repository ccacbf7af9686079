"""A client of another implementation, node-seal in Chromium, and the same host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from aiohttp import web
from playwright.async_api import async_playwright

from splitup.adapters.host import AdapterHost
from splitup.net.http import serve_app
from tests.adapters.weights import make_random
from tests.page_build import find_browser

NPM = Path(__file__).resolve().parents[1] / "npm"
RUN = """async ([name, states]) => {
  const { applyAll } = await import("/npm/adapter.mjs");
  return await applyAll("", name, states);
}"""


async def answer_empty_page(request: web.Request) -> web.Response:
    return web.Response(text="<!doctype html>", content_type="text/html")


async def test_a_browser_gets_the_same() -> None:
    adapters = [make_random(1536, 16, name="wide"), make_random(37, 5, name="odd")]
    host = AdapterHost(adapters)
    app = host.make_app()
    app.router.add_get("/", answer_empty_page)
    app.router.add_static("/npm", NPM)
    server = await serve_app(app, "127.0.0.1", 0)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page()
        await page.goto(server.url)
        for adapter in adapters:
            states = np.random.default_rng(4).normal(size=(5, adapter.info.width))
            found = await page.evaluate(RUN, [adapter.info.name, states.tolist()])
            np.testing.assert_allclose(found["answers"], adapter.compute(states), atol=1e-5)
            assert found["sent"] + found["received"] <= 260 * 1024  # without compression
        await browser.close()
    await server.close()
    host.close()
