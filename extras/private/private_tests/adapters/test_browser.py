"""The page's client of an adapter host, node-seal in Chromium, before the same host."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from playwright.async_api import Error, Page, Route, async_playwright
from private_tests.adapters.test_choice import BANK, LAW, NONE, QUESTIONS
from private_tests.adapters.weights import make_random
from splitup_private.adapters.choice import choose_adapter
from splitup_private.adapters.ckks import get_library
from splitup_private.adapters.client import AdapterOptions, EncryptedAdapter
from splitup_private.adapters.host import AdapterHost, HostOptions
from splitup_private.adapters.messages import AdapterList

from splitup.crypto.keys import generate_identity
from splitup.net.http import SignedClient
from splitup.net.http_server import serve_app
from tests.page_build import PAGE, find_browser, run_node

BUNDLE = """
    import { build } from "esbuild";
    const { outputFiles } = await build({
        entryPoints: ["src/private/adapter.ts"], bundle: true, format: "esm", external: ["module"],
        legalComments: "none", write: false,
    });
    console.log(outputFiles[0].text);
"""
RUN = """async ([urls, signers, name, states]) => {
  const { EncryptedAdapter, listAdapters } = await import("/adapter.js");
  const offers = await listAdapters(urls, signers, states[0].length);
  const adapter = await EncryptedAdapter.open(offers.find((offer) => offer.name === name));
  const answers = [];
  adapter.startReport();
  for (const state of states) answers.push([...await adapter.apply(Float32Array.from(state))]);
  adapter.giveUp();
  return { answers, line: adapter.describe() };
}"""
SIGNERS = [generate_identity() for _ in range(2)]
KEYS = [signer.signing_key_hex for signer in SIGNERS]
CHOOSE = """async ([adapters, questions]) => {
  const { chooseAdapter } = await import("/adapter.js");
  return questions.map((question) => chooseAdapter(adapters, question)?.name ?? null);
}"""


async def answer_empty_page(request: web.Request) -> web.Response:
    return web.Response(text="<!doctype html>", content_type="text/html")


@pytest.fixture
async def page() -> AsyncIterator[tuple[Page, str]]:
    """A page with the client's module, and its origin."""
    bundle = await asyncio.to_thread(run_node, "--input-type=module", "--eval", BUNDLE)
    app = web.Application()

    async def answer_bundle(request: web.Request) -> web.Response:
        return web.Response(text=bundle, content_type="text/javascript")

    app.router.add_get("/", answer_empty_page)
    app.router.add_get("/adapter.js", answer_bundle)
    app.router.add_static("/private", PAGE.parent / "extras/gateway/splitup_gateway/page")
    server = await serve_app(app, "127.0.0.1", 0)  # of another origin than the host
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page()
        await page.goto(server.url)
        yield page, server.url
        await browser.close()
    await server.close()


async def ask_python(url: str, name: str, states: np.ndarray) -> list[np.ndarray]:
    """Return the answers that Python's client gets."""
    async with SignedClient() as http:
        width = states.shape[1]
        adapter = await EncryptedAdapter.open(http, AdapterOptions(url, name), width)
        try:
            return [await adapter.apply(state) for state in states]
        finally:
            await adapter.close()


