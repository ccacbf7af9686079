"""An adapter host: applies its adapters to ciphertexts that it cannot decrypt.

A client sends its keys for rotations once (POST /v1/adapters/{adapter}/session) and then one
ciphertext per hidden state (POST /v1/adapter-sessions/{session}), both as bytes. An answer is
12 bytes, the microseconds to read, to compute and to write as u32, and the ciphertext. Each session
has a confined process of its own (``splitup_private.adapters.host_process``).

The host has no secret key, takes none, and no route takes a hidden state or a text.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from splitup.core.errors import InvalidInput, PeerFault, Refused, Unavailable, describe
from splitup.core.places import Places
from splitup.crypto.keys import Identity
from splitup.messages.api import PING
from splitup.messages.base import Message
from splitup.net.http_server import add_routes, get_admission, make_app, read_body
from splitup.sandbox.child import Child, ChildDied, ChildFailed
from splitup_private.adapters import routes
from splitup_private.adapters.ckks import (
    check_rotation_keys,
    compute_answer_bytes,
    compute_input_bytes,
    compute_key_bytes,
    get_library,
)
from splitup_private.adapters.layout import get_layout
from splitup_private.adapters.messages import ANSWER_HEAD, AdapterInfo, AdapterList, AdapterSession
from splitup_private.adapters.weights import Adapter, get_total_bits

_PROCESS: Final = "splitup_private.adapters.host_process"
_START_TIMEOUT_S: Final = 30.0  # to import SEAL and encode the weights: 1 s on an idle machine
_APPLY_TIMEOUT_S: Final = 10.0  # 15 ms on an idle machine
_MOST_QUERIES: Final = 4  # of a session at once; its client waits for each answer


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How many sessions a host keeps, and for how long when idle.

    A session takes 75 MB. When there are too many, those that were idle for ``spare_s`` end, or
    else the newest of the address that has the most, or, if each has one, that which was not used
    for the longest. Browsers let pages of ``origins`` ask.
    """

    sessions: int = 16
    idle_s: float = 300.0
    spare_s: float = 30.0
    origins: tuple[str, ...] = ()


@dataclass(slots=True)
class _Session:
    info: AdapterInfo
    child: Child
    used_s: float
    running: int = 0  # questions


