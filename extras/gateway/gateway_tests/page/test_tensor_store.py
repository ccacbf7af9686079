"""Weights on the device: resumed where they broke off, and never used half or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gateway_tests.page.browser import open_page, run_in_worker
from playwright.sync_api import Page

SIZE = 2 * 1024 * 1024 + 1000
BROKEN = 1024 * 1024 + 500  # where a download breaks off
PREPARE = f"""
    const BROKEN = {BROKEN};
    const whole = new Uint8Array({SIZE}).map((_, i) => (i * 2654435761) >>> 13);
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
    const change = async (work) => {{
        const root = await navigator.storage.getDirectory();
        const folder = await root.getDirectoryHandle("splitup-private");
        const file = await (await folder.getFileHandle(digest)).createSyncAccessHandle();
        work(file);
        file.close();
    }};
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
    return run_in_worker(page, f"{PREPARE} {program}")


def test_a_download_goes_on_where_it_broke_off(page: Page) -> None:
    found = run(
        page,
        """
        const broken = serve((bytes, start) => {
            if (start) throw new Error("cable");
            return bytes.slice(0, BROKEN);
        });
        const first = await page.TensorStore.open(broken);
        const [, error] = await attempt(() => first.fetch(source));
        const [early] = await attempt(() => first.readWhole(source));
        asked.length = 0;
        const store = await page.TensorStore.open(serve());
        const seen = [];
        await store.fetch(source, (bytes) => seen.push(bytes));
        const ranges = asked.slice();
        await store.fetch(source);  // nothing is left to ask
        const isSame = same(await store.readWhole(source));
        return { error, early, seen, ranges, isSame, all: asked.length };
        """,
    )
    assert f"broke off after {BROKEN} of {SIZE} bytes (cable)" in found["error"]
    assert found["early"] is None
    assert found["ranges"] == [[7 + BROKEN, 7 + SIZE]]
    assert found["seen"] == sorted(found["seen"])
    assert (found["seen"][0], found["seen"][-1]) == (BROKEN, SIZE)
    assert found["isSame"] and found["all"] == 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("(bytes) => { bytes[9] ^= 1; return bytes; }", "other contents"),
        ("(bytes) => bytes.slice(0, 0)", "broke off"),
        ("(bytes) => new Blob([bytes, bytes])", "more bytes"),
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


@pytest.mark.parametrize("spoil", ["file.truncate(1000)", "file.truncate(0)"])
def test_a_file_that_the_browser_lost_is_an_error(page: Page, spoil: str) -> None:
    found = run(
        page,
        f"""
        const store = await page.TensorStore.open(serve());
        await store.fetch(source);
        await change((file) => {spoil});
        const [, error] = await attempt(() => store.readWhole(source));
        await store.fetch(source);
        return [error, same(await store.readWhole(source))];
        """,
    )
    assert "lost a part of the tensor 't'" in found[0] and found[1]


def test_what_is_left_of_a_download_is_checked_too(page: Page) -> None:
    found = run(
        page,
        """
        const broken = serve((bytes, start) => (start ? "" : bytes.slice(0, BROKEN)));
        await attempt(async () => (await page.TensorStore.open(broken)).fetch(source));
        await change((file) => file.write(Uint8Array.of(0, 1, 2), { at: 9 }));
        const store = await page.TensorStore.open(serve());
        const [, error] = await attempt(() => store.fetch(source));
        await store.fetch(source);
        return [error, same(await store.readWhole(source)), asked];
        """,
    )
    assert "other contents" in found[0] and found[1]
    assert found[2][-1] == [7, 7 + SIZE], "nothing of it was kept"


def test_two_pages_fetch_a_tensor_once(page: Page) -> None:
    found = run(
        page,
        """
        const one = await page.TensorStore.open(serve());
        const other = await page.TensorStore.open(serve());
        await Promise.all([one.fetch(source), other.fetch(source)]);
        const all = [await one.readWhole(source), await other.readWhole(source)];
        return [asked.length, ...all.map(same)];
        """,
    )
    assert found == [1, True, True]