@pytest.mark.long  # in small: test_host.py, and test_ckks.py for the numbers
async def test_a_browser_gets_what_python_gets(page: tuple[Page, str]) -> None:
    tab, origin = page
    adapters = [make_random(1536, 16, name="wide"), make_random(37, 5, name="odd")]
    hosts = [AdapterHost(adapters, HostOptions(origins=("https://other.example", origin)))]
    hosts.append(AdapterHost(adapters, HostOptions(origins=("https://other.example",))))
    hosts += [AdapterHost(adapters, HostOptions(origins=(origin,)), one) for one in SIGNERS]
    servers = [await serve_app(host.make_app(), "127.0.0.1", 0) for host in hosts]
    for adapter in adapters:
        states = np.random.default_rng(4).normal(size=(3, adapter.info.width)).astype(np.float32)
        asked = [[servers[0].url] * 2, [], adapter.info.name, states.tolist()]
        found = await tab.evaluate(RUN, asked)
        wanted = adapter.compute(states)
        python = await ask_python(servers[0].url, adapter.info.name, states)
        for answers in (found["answers"], python):
            error = np.linalg.norm(answers - wanted, axis=1) / np.linalg.norm(states, axis=1)
            assert error.max() <= 1e-5
        np.testing.assert_allclose(found["answers"], python, atol=1e-5)
        numbers = re.fullmatch(
            r"adapter .* under encryption: 3 hidden states, each encrypt .* ms, host .* ms of .* "
            r"ms waited, decrypt .* ms, (\d+) kB sent, (\d+) kB received",
            found["line"],
        )
        assert numbers and sum(map(int, numbers.groups())) <= 266  # 260 KB, without compression
    signed = [server.url for server in servers[2:]]
    found = await tab.evaluate(RUN, [signed, KEYS, "odd", states.tolist()])
    np.testing.assert_allclose(found["answers"], python, atol=1e-5)
    assert re.search("; a second host answered [123] of them alike$", found["line"])
    for url in (servers[0].url, signed[1]):
        with pytest.raises(Error, match="no signer whom this server names has signed what"):
            await tab.evaluate(RUN, [[signed[0], url], KEYS[:1], "odd", states.tolist()])
    with pytest.raises(Error, match="does not answer"):
        await tab.evaluate(RUN, [[servers[1].url], [], "odd", [[0.0] * 37]])
    for server in servers:
        await server.close()
    for host in hosts:
        host.close()


@pytest.mark.long  # in small: test_host.py, in Python
async def test_a_browser_takes_no_answer_that_cannot_be_right(page: tuple[Page, str]) -> None:
    tab, origin = page
    adapter = make_random(37, 5, name="odd")
    info = adapter.info
    unsafe = info.parameters.model_copy(update={"degree": 4096})
    library = get_library()
    lies = (
        ({"answer_bits": info.answer_bits + 8}, library, 1, "larger than the adapter can make it"),
        ({"parameters": unsafe}, library, 1, "other CKKS parameters"),
        ({"rank": 0}, library, 1, "an adapter that cannot be"),
        ({"rank": 6}, library, 2, "describe adapter [0-9a-f]{64} differently"),
        ({}, "tenseal 0", 2, "their answers cannot be compared"),
        ({"name": "strange"}, library, 2, "answer one ciphertext differently"),  # other weights
    )
    other = AdapterHost([replace(adapter, b=-adapter.b)], HostOptions(origins=(origin,)))
    host = AdapterHost([adapter], HostOptions(origins=(origin,)))
    servers = [await serve_app(one.make_app(), "127.0.0.1", 0) for one in (other, host)]
    listed: list[str] = []

    async def answer(route: Route) -> None:
        await route.fulfill(body=listed[-1], headers={"Access-Control-Allow-Origin": origin})

    await tab.route(f"{servers[0].url}/v1/adapters", answer)
    for changes, library, count, message in lies:
        lying = info.model_copy(update=changes)
        listed.append(AdapterList(library=library, adapters=(lying,)).model_dump_json())
        urls = [server.url for server in servers][:count]
        with pytest.raises(Error, match=message):
            await tab.evaluate(RUN, [urls, [], lying.name, [[1.0] * 37]])
    changed = AdapterList(library=library, adapters=(info,)).sign(SIGNERS[0])
    for update in ({"library": "tenseal 0"}, {"signature": ""}, {"signer": KEYS[1]}):
        listed.append(changed.model_copy(update=update).model_dump_json())
        with pytest.raises(Error, match="no signer whom this server names has signed what"):
            await tab.evaluate(RUN, [[servers[0].url], KEYS, "odd", [[1.0] * 37]])
    for server in servers:
        await server.close()
    host.close()
    other.close()


async def test_the_words_choose_as_in_python(page: tuple[Page, str]) -> None:
    adapters = [NONE, LAW, BANK]
    questions = [question for question, _ in QUESTIONS] + ["ΟΔΟΣ", "σ", "İstanbul", "a_b court"]
    found = await page[0].evaluate(
        CHOOSE, [[info.model_dump(mode="json") for info in adapters], questions]
    )
    for question, name in zip(questions, found, strict=True):
        chosen = choose_adapter(adapters, question)
        assert name == (chosen.name if chosen else None), question
