"""The pages of ``splitup serve`` and of nodes: files, rules for browsers, who may call from one.

The files are built from ``page/`` and shipped in ``extras/gateway/splitup_gateway/page``.
"""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from splitup_gateway.errors import ApiError

_COMMON: Final = {
    "/app.css": ("app.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    # the page of private models: it, its worker, and what keeps both for times without a network
    "/private": ("private.html", "text/html"),
    "/private.js": ("private.js", "text/javascript"),
    "/private.css": ("private.css", "text/css"),
    "/private.webmanifest": ("private.webmanifest", "application/manifest+json"),
    "/private/device.js": ("device.js", "text/javascript"),
    "/private/kernels.wasm": ("kernels.wasm", "application/wasm"),
    "/private/kernels-relaxed.wasm": ("kernels-relaxed.wasm", "application/wasm"),
    "/private/seal.wasm": ("seal.wasm", "application/wasm"),  # fetched when an adapter is used
    "/offline.js": ("offline.js", "text/javascript"),
}
Files = Mapping[str, tuple[str, str]]  # path -> name and content type
MARKET_PAGE: Final[Files] = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    **_COMMON,
}
OWNER_PAGE: Final[Files] = {
    "/": ("owner.html", "text/html"),
    "/owner.js": ("owner.js", "text/javascript"),
    **_COMMON,
}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types lit-html"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_POLICY: Final = "Content-Security-Policy"
# What a file needs more than HEADERS allow, and nothing else may have. A worker has the policy of
# its own file, so that only the worker can compile WebAssembly, and the pages cannot.
_WORKER: Final = "/private/device.js"
_POLICIES: Final = {
    "/": HEADERS[_POLICY].replace("img-src 'self'", "img-src 'self' data:"),  # of a message
    "/private": HEADERS[_POLICY].replace("lit-html", "lit-html splitup-scripts")
    + "; worker-src 'self'; manifest-src 'self'",
    _WORKER: "default-src 'none'; script-src 'wasm-unsafe-eval'; connect-src 'self'",
    "/offline.js": "default-src 'none'; connect-src 'self'",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _File:
    content_type: str
    data: bytes
    compressed: bytes
    etag: str
    policy: str

    async def reply(self, request: web.Request) -> web.Response:
        headers = {**HEADERS, _POLICY: self.policy}
        headers |= {"ETag": f'"{self.etag}"', "Vary": "Accept-Encoding"}
        if self.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        body = self.data
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            body = self.compressed
        charset = "utf-8" if self.content_type.startswith("text/") else None
        return web.Response(
            body=body, content_type=self.content_type, charset=charset, headers=headers
        )


def add_page(
    app: web.Application,
    page: Files,
    *,
    has_keys: Callable[[], Awaitable[bool]] | None = None,
    adapter_hosts: Sequence[str] = (),
) -> None:
    """Add a page's files, and refuse what other sites' pages send.

    The private page's worker may also send to ``adapter_hosts``, and to nobody else.

    Without keys whoever reaches the server spends its money, and a page of any site can send
    requests to this machine from the browser of who looks at it. ``has_keys`` says whether there
    are some now; without it there are none.
    """
    folder = files("splitup_gateway") / "page"
    for path, (name, content_type) in page.items():
        data = (folder / name).read_bytes()
        etag = hashlib.sha256(data).hexdigest()[:32]
        policy = _POLICIES.get(path, HEADERS[_POLICY])
        if path == _WORKER:
            policy = " ".join((policy, *adapter_hosts))
        file = _File(content_type, data, gzip.compress(data, mtime=0), etag, policy)
        app.router.add_get(path, file.reply)

    @web.middleware
    async def refuse_other_sites(request: web.Request, handler: _Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        check_site(
            host,
            request.headers.get("Origin"),
            request.headers.get("Sec-Fetch-Site"),
            is_navigation=request.method == "GET"
            and request.headers.get("Sec-Fetch-Mode") == "navigate",
            has_keys=has_keys is not None and not _is_own_name(host) and await has_keys(),
        )
        return await handler(request)

    app.middlewares.append(refuse_other_sites)


def check_site(
    host: str, origin: str | None, fetch_site: str | None, *, is_navigation: bool, has_keys: bool
) -> None:
    """Raise ApiError (403) for a request that a page of another site sent.

    Programs send neither ``Origin`` nor ``Sec-Fetch-Site``. Without keys also a page whose name
    was made to point to this machine (DNS rebinding) is refused: such a name is in ``Host``.
    """
    foreign = origin is not None and _find_host(origin) != host.lower()
    if fetch_site in ("cross-site", "same-site") and not is_navigation:
        foreign = True
    if foreign:
        raise ApiError("requests from pages of other sites are refused", status=403)
    if not has_keys and not _is_own_name(host):
        raise ApiError(
            f"the server has no API keys and answers to localhost and addresses only, not to "
            f"'{host:.80}'; create a key (splitup keys new NAME) to use another name",
            status=403,
        )


def _find_host(origin: str) -> str:
    """Return an origin's host and port, "" for what is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_own_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost":
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
