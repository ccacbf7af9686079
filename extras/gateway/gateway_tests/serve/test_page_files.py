"""The page's files are those that its sources give; its rules for browsers, and for other sites."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from splitup_gateway.errors import ApiError
from splitup_gateway.page_files import HEADERS, MARKET_PAGE, add_page, check_site

from splitup.net.http_server import serve_app
from tests.page_build import PAGE, run_node

SHIPPED = Path(__file__).resolve().parents[2] / "splitup_gateway" / "page"
FILES = {"app.css", "app.js", "icon.svg", "index.html", "owner.html", "owner.js"}
PRIVATE = {
    *("device.js", "kernels.wasm", "kernels-relaxed.wasm", "offline.js"),
    *("private.css", "private.html", "private.js", "private.webmanifest"),
}
POLICY = "Content-Security-Policy"
LATER = {"seal.wasm"}  # fetched when an adapter is used


def test_the_shipped_files_are_built_from_the_sources(tmp_path: Path) -> None:
    run_node("build.mjs", str(tmp_path))
    names = FILES | PRIVATE | LATER
    assert {p.name for p in tmp_path.iterdir()} == names == {p.name for p in SHIPPED.iterdir()}
    for name in names:
        same = (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
        assert same, f"{name} is older than its source; run: make page"
    for page in (FILES, PRIVATE):
        assert sum(len(gzip.compress((SHIPPED / name).read_bytes())) for name in page) < 300_000


def test_the_sources_pass_the_type_checker() -> None:
    run_node("node_modules/typescript/bin/tsc", "--noEmit")


def test_packages_have_exact_versions_and_no_registry() -> None:
    package = json.loads((PAGE / "package.json").read_text())
    lock = (PAGE / "package-lock.json").read_text()
    assert all(version[0].isdigit() for version in package["devDependencies"].values())
    assert '"resolved"' not in lock and "http" not in json.dumps(
        [entry.get("version") for entry in json.loads(lock)["packages"].values()]
    )


async def test_files_are_compressed_cached_and_bound_to_this_origin() -> None:
    app = web.Application()
    host = "https://adapters.example"
    add_page(app, MARKET_PAGE, adapter_hosts=(host,))
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        async with ClientSession() as http:
            async with http.get(server.url) as reply:
                assert reply.status == 200 and "<splitup-app>" in await reply.text()
                policy = reply.headers[POLICY]
                assert policy.replace("'self' data:;", "'self';", 1) == HEADERS[POLICY]
                etag = reply.headers["ETag"]
            async with http.get(server.url, headers={"If-None-Match": etag}) as reply:
                assert reply.status == 304
            async with http.get(f"{server.url}/app.js") as reply:
                assert reply.headers["Content-Encoding"] == "gzip"
                for name, value in HEADERS.items():
                    assert reply.headers[name] == value
                assert "eval(" not in await reply.text()
            policies = {}
            for path in ("private", "private/device.js", "offline.js", "private/kernels.wasm"):
                async with http.get(f"{server.url}/{path}") as reply:
                    assert reply.status == 200
                    policies[path] = reply.headers[POLICY]
    finally:
        await server.close()
    policy = HEADERS[POLICY]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    worker = policies["private/device.js"]
    assert worker.endswith(f"connect-src 'self' {host}")
    policies["private/device.js"] = worker.removesuffix(f" {host}")
    for path, policy in policies.items():
        assert "default-src 'none'" in policy and "http" not in policy
        assert "unsafe" not in policy.replace("'wasm-unsafe-eval'", "")
        assert ("wasm-unsafe-eval" in policy) == (path == "private/device.js")


@pytest.mark.parametrize(
    ("host", "origin", "fetch_site", "is_navigation", "has_keys", "passes"),
    [
        ("127.0.0.1:8000", None, None, False, False, True),  # a program
        ("127.0.0.1:8000", "http://127.0.0.1:8000", "same-origin", False, False, True),
        ("[::1]:8000", None, "none", True, False, True),
        ("localhost:8000", None, "cross-site", True, False, True),  # a link to the page
        ("127.0.0.1:8000", "https://evil.example", "cross-site", False, False, False),
        ("127.0.0.1:8000", "https://evil.example", None, False, True, False),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", "same-site", False, True, False),
        ("127.0.0.1:8000", "null", None, False, False, False),
        ("127.0.0.1:8000", None, "cross-site", False, False, False),  # an image
        ("evil.example:8000", "http://evil.example:8000", "same-origin", False, False, False),
        ("llm.example", "https://llm.example", "same-origin", False, True, True),
        ("", None, None, False, False, False),
        ("[::1", None, None, False, False, False),
    ],
)
def test_pages_of_other_sites_spend_nothing(
    host: str,
    origin: str | None,
    fetch_site: str | None,
    is_navigation: bool,
    has_keys: bool,
    passes: bool,
) -> None:
    try:
        check_site(host, origin, fetch_site, is_navigation=is_navigation, has_keys=has_keys)
    except ApiError as error:
        assert not passes and error.status == 403
    else:
        assert passes
