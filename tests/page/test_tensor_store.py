"""Weights on the device: resumed where they broke off, and never used half or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.page.browser import open_page

PIECE = 8 * 1024 * 1024
PREPARE = f"""
    const PIECE = {PIECE};
    const whole = new Uint8Array(2 * PIECE + 1000).map((_, i) => (i * 2654435761) >>> 13);
    const digest = page.computeDigest(whole);
    const source = {{ digest, bytes: whole.length, file: "f", start: 7, name: "the tensor 't'" }};
    const asked = [];
    // a server whose file has the tensor behind 7 bytes; `spoil` changes what it answers
    const serve = (spoil = (bytes) => bytes) => async (file, start, end) => {{
        asked.push([start, end]);
        return new Response(spoil(whole.slice(start - 7, end - 7), start - 7));
    }};
    const attempt = async (work) => {{
        try {{ return [await work(), ""]; }} catch (error) {{ return [null, error.message]; }}
    }};
    const same = (bytes) => page.computeDigest(bytes) === digest;
"""


@pytest.fixture(scope="module")
def browser_page() -> Iterator[Page]:
    with open_page("./tensor_store") as page:
        yield page


@pytest.fixture
def page(browser_page: Page) -> Page:
    run(browser_page, "await (await page.TensorStore.open(serve())).clear()")
    return browser_page


def run(page: Page, program: str) -> Any:
    return page.evaluate(f"async () => {{ {PREPARE} {program} }}")


def test_a_download_goes_on_where_it_broke_off(page: Page) -> None:
    found = run(
        page,
        """
        const broken = serve((bytes, start) => {
            if (start >= PIECE + 500) throw new Error("cable");
            return start >= PIECE ? bytes.slice(0, 500) : bytes;
        });
        const first = await page.TensorStore.open(broken);
        const [, error] = await attempt(() => first.fetch(source));
        const [early] = await attempt(() => first.readWhole(source));
        asked.length = 0;
        const store = await page.TensorStore.open(serve());
        const missing = await store.countMissing([source]);
        const seen = [];
        await store.fetch(source, (bytes) => seen.push(bytes));
        const ranges = asked.slice();
        await store.fetch(source);  // nothing is left to ask
        const isSame = same(await store.readWhole(source));
        return { error, early, missing, seen, ranges, isSame, all: asked.length };
        """,
    )
    assert f"broke off after {PIECE + 500} of {2 * PIECE + 1000} bytes (cable)" in found["error"]
    assert found["early"] is None and found["missing"] == PIECE + 1000
    assert found["ranges"] == [[7 + PIECE, 7 + 2 * PIECE], [7 + 2 * PIECE, 7 + 2 * PIECE + 1000]]
    assert found["seen"] == sorted(found["seen"]) and found["seen"][-1] == 2 * PIECE + 1000
    assert found["isSame"] and found["all"] == 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("(bytes, start) => { if (start) bytes[9] ^= 1; return bytes; }", "other contents"),
        ("(bytes) => bytes.slice(0, 0)", "broke off"),
        ("(bytes, start) => (start ? whole.slice(start - 5) : bytes)", "more bytes"),
    ],
)
def test_wrong_bytes_are_an_error_and_are_not_kept(page: Page, spoil: str, words: str) -> None:
    found = run(
        page,
        f"""
        const store = await page.TensorStore.open(serve({spoil}));
        const [, error] = await attempt(() => store.fetch(source));
        const [read, none] = await attempt(() => store.readWhole(source));
        const good = await page.TensorStore.open(serve());
        await good.fetch(source);
        return {{ error, read, none, isSame: same(await good.readWhole(source)) }};
        """,
    )
    assert words in found["error"] and "the tensor 't'" in found["error"]
    assert found["read"] is None and "not on this device" in found["none"]
    assert found["isSame"]


def test_a_piece_that_the_browser_lost_is_an_error(page: Page) -> None:
    found = run(
        page,
        """
        const store = await page.TensorStore.open(serve());
        await store.fetch(source);
        const request = indexedDB.open("splitup-private");
        await new Promise((resolve) => (request.onsuccess = resolve));
        const database = request.result;
        const change = database.transaction("pieces", "readwrite");
        change.objectStore("pieces").delete([digest, 1]);
        await new Promise((resolve) => (change.oncomplete = resolve));
        database.close();
        const [, error] = await attempt(() => store.readWhole(source));
        await store.fetch(source);
        return [error, same(await store.readWhole(source))];
        """,
    )
    assert "lost a part of the tensor 't'" in found[0] and found[1]
