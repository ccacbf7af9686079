"""The private page's modules in a real browser, without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, sync_playwright

from tests.builders import HANG_S
from tests.page_build import PAGE, find_browser, run_node

ORIGIN = "http://localhost:9"  # browsers trust this name; nothing is asked of it
_BUNDLE = """
    import { build } from "esbuild";
    const { outputFiles } = await build({
        stdin: { contents: process.argv[1], resolveDir: "src/private", loader: "ts" },
        bundle: true, format: "iife", globalName: "page", write: false,
    });
    console.log(outputFiles[0].text);
"""


@contextlib.contextmanager
def open_page(*modules: str) -> Iterator[Page]:
    """Open an empty page that has these modules as ``page``, and the shipped kernels.

    Their names are as in an import of one of the private page's modules. A worker may have them,
    too: ``importScripts("/modules.js")``.
    """
    exports = "\n".join(f'export * from "{name}";' for name in modules)
    bundle = run_node("--input-type=module", "--eval", _BUNDLE, "--", exports)
    shipped = PAGE.parent / "extras/gateway/splitup_gateway/page"

    def answer(route: Route) -> None:
        name = Path(route.request.url).name
        if name.endswith(".wasm"):
            route.fulfill(body=(shipped / name).read_bytes(), content_type="application/wasm")
        elif name == "modules.js":
            route.fulfill(body=bundle, content_type="text/javascript")
        else:
            route.fulfill(body="<!doctype html><title>t</title>", content_type="text/html")

    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.set_default_timeout(HANG_S * 1_000)
        page.route("**/*", answer)
        page.goto(ORIGIN)
        page.add_script_tag(content=bundle)
        yield page
        browser.close()


def run_in_worker(page: Page, program: str, given: Any = None) -> Any:
    """Return what a program, the body of an async function of ``given``, returns in a worker."""
    return page.evaluate(
        """([program, given]) => new Promise((resolve, reject) => {
            const script = `importScripts("${location.origin}/modules.js");
                const run = async (given) => {${program}};
                onmessage = ({ data }) => run(data).then(
                    (found) => postMessage({ found }), (error) => postMessage({ error }));`;
            const worker = new Worker(URL.createObjectURL(new Blob([script])));
            const end = (act) => (worker.terminate(), act());
            worker.onmessage = ({ data: { found, error } }) =>
                end(() => (error ? reject(error) : resolve(found)));
            worker.onerror = ({ message }) => end(() => reject(new Error(message)));
            worker.postMessage(given);
        })""",
        [program, given],
    )
