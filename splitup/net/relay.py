"""The relay, for nodes that others cannot connect to (``docs/adr/0019-connections.md``).

A node behind NAT keeps one WebSocket to a relay open, its *control connection*. Other parties send
to the relay what they would send to the node, below ``RELAY_PATH`` and the node's address. Requests
travel over the control connection and back. For a data connection the node connects to the relay
once more, with a single-use ticket, and the relay passes messages between the two sockets. It
cannot forge any: frames and requests are signed end to end. It can drop them, which its users see
as a broken connection.

On the control connection every message is a header (kind, id, number) and a payload:

    relay → node   REQUEST  number: the route (*)        payload: the body
                   OPEN     number: 0                   payload: ticket ‖ Authorization header
    node → relay   REPLY    number: the HTTP status     payload: the body; answers a REQUEST, or
                                                        refuses an OPEN

(*) its place in ``api.RELAYED_REQUESTS``. ``splitup.net.tunnel`` is the node's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import aiohttp
from aiohttp import web

from splitup.core import limits, tuning
from splitup.core.background import cancel
from splitup.core.errors import BadSignature, PeerFault, Refused, SplitUpError, Unavailable
from splitup.core.latest import Latest
from splitup.core.places import Places, hold_place
from splitup.core.throughput import Allowance
from splitup.crypto.jws import verify_jws
from splitup.messages import api
from splitup.messages.base import RELAY_PATH
from splitup.net.http_server import get_admission, read_body

REGISTERED: Final = "registered"
TICKET_CHARS: Final = 32

_HEADER: Final = struct.Struct(">BIH")
CONTROL_HEADER_BYTES: Final = _HEADER.size
_NUMBERS: Final = {route.path: number for number, route in enumerate(api.RELAYED_REQUESTS)}
_ADDRESS: Final = "0x[0-9a-f]{40}"
_ENDED: Final = (aiohttp.WSCloseCode.OK, aiohttp.WSCloseCode.POLICY_VIOLATION)

_log = logging.getLogger("splitup.relay")


class RelayKind(IntEnum):
    REQUEST = 1
    OPEN = 2
    REPLY = 3


def encode_control(kind: RelayKind, number: int, status: int, payload: bytes) -> bytes:
    """Return a message of the control connection."""
    return _HEADER.pack(kind, number, status) + payload


def decode_control(data: bytes) -> tuple[RelayKind, int, int, bytes]:
    """Return (kind, id, number, payload); raise PeerFault for anything malformed."""
    if len(data) < _HEADER.size or data[0] not in RelayKind.__members__.values():
        raise PeerFault("a message of unknown kind on a relay's control connection")
    kind, number, status = _HEADER.unpack_from(data)
    return RelayKind(kind), number, status, data[_HEADER.size :]


@dataclass(slots=True)
class _Stream:
    """The node's end of a data connection; its handler waits for ``done``."""

    socket: web.WebSocketResponse
    done: asyncio.Event = field(default_factory=asyncio.Event)