class AdapterHost:
    """The adapters of one host and the sessions of its clients."""

    def __init__(
        self,
        adapters: Iterable[Adapter],
        options: HostOptions | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Sign what is offered where there is an identity.

        Raises InvalidInput for two adapters of one name.
        """
        self._adapters = {adapter.info.adapter: adapter for adapter in adapters}
        names = [adapter.info.name for adapter in self._adapters.values()]
        if len(set(names)) != len(names):
            raise InvalidInput("two adapters have one name; rename a folder")
        self._options = options or HostOptions()
        self._listed = AdapterList(library=get_library(), adapters=self.infos)
        if identity is not None:
            self._listed = self._listed.sign(identity)
        self._sessions: dict[str, _Session] = {}
        self._places: Places[str] = Places(self._options.sessions)  # names, also of those to come
        self._groups: dict[str, str] = {}  # by name: the address that its place is counted for

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The adapters."""
        return tuple(adapter.info for adapter in self._adapters.values())

    def make_app(self) -> web.Application:
        """Return the application that serves this host."""
        most = max(compute_key_bytes(info.parameters, get_layout(info)) for info in self.infos)
        app = make_app(max_body_bytes=most)
        handlers = {
            PING: _answer_ping,
            routes.ADAPTERS: self._list,
            routes.ADAPTER_KEYS: self._start,
            routes.ADAPTER_QUERY: self._apply,
            routes.ADAPTER_END: self._end,
        }
        add_routes(app, routes.ROUTES, handlers)
        if self._options.origins:
            app.router.add_route("OPTIONS", "/{path:.*}", _answer_preflight)
            app.on_response_prepare.append(self._allow_origin)
        return app

    async def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say which page may read an answer (CORS, Fetch standard 3.3)."""
        origin = request.headers.get("Origin", "")
        response.headers["Vary"] = "Origin"
        if origin in self._options.origins:
            response.headers["Access-Control-Allow-Origin"] = origin

    def close(self) -> None:
        """End all sessions."""
        for name in list(self._groups):
            self._close(name)

    async def _list(self, request: web.Request) -> web.Response:
        return _reply(self._listed)

    async def _start(self, request: web.Request) -> web.Response:
        adapter = self._adapters.get(request.match_info["adapter"])
        if adapter is None:
            raise Refused("this host holds no such adapter; ask for the list", status=404)
        info, layout = adapter.info, get_layout(adapter.info)
        _check_length(request, compute_key_bytes(info.parameters, layout))
        keys = await read_body(request)
        check_rotation_keys(keys, info.parameters, layout)  # before they cost a process and a place
        name = secrets.token_hex(32)
        self._take_place(get_admission(request).get_group(request), name)
        try:
            child = await _start_child(adapter, keys)
        except BaseException:
            self._close(name)
            raise
        if name not in self._groups:
            child.close()
            raise Unavailable("another address needed this session's place; try again in a minute")
        self._sessions[name] = _Session(info, child, time.monotonic())
        return _reply(AdapterSession(session=name))

    async def _apply(self, request: web.Request) -> web.Response:
        name, session = self._find(request)
        _check_length(request, compute_input_bytes(session.info.parameters))
        if session.running >= _MOST_QUERIES:
            raise Refused(f"a session computes {_MOST_QUERIES} answers at once; wait", status=429)
        session.running += 1
        try:
            data = await read_body(request)
            said, made = await session.child.ask_apart(
                {"apply": True},
                [data],
                timeout_s=_APPLY_TIMEOUT_S,
                max_bytes=compute_answer_bytes(session.info.parameters),
            )
        except ChildFailed as error:
            raise PeerFault(str(error)) from None
        except ChildDied as error:
            self._close(name)
            raise Refused(
                f"the session has ended ({error}); open another one", status=410
            ) from None
        finally:
            session.running -= 1
            session.used_s = time.monotonic()
        head = ANSWER_HEAD.pack(*(int(seconds * 1e6) for seconds in said["seconds"]))
        return web.Response(body=head + made[0], content_type="application/octet-stream")

    async def _end(self, request: web.Request) -> web.Response:
        name, _ = self._find(request)
        self._close(name)
        return web.json_response({})

    def _find(self, request: web.Request) -> tuple[str, _Session]:
        self._close_idle(self._options.idle_s)
        name = request.match_info["session"]
        session = self._sessions.get(name)
        if session is None:
            raise Refused("there is no such session, or it has ended; open another one", status=410)
        return name, session

    def _take_place(self, group: str, name: str) -> None:
        """Close sessions that are idle, or another's; raise Unavailable when there is no place.

        Who has as many networks as there are places would hold them all by asking now and then. So
        a network without a session gets the place of the one that was not used for the longest.
        """
        self._close_idle(self._options.idle_s)
        if len(self._places) >= self._options.sessions:
            self._close_idle(self._options.spare_s)
        if len(self._places) >= self._options.sessions and group not in self._groups.values():
            self._close_longest_idle()
        shed = self._places.take(group, name)
        if shed == (group, name):
            raise Unavailable("this host has too many sessions; try again in a minute")
        self._groups[name] = group
        if shed is not None:
            self._close(shed[1])

    def _close_longest_idle(self) -> None:
        """Close the session at rest that was used first, if every network has one place only."""
        if len(set(self._groups.values())) < len(self._groups):
            return  # the largest gives one up
        idle = [name for name, session in self._sessions.items() if not session.running]
        if idle:
            self._close(min(idle, key=lambda name: self._sessions[name].used_s))

    def _close_idle(self, idle_s: float) -> None:
        now_s = time.monotonic()
        for name, session in list(self._sessions.items()):
            if not session.running and now_s - session.used_s > idle_s:
                self._close(name)

    def _close(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            self._places.leave(group, name)
        session = self._sessions.pop(name, None)
        if session is not None:
            session.child.close()


async def _start_child(adapter: Adapter, keys: bytes) -> Child:
    """Return a process that has the weights and a client's keys; raise PeerFault, Unavailable."""
    memory = os.memfd_create("ciphertext")
    try:
        child = Child(_PROCESS, [str(memory)], files=[memory])
    finally:
        os.close(memory)
    info = adapter.info
    sizes = {"width": info.width, "rank": info.rank, "total_bits": get_total_bits(info)}
    try:
        weights = [adapter.a.tobytes(), adapter.b.tobytes()]
        await child.ask_apart(sizes, weights, timeout_s=_START_TIMEOUT_S, max_bytes=0)
        await child.ask_apart({"keys": True}, [keys], timeout_s=_APPLY_TIMEOUT_S, max_bytes=0)
    except BaseException as error:
        child.close()
        if isinstance(error, ChildFailed):
            raise PeerFault(describe(error)) from None
        raise
    return child


def _check_length(request: web.Request, most: int) -> None:
    if request.content_length is None or request.content_length > most:
        raise Refused(f"the body has to be at most {most} bytes long, and say so", status=413)


async def _answer_preflight(request: web.Request) -> web.Response:
    headers = {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": "Content-Type",
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)


async def _answer_ping(request: web.Request) -> web.Response:
    return web.json_response({})


def _reply(message: Message) -> web.Response:
    return web.Response(body=message.canonical_bytes(), content_type="application/json")
