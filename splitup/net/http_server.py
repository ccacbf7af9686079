"""HTTP servers: signed bodies, size and time limits, errors in JSON (``splitup.net.http``)."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.core.errors import (
    BadSignature,
    ChainRejected,
    ConfigurationError,
    InvalidInput,
    PeerFault,
    Refused,
    Unavailable,
)
from splitup.crypto.jws import Claims, verify_jws
from splitup.messages.api import M, Route
from splitup.net.admission import Admission, AdmittingSite
from splitup.net.metrics import count_requests

_log = logging.getLogger("splitup.http")
# Requests that aiohttp cannot parse would fill the log with one traceback each.
_malformed = logging.getLogger("splitup.http.malformed")
_malformed.setLevel(logging.CRITICAL)
_ADMISSION: Final = web.AppKey("admission", Admission)
T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Server:
    """A listening HTTP server; ``port`` is the real one when 0 was asked for."""

    host: str
    port: int
    _runner: web.AppRunner
    _scheme: str
    _admission: Admission

    @property
    def url(self) -> str:
        """Return the base URL, without a slash at the end."""
        return self._format(self.host)

    @property
    def local_url(self) -> str:
        """Return the base URL for connections from this machine, also when it listens on all."""
        return self._format({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    def _format(self, host: str) -> str:
        name = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{name}:{self.port}"

    async def close(self) -> None:
        """Stop listening; cancel requests that are open after ``tuning.HTTP_SHUTDOWN_S``."""
        await self._runner.cleanup()
        self._admission.close()


@web.middleware
async def answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer errors as ``{"error": "<sentence>"}``."""
    try:
        return await handler(request)
    except Refused as error:
        return error_reply(error.status, str(error))
    except BadSignature as error:
        return error_reply(401, str(error))
    except (PeerFault, InvalidInput, ChainRejected) as error:
        return error_reply(400, str(error))
    except Unavailable as error:
        return error_reply(503, str(error))
    except web.HTTPException as error:
        return error_reply(error.status, f"{request.method} {request.path}: {error.reason}")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        return error_reply(500, "internal error; the server's log has the details")


def make_app(
    *, max_body_bytes: int = limits.HTTP_BODY_BYTES, errors: Middleware = answer_errors
) -> web.Application:
    """Return an application that limits bodies and strangers; ``errors`` answers errors."""
    app = web.Application(
        client_max_size=max_body_bytes, middlewares=[count_requests, errors, _admit]
    )
    app[_ADMISSION] = Admission()
    return app