class _Node:
    """A node that is registered here."""

    def __init__(self, address: str, socket: web.WebSocketResponse) -> None:
        self.address = address
        self.socket = socket
        self.streams = 0
        self.held_bytes = 0  # of requests that wait for its replies
        self.waiting: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._requests = Allowance(tuning.RELAY_REQUESTS_PER_S, tuning.RELAY_REQUESTS)
        self.traffic = Allowance(tuning.RELAY_BYTES_PER_S, tuning.RELAY_BYTES_PER_S)
        self._shares: Latest[str, Allowance] = Latest(tuning.RELAY_ADDRESSES)  # by address
        self._ids = itertools.count()

    def take_request(self, group: str, now_s: float) -> bool:
        """Count a request from an address; return whether the node's rate allows it.

        The second half of the burst is kept for addresses that use little of it.
        """
        share = self._shares.get(group)
        if share is None:
            per_s, burst = tuning.RELAY_REQUESTS_PER_S, tuning.RELAY_REQUESTS
            share = Allowance(per_s / tuning.RELAY_SHARE, max(1, burst // tuning.RELAY_SHARE))
        self._shares[group] = share
        if self._requests.get_left(now_s) < 0.5 and not share.take(1, now_s):
            return False
        return self._requests.take(1, now_s)

    async def ask(self, kind: RelayKind, number: int, payload: bytes) -> tuple[int, bytes]:
        """Send a message and return the reply, status and body; raise Unavailable."""
        place = next(self._ids) % 2**32
        reply: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.waiting[place] = reply
        try:
            async with asyncio.timeout(tuning.HTTP_TIMEOUT_S):
                await self.socket.send_bytes(encode_control(kind, place, number, payload))
                return await reply
        except (TimeoutError, ConnectionError):
            raise Unavailable(f"node {self.address} does not answer behind this relay") from None
        finally:
            del self.waiting[place]

    def receive(self, data: bytes) -> None:
        """Handle a message of the node; raise PeerFault unless it is a reply."""
        kind, place, status, payload = decode_control(data)
        if kind is not RelayKind.REPLY or not (status == 200 or 400 <= status <= 599):
            raise PeerFault(
                f"node {self.address} sent its relay something that is no reply", peer=self.address
            )
        reply = self.waiting.get(place)  # None: it came too late
        if reply is not None and not reply.done():
            reply.set_result((status, payload))

    def lose(self) -> None:
        """Fail all requests that wait for the node."""
        for reply in self.waiting.values():
            if not reply.done():
                reply.set_exception(Unavailable(f"node {self.address} left this relay"))


FindKey = Callable[[str], Awaitable[str]]  # a node's address → its signing key, "" if unknown


class Relay:
    """The routes of a relay, which members and nodes serve."""

    def __init__(self, get_endpoint: Callable[[], str], find_key: FindKey) -> None:
        """``get_endpoint`` returns this relay's URL, the audience that nodes sign for."""
        self._get_endpoint = get_endpoint
        self._find_key = find_key
        self._nodes: dict[str, _Node] = {}
        self._tickets: dict[str, asyncio.Future[_Stream]] = {}
        self._proving: Places[asyncio.Task[Any]] = Places(tuning.RELAY_PROVING)
        self._streams: Places[asyncio.Task[Any]] = Places(tuning.RELAY_STREAMS)  # by node
        self._sockets: set[web.WebSocketResponse] = set()  # of openers of data connections
        self._held_bytes = 0

    def add_routes(self, app: web.Application) -> None:
        """Serve the relay on ``app``."""
        app.router.add_get(api.RELAY.path, self._register)
        app.router.add_get(api.RELAY_STREAM.path, self._accept_stream)
        node = f"{RELAY_PATH}/{{node:{_ADDRESS}}}"
        for route in api.RELAYED_REQUESTS:
            app.router.add_route(route.method, node + route.path, self._forward)
        app.router.add_get(node + api.DATA.path, self._open_stream)

    async def close(self) -> None:
        """Close all connections. Call it before the server is closed."""
        sockets = [*self._sockets, *(node.socket for node in self._nodes.values())]
        code = aiohttp.WSCloseCode.GOING_AWAY
        await asyncio.gather(*(socket.close(code=code) for socket in sockets))

    # ---- nodes -----------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.WebSocketResponse:
        if len(self._nodes) >= tuning.MAX_RELAYED:
            raise Unavailable(
                f"{tuning.MAX_RELAYED} nodes are registered at this relay; try another one"
            )
        socket = web.WebSocketResponse(
            heartbeat=tuning.LINK_PING_S,
            max_msg_size=CONTROL_HEADER_BYTES + limits.RELAY_REPLY_BYTES,
            compress=False,
        )
        admission = get_admission(request)
        with admission.hold(request, self._proving):
            await socket.prepare(request)
            try:
                async with asyncio.timeout(tuning.HTTP_TIMEOUT_S):
                    address, key = await self._check_node(socket)
            except (SplitUpError, TimeoutError) as error:
                _log.info("a node was not registered: %s", error)
                await _refuse(socket, str(error) or "the node did not prove its key in time")
                return socket
        admission.vouch(request, key)
        await self._serve_node(_Node(address, socket))
        return socket

    async def _check_node(self, socket: web.WebSocketResponse) -> tuple[str, str]:
        """Return the node's address and key, once it has signed our nonce."""
        nonce = secrets.token_hex(32)
        await socket.send_str(nonce)
        message = await socket.receive()
        is_text = message.type is aiohttp.WSMsgType.TEXT
        if not is_text or len(message.data) > limits.LINK_TOKEN_CHARS:
            raise PeerFault("the first message to a relay must be a token over its nonce")
        claims = verify_jws(
            message.data, typ=api.RELAY.typ, audience=self._get_endpoint(), now_s=int(time.time())
        )
        address = claims.body.get("node")
        if claims.body != {"node": address, "nonce": nonce} or not isinstance(address, str):
            raise PeerFault("the token is not over this relay's nonce", peer=claims.issuer)
        if not re.fullmatch(_ADDRESS, address) or await self._find_key(address) != claims.issuer:
            raise BadSignature(f"{claims.issuer} is not the key of an active node {address}")
        return address, claims.issuer

    async def _serve_node(self, node: _Node) -> None:
        old = self._nodes.get(node.address)
        self._nodes[node.address] = node  # the newest one counts: the old one may hang
        try:
            if old is not None:
                await old.socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)
            await node.socket.send_str(REGISTERED)
            _log.info("node %s has registered at this relay", node.address)
            async for message in node.socket:
                if message.type is aiohttp.WSMsgType.ERROR:
                    break  # no answer to a ping, or a message too long: the socket is closed
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise PeerFault(f"node {node.address} sent a text message", peer=node.address)
                node.receive(message.data)
        except PeerFault as fault:
            _log.warning("%s", fault)
            await _refuse(node.socket, str(fault))
        finally:
            if self._nodes.get(node.address) is node:
                del self._nodes[node.address]
            node.lose()

    def _find_node(self, request: web.Request) -> _Node:
        address = request.match_info["node"]
        node = self._nodes.get(address)
        if node is None:
            raise Unavailable(f"node {address} is not registered at this relay")
        if not node.take_request(get_admission(request).get_group(request), time.monotonic()):
            raise Refused(f"too many requests to node {address} through this relay", status=429)
        return node

    # ---- requests --------------------------------------------------------------------------

    async def _forward(self, request: web.Request) -> web.Response:
        node = self._find_node(request)
        body = await read_body(request)
        path = request.path.removeprefix(f"{RELAY_PATH}/{node.address}")
        with self._hold(node, len(body)):
            status, reply = await node.ask(RelayKind.REQUEST, _NUMBERS[path], body)
        return web.Response(status=status, body=reply, content_type="application/json")

    @contextlib.contextmanager
    def _hold(self, node: _Node, length_bytes: int) -> Iterator[None]:
        """Count a body that waits for a node; raise Unavailable when too many do.

        The second half of the room is kept for nodes for which little waits.
        """
        most, held = tuning.RELAY_HELD_BYTES, self._held_bytes + length_bytes
        share = most // tuning.RELAY_SHARE
        is_greedy = bool(node.held_bytes) and node.held_bytes + length_bytes > share
        if held > most or (held > most // 2 and is_greedy):
            raise Unavailable("too many requests wait at this relay; try again")
        self._held_bytes += length_bytes
        node.held_bytes += length_bytes
        try:
            yield
        finally:
            self._held_bytes -= length_bytes
            node.held_bytes -= length_bytes

    @contextlib.contextmanager
    def _hold_stream(self, node: _Node) -> Iterator[None]:
        """Hold a place for a data connection; raise Unavailable, or end one of another node."""
        refusal = Unavailable(f"too many connections to node {node.address} through this relay")
        if node.streams >= tuning.RELAY_NODE_STREAMS:
            raise refusal
        with hold_place(self._streams, node.address, refusal):
            node.streams += 1
            try:
                yield
            finally:
                node.streams -= 1

    # ---- data connections ------------------------------------------------------------------

    async def _open_stream(self, request: web.Request) -> web.StreamResponse:
        """Have the node open a stream, then pass messages between it and the requester."""
        node = self._find_node(request)
        header = request.headers.get("Authorization", "")
        if not header.isascii() or len(header) > limits.LINK_TOKEN_CHARS:
            raise BadSignature("a data connection needs an Authorization header")
        with self._hold_stream(node):
            found = await self._await_stream(node, header.encode())
            if not isinstance(found, _Stream):
                status, reply = found
                return web.Response(status=status, body=reply, content_type="application/json")
            socket = _make_socket()
            try:
                get_admission(request).vouch(request, node.address)  # which takes the opener
                await socket.prepare(request)
                self._sockets.add(socket)
                await _join(socket, found.socket, node.traffic)
                return socket
            finally:
                self._sockets.discard(socket)
                found.done.set()

    async def _await_stream(self, node: _Node, header: bytes) -> _Stream | tuple[int, bytes]:
        """Return the node's stream, or its refusal; raise Unavailable when it does not answer."""
        ticket = secrets.token_hex(TICKET_CHARS // 2)
        arriving: asyncio.Future[_Stream] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = arriving
        asking = asyncio.create_task(node.ask(RelayKind.OPEN, 0, ticket.encode() + header))
        try:
            either: set[asyncio.Future[Any]] = {arriving, asking}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if arriving.done():
                return arriving.result()
            return asking.result()  # the node refuses, or does not answer
        finally:
            self._tickets.pop(ticket, None)
            await cancel(arriving, asking)

    async def _accept_stream(self, request: web.Request) -> web.WebSocketResponse:
        arriving = self._tickets.pop(request.match_info["ticket"], None)  # single use
        if arriving is None:
            raise Refused("this ticket is unknown, used or too old", status=404)
        stream = _Stream(_make_socket())
        get_admission(request).vouch(request, request.match_info["ticket"])
        await stream.socket.prepare(request)
        if arriving.done():  # the requester has gone
            await stream.socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)
        else:
            arriving.set_result(stream)
            await stream.done.wait()
        return stream.socket


def _make_socket() -> web.WebSocketResponse:
    return web.WebSocketResponse(
        heartbeat=tuning.LINK_PING_S, max_msg_size=limits.MAX_FRAME_BYTES + 1, compress=False
    )


async def _refuse(socket: web.WebSocketResponse, reason: str) -> None:
    code = aiohttp.WSCloseCode.POLICY_VIOLATION
    await socket.close(code=code, message=reason.encode()[:120])


async def _join(
    one: web.WebSocketResponse, other: web.WebSocketResponse, traffic: Allowance
) -> None:
    """Pass messages both ways until one side ends or both are idle; then close both.

    Only one message per direction is in memory, so a fast sender waits for a slow reader.
    """
    loop = asyncio.get_running_loop()
    clock = asyncio.timeout(tuning.RELAY_IDLE_S)

    async def pass_on(source: web.WebSocketResponse, target: web.WebSocketResponse) -> None:
        async for message in source:
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            clock.reschedule(loop.time() + tuning.RELAY_IDLE_S)
            if wait_s := traffic.spend(len(message.data), loop.time()):
                await asyncio.sleep(wait_s)
            await target.send_bytes(message.data)

    code: int = aiohttp.WSCloseCode.GOING_AWAY
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with clock:
            tasks = [loop.create_task(pass_on(one, other)), loop.create_task(pass_on(other, one))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(*tasks)
    for socket in (one, other):
        if socket.close_code in _ENDED:  # tells the other side whether to reconnect
            code = socket.close_code
    await asyncio.gather(one.close(code=code), other.close(code=code), return_exceptions=True)