@web.middleware
async def _admit(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Wait for a stranger's turn; refuse a head that is no text before somebody encodes it."""
    await get_admission(request).wait_turn(request)
    try:
        for text in (request.path_qs, request.path, request.query_string):
            text.encode()
        for header in request.raw_headers:
            b"".join(header).decode()
    except UnicodeError:
        raise Refused("the request's address and headers have to be UTF-8", status=400) from None
    return await handler(request)


def get_admission(request: web.Request) -> Admission:
    """Return what limits the strangers of the server that a request came to."""
    return request.app[_ADMISSION]


def add_routes(
    app: web.Application, routes: Sequence[Route[Any]], handlers: Mapping[Route[Any], _Handler]
) -> None:
    """Register a handler for each of a party's routes (``api.ROUTES``), and for no other."""
    assert set(handlers) == set(routes), "a handler is missing, or belongs to another party"
    for route, handler in handlers.items():
        app.router.add_route(route.method, route.path, handler)


async def serve_app(
    app: web.Application,
    host: str,
    port: int,
    *,
    cancels_handlers: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Server:
    """Listen on ``host``:``port`` (0: any free one); raise ConfigurationError when it is taken.

    ``cancels_handlers``: a request whose client has gone is cancelled.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=cancels_handlers,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=tuning.HTTP_SHUTDOWN_S,
        keepalive_timeout=tuning.HTTP_IDLE_S,  # the first one counts from the connection's start
        auto_decompress=False,  # a small compressed body could become a large one
        logger=_malformed,
    )
    await runner.setup()
    admission = app.get(_ADMISSION) or Admission()
    try:
        await AdmittingSite(runner, admission, host, port, tls).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigurationError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); "
            "stop the program that uses the port or choose another one"
        ) from None
    scheme = "http" if tls is None else "https"
    return Server(host, runner.addresses[0][1], runner, scheme, admission)


def error_reply(status: int, message: str) -> web.Response:
    """Return the JSON reply for an error."""
    return web.json_response({"error": message}, status=status)


async def read_json(request: web.Request) -> dict[str, Any]:
    """Return the body as a JSON object; raise PeerFault when it is something else.

    Raises Refused and Unavailable as ``parse_body`` does.
    """
    return await parse_body(request, _parse_object)


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        value = parse_json(body)
    except (ValueError, RecursionError):
        raise PeerFault("the request's body is not JSON") from None
    if not isinstance(value, dict):
        raise PeerFault("the request's body is not a JSON object")
    return value


async def read_body(request: web.Request) -> bytes:
    """Return the body's bytes; raise Refused and Unavailable as ``parse_body`` does."""
    return await parse_body(request, bytes)


async def parse_body(request: web.Request, parse: Callable[[bytes], T]) -> T:
    """Return what ``parse`` makes of the body, while nothing else is done.

    Strangers wait the longer the more they send, and large bodies of theirs share places by
    address. Large bodies of a known party are read one after the other, with a rest between them.
    Raises Refused (408) when the body does not arrive within ``tuning.HTTP_READ_S``, Unavailable
    when too many other large bodies are arriving.
    """
    admission = get_admission(request)
    length, key = request.content_length, admission.get_key(request)
    if length is not None and length <= tuning.HTTP_SMALL_BODY_BYTES:
        await admission.wait_turn(request, length // tuning.STRANGER_BYTES)
        return parse(await read_in_time(request))
    if not key:
        with admission.hold(request, admission.large_bodies):
            body = await read_in_time(request)
            await admission.wait_turn(request, len(body) // tuning.STRANGER_BYTES)
            return parse(body)
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(tuning.HTTP_READ_S):
                await stack.enter_async_context(admission.known_turns.hold(key))
                await stack.enter_async_context(admission.known_bodies)
        except TimeoutError:
            raise Unavailable(
                "too many large requests are arriving; try again in a minute"
            ) from None
        return admission.known_turns.take(key, parse, await read_in_time(request))


async def read_in_time(request: web.Request) -> bytes:
    """Return the body's bytes; raise Refused (408) when it takes too long to arrive."""
    try:
        async with asyncio.timeout(tuning.HTTP_READ_S):
            return await request.read()
    except TimeoutError:
        raise Refused(
            f"the request's body did not arrive within {tuning.HTTP_READ_S:g} s", status=408
        ) from None


async def read_signed(
    request: web.Request,
    route: Route[Any],
    *,
    audience: str,
    now_s: int | None = None,
    check: Callable[[Claims], object] | None = None,
) -> tuple[Claims, str]:
    """Verify a signed request; return its claims, whose body is the message, and its token.

    Any valid key may sign: check ``claims.issuer`` before acting, best in ``check``, which is
    called before the signature is verified. Raises PeerFault or BadSignature.
    """
    return await parse_body(request, partial(_verify, route, audience, now_s, check))


def _verify(
    route: Route[Any],
    audience: str,
    now_s: int | None,
    check: Callable[[Claims], object] | None,
    body: bytes,
) -> tuple[Claims, str]:
    fields = _parse_object(body)
    token = fields.get("jws")
    if not isinstance(token, str) or len(fields) != 1:
        raise PeerFault('a signed request is {"jws": "<token>"}')
    now = int(time.time()) if now_s is None else now_s
    claims = verify_jws(token, typ=route.typ, audience=audience, now_s=now, check=check)
    return claims, token


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    """A message, the claims of the token that carried it, and the token, which proves both."""

    message: M
    claims: Claims
    token: str

    @property
    def issuer(self) -> str:
        """Return the key that signed."""
        return self.claims.issuer


async def read_message(request: web.Request, route: Route[M], *, audience: str) -> Received[M]:
    """Verify a signed request as ``read_signed`` does, and parse the route's message."""

    def parse(body: bytes) -> Received[M]:
        claims, token = _verify(route, audience, None, None, body)
        return Received(route.parse(claims.body), claims, token)

    return await parse_body(request, parse)


async def read_unsigned(request: web.Request, route: Route[M]) -> M:
    """Parse a message that needs no signature of its own; raise PeerFault."""
    return await parse_body(request, lambda body: route.parse(_parse_object(body)))
