"""The data plane's connections: persistent, authenticated WebSockets that carry signed frames.

A link is opened before the first tensor. It reconnects by itself with growing pauses and then sends
again what the broken connection may have lost; receivers ignore duplicates. Sending never blocks: a
queue of bounded size takes the frame or refuses it. The reading task hands a received frame to a
plain function, which saves a token's path a queue and a task switch.

The opener proves its Ed25519 key in the handshake (JWS, audience: the node's address). The
accepting side proves nothing, because every frame that it sends is signed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket as system_socket
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import aiohttp
from aiohttp import web

from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks, cancel
from splitup.core.errors import BadSignature, PeerFault, SplitUpError, Unavailable, describe
from splitup.crypto.jws import Claims, ReplayCache, sign_jws, verify_jws
from splitup.crypto.keys import Identity
from splitup.messages import api
from splitup.net.endpoints import open_peer_session
from splitup.net.http_server import get_admission

_log = logging.getLogger("splitup.links")
_Socket = aiohttp.ClientWebSocketResponse[bool] | web.WebSocketResponse


class Link:
    """A connection to a peer, across reconnections.

    ``peer`` is the node's address for an opened link, the opener's Ed25519 key for an accepted one.
    """

    def __init__(
        self, peer: str, execution_id: str, *, endpoint: str = "", resend_bytes: int = 0
    ) -> None:
        self.peer = peer
        # of an opened link: the node's endpoints, the one to try next first. Plans may name
        # different ones for a node that has moved. Of an accepted link: the relay's, if any
        self.endpoints = deque([endpoint], maxlen=tuning.LINK_ENDPOINTS)
        self.execution_id = execution_id  # "" when the link serves every execution
        self.error: SplitUpError | None = None  # of an opened link: why the last try failed
        self.has_connected = False
        self.connected = asyncio.Event()
        self.closed = False
        self._queue: deque[bytes] = deque()
        self.queued_bytes = 0  # which wait to be handed to the network
        self._bulk: deque[bytes] = deque()
        self.bulk_bytes = 0  # of bulk messages that wait
        self._sent: deque[bytes] = deque()
        self._sent_bytes = 0
        self._resend_bytes = resend_bytes
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._socket: _Socket | None = None  # set while it can take a frame at once
        self._begun: Awaitable[None] | None = None  # a write that the socket has not finished
        self._serving: _Socket | None = None  # while it is connected
        self._asked_at: float | None = None  # for a sign of life, which is not there yet
        self._patience_s = tuning.ANSWER_S  # that it has to come

    def send(self, frame: bytes) -> None:
        """Queue one sealed frame; never blocks.

        Raises Unavailable when the link is closed for good, or when the peer reads so slowly that
        ``tuning.LINK_QUEUE_BYTES`` wait already.
        """
        if self.closed:
            raise self.error or Unavailable(f"the connection to {self.peer} is closed")
        if self.queued_bytes + len(frame) > tuning.LINK_QUEUE_BYTES:
            raise Unavailable(
                f"{self.peer} reads too slowly: {self.queued_bytes} bytes wait to be sent to it"
            )
        if self._socket is not None and not self._queue:  # without a task switch
            writing = self._socket.send_bytes(frame)
            try:
                waits_for = writing.send(None)
            except StopIteration:
                self._remember(frame)
                return
            except ConnectionError:
                pass  # the writing task meets the same error
            else:
                self._remember(frame)
                self._socket, self._begun = None, _go_on(writing, waits_for)
                self._wake.set()
                return
        self._queue.append(frame)
        self.queued_bytes += len(frame)
        self._wake.set()

    def send_bulk(self, message: bytes) -> None:
        """Queue a message that may be lost, behind all frames; the caller limits their bytes."""
        if self.connected.is_set() and not self.closed:
            self._bulk.append(message)
            self.bulk_bytes += len(message)
            self._wake.set()

    async def check(self) -> None:
        """Ask the peer of an opened link for a sign of life; connect anew when one is overdue.

        That is several times as late as ever before. Every connection that is given up gives the
        next one twice the time: on a slow path signs wait behind frames.
        """
        now, socket = time.monotonic(), self._serving
        if socket is None:
            return
        if self._asked_at is None:
            self._asked_at = now
            with contextlib.suppress(ConnectionError):  # the reading task meets the same error
                await socket.ping()
        elif now >= self._asked_at + self._patience_s:
            self._patience_s *= 2
            _log.warning("the connection to %s is silent; connecting anew", self.peer)
            _shut(socket)

    def note_sign(self) -> None:
        """Note that the peer has answered."""
        if self._asked_at is not None:
            took_s = time.monotonic() - self._asked_at
            self._patience_s = max(self._patience_s, tuning.ANSWER_FACTOR * took_s)
            self._asked_at = None

    def begin(self, socket: _Socket) -> None:
        """Note a new connection."""
        self._serving, self._asked_at = socket, None
        self.connected.set()

    def end(self) -> None:
        """Note that the connection has ended."""
        self._serving = None

    async def drain(self, below_bytes: int = 0) -> None:
        """Wait until at most ``below_bytes`` are queued; raise Unavailable when the link closes."""
        while self.queued_bytes > below_bytes:
            if self.closed:
                raise self.error or Unavailable(f"the connection to {self.peer} is closed")
            self._drained.clear()
            await self._drained.wait()

    async def drain_bulk(self) -> None:
        """Wait until all bulk messages are sent or lost."""
        while self.bulk_bytes and not self.closed:
            self._drained.clear()
            await self._drained.wait()

    async def write(self, socket: _Socket) -> None:
        """Send what is queued, until the socket fails or the task is cancelled."""
        try:
            while True:
                while self._queue or self._bulk:
                    if not self._queue:
                        message = self._bulk.popleft()
                        await socket.send_bytes(message)
                        self.bulk_bytes -= len(message)
                        self._drained.set()
                        continue
                    frame = self._queue[0]
                    await socket.send_bytes(frame)
                    self._queue.popleft()
                    self.queued_bytes -= len(frame)
                    self._remember(frame)
                    self._drained.set()
                self._wake.clear()
                self._socket = socket
                await self._wake.wait()
                self._socket = None
                if self._begun is not None:
                    await self._begun
                    self._begun = None
        finally:
            self._socket = self._begun = None

    def rewind(self) -> None:
        """Queue the frames sent last again: the old connection may have lost them."""
        self._queue.extendleft(reversed(self._sent))
        self.queued_bytes += self._sent_bytes
        self._sent.clear()
        self._sent_bytes = 0
        self._bulk.clear()  # the chunks of a tensor are of no use when some are lost
        self.bulk_bytes = 0
        self._drained.set()

    def mark_closed(self, error: SplitUpError | None) -> None:
        """Refuse further frames and wake all that wait for the link."""
        self.closed = True
        self.error = error or self.error
        self.connected.set()
        self._drained.set()

    def _remember(self, frame: bytes) -> None:
        if not self._resend_bytes:
            return
        self._sent.append(frame)
        self._sent_bytes += len(frame)
        while self._sent_bytes > self._resend_bytes and len(self._sent) > 1:
            self._sent_bytes -= len(self._sent.popleft())


class _Refused(Unavailable):
    """No process listens at the only address of a node."""


@types.coroutine
def _go_on(writing: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Run the rest of a coroutine that has run until it first waited."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:
                waits_for = writing.throw(error)
            else:
                waits_for = writing.send(sent)
    except StopIteration:
        return


# Must not block. Raising PeerFault closes the link for good; after Unavailable the peer connects
# again and repeats what it sent last.
FrameHandler = Callable[[Link, bytes], None]
LinkHandler = Callable[[Link], None]
# whether the peer with this key may open a link, for one execution or "" for all that it shares
MayOpen = Callable[[str, str], bool]


async def _serve(link: Link, socket: _Socket, on_frame: FrameHandler) -> None:
    """Read and write one connected socket until either direction ends; re-raise a PeerFault."""
    writer = asyncio.create_task(link.write(socket))
    link.begin(socket)
    try:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                on_frame(link, message.data)
                continue
            if message.type is aiohttp.WSMsgType.ERROR and not isinstance(
                message.data, aiohttp.WebSocketError
            ):
                raise ConnectionError(str(message.data))  # no answer to a ping
            if message.type is aiohttp.WSMsgType.PING:
                await socket.pong(message.data)
            elif message.type is aiohttp.WSMsgType.PONG:
                link.note_sign()
            else:
                raise PeerFault(
                    f"{link.peer} sent a text message on the data plane", peer=link.peer
                )
    except PeerFault as fault:
        await socket.close(
            code=aiohttp.WSCloseCode.POLICY_VIOLATION, message=str(fault).encode()[:120]
        )
        raise
    except Unavailable as error:
        await socket.close(
            code=aiohttp.WSCloseCode.TRY_AGAIN_LATER, message=str(error).encode()[:120]
        )
        raise
    finally:
        link.end()
        writer.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await writer


def _shut(socket: _Socket) -> None:
    """End a connection without a word to the peer, which would not answer; its reader sees that."""
    handle = socket.get_extra_info("socket")
    if handle is None:  # it has ended already
        return
    with contextlib.suppress(OSError), system_socket.socket(fileno=os.dup(handle.fileno())) as own:
        own.shutdown(system_socket.SHUT_RDWR)


# ---- opening -----------------------------------------------------------------------------------


class LinkPool:
    """The links that this party opens, one per (node, execution or "")."""

    def __init__(
        self,
        identity: Identity,
        on_frame: FrameHandler,
        *,
        on_closed: LinkHandler | None = None,
        on_up: LinkHandler | None = None,
        on_down: LinkHandler | None = None,
        on_refused: LinkHandler | None = None,
        allow_loopback: bool = False,
    ) -> None:
        """``on_closed`` is called when a link ends, ``on_up`` and ``on_down`` per connection.

        ``on_refused``: a connection broke, and nobody listens there any more.
        """
        self._identity = identity
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_up = on_up
        self._on_down = on_down
        self._on_refused = on_refused
        self._allow_loopback = allow_loopback
        self._session: aiohttp.ClientSession | None = None
        self._links: dict[tuple[str, str], tuple[Link, asyncio.Task[None]]] = {}

    def open(self, address: str, endpoint: str, execution_id: str = "") -> Link:
        """Return the link to a node, starting to connect when there is none yet; never blocks.

        ``address`` and ``endpoint`` are the node's, from the plan. Frames that are sent before the
        connection is established wait in the queue. Raises Unavailable when too many are open.
        """
        known = self._links.get((address, execution_id))
        if known is not None and not known[0].closed:
            if endpoint not in known[0].endpoints:
                known[0].endpoints.appendleft(endpoint)
            return known[0]
        if len(self._links) >= tuning.MAX_LINKS:
            raise Unavailable(
                f"{len(self._links)} connections are open already; the limit is reached"
            )
        link = Link(address, execution_id, endpoint=endpoint, resend_bytes=tuning.LINK_RESEND_BYTES)
        task = asyncio.create_task(self._run(link))
        self._links[address, execution_id] = (link, task)
        return link

    async def close(self, *, flush_s: float = 1.0) -> None:
        """Close every link, after ``flush_s`` at most for what is queued, and the session."""

        async def close_link(link: Link, task: asyncio.Task[None]) -> None:
            with contextlib.suppress(TimeoutError, SplitUpError):
                async with asyncio.timeout(flush_s):
                    await link.drain()
            await cancel(task)
            self._forget(link, None)  # for a task that was cancelled before it began

        await asyncio.gather(*(close_link(*known) for known in self._links.values()))
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _run(self, link: Link) -> None:
        pause_s = tuning.LINK_RETRY_MIN_S
        last_success_s = time.monotonic()
        error: SplitUpError | None = None
        try:
            while time.monotonic() - last_success_s < tuning.LINK_GIVE_UP_S:
                try:
                    socket = await self._connect(link)
                except Unavailable as failure:
                    link.error = error = failure
                    if isinstance(failure, _Refused) and link.has_connected and self._on_refused:
                        self._on_refused(link)
                    link.endpoints.rotate(-1)
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(2 * pause_s, tuning.LINK_RETRY_MAX_S)
                    continue
                pause_s = tuning.LINK_RETRY_MIN_S
                link.has_connected, link.error = True, None
                link.rewind()
                if self._on_up is not None:
                    self._on_up(link)
                try:
                    await _serve(link, socket, self._on_frame)
                except (aiohttp.ClientError, ConnectionError, Unavailable) as failure:
                    _log.info("connection to %s broke: %s", link.peer, failure)
                finally:
                    link.connected.clear()
                    if self._on_down is not None:
                        self._on_down(link)
                    await socket.close()
                if socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
                    raise PeerFault(  # sending the same frames again would not help
                        f"node {link.peer} closed the connection: it found a fault in our frames",
                        peer=link.peer,
                    )
                last_success_s = time.monotonic()
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        except PeerFault as fault:
            error = fault
        finally:
            self._forget(link, error)
        if self._on_closed is not None:
            self._on_closed(link)

    def _forget(self, link: Link, error: SplitUpError | None) -> None:
        known = self._links.get((link.peer, link.execution_id))
        if known is not None and known[0] is link:
            del self._links[link.peer, link.execution_id]
        link.mark_closed(error)

    async def _connect(self, link: Link) -> aiohttp.ClientWebSocketResponse[bool]:
        endpoint = link.endpoints[0]
        if self._session is None:
            self._session = open_peer_session(allow_loopback=self._allow_loopback)
        token = sign_jws(
            self._identity,
            typ=api.DATA.typ,
            audience=link.peer,
            body={"execution_id": link.execution_id},
            now_s=int(time.time()),
            ttl_s=limits.JWS_TTL_S,
        )
        try:
            async with asyncio.timeout(api.DATA.timeout_s):
                return await self._session.ws_connect(
                    api.DATA.url(endpoint),
                    headers={"Authorization": f"Bearer {token}"},
                    heartbeat=tuning.LINK_PING_S,
                    autoping=False,  # answers to ``check`` are to be seen
                    max_msg_size=limits.MAX_FRAME_BYTES + 1,
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403, 400):
                raise PeerFault(
                    f"node {link.peer} at {endpoint} refused the connection ({error.status})",
                    peer=link.peer,
                ) from None
            raise Unavailable(f"node {link.peer} at {endpoint} answered {error.status}") from None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            is_refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                error.os_error, ConnectionRefusedError
            )
            raise (_Refused if is_refused and len(link.endpoints) == 1 else Unavailable)(
                f"node {link.peer} at {endpoint} cannot be reached: {describe(error)}"
            ) from None


# ---- accepting ---------------------------------------------------------------------------------


class LinkAcceptor:
    """The handler of a node's data route (``api.DATA``): checks who connects, then reads frames.

    A peer has one connection for each purpose that ``may_open`` allows it, so the number of
    connections is bounded by the plans that the node was given. Everybody else is refused before
    its signature is verified.
    """

    def __init__(
        self,
        address: str,
        on_frame: FrameHandler,
        *,
        may_open: MayOpen,
        on_opened: LinkHandler | None = None,
        on_closed: LinkHandler | None = None,
    ) -> None:
        self._address = address
        self._on_frame = on_frame
        self._may_open = may_open
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._replays = ReplayCache()
        self._sockets: dict[tuple[str, str], tuple[Link, _Socket]] = {}  # by key and execution
        self._closing = BackgroundTasks()  # connections that others replace

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one connection; raise BadSignature, PeerFault or Unavailable to refuse it."""
        link = self.authenticate(request.headers.get("Authorization", ""))
        get_admission(request).vouch(request, link.peer)
        socket = web.WebSocketResponse(
            heartbeat=tuning.LINK_PING_S, max_msg_size=limits.MAX_FRAME_BYTES + 1, compress=False
        )
        await socket.prepare(request)
        await self.serve(link, socket)
        return socket

    async def serve(self, link: Link, socket: _Socket) -> None:
        """Serve an authenticated connection, whichever side opened it, until it ends."""
        name = (link.peer, link.execution_id)
        self._close(name)  # the newest connection counts: the old one may hang
        self._sockets[name] = link, socket
        fault: SplitUpError | None = None
        try:
            if self._on_opened is not None:
                self._on_opened(link)
            await _serve(link, socket, self._on_frame)
        except ConnectionError as error:
            _log.info("connection of %s broke: %s", link.peer, error)
        except (PeerFault, Unavailable) as error:
            fault = error
            _log.warning("closed the connection of %s: %s", link.peer, error)
        finally:
            if self._sockets.get(name) == (link, socket):
                del self._sockets[name]
            link.mark_closed(fault)
            if self._on_closed is not None:
                self._on_closed(link)

    async def close(self) -> None:
        """Close every accepted connection. Call it before the server is closed."""
        for name in list(self._sockets):
            self._close(name)
        await asyncio.gather(*self._closing.tasks, return_exceptions=True)

    def authenticate(self, header: str) -> Link:
        """Check an Authorization header and return a link to its signer.

        Raises BadSignature, PeerFault, and Unavailable when no plan of this node names the signer,
        perhaps because it has not arrived yet, or when too many links are open.
        """
        scheme, _, token = header.partition(" ")
        if scheme != "Bearer" or not token or len(token) > limits.LINK_TOKEN_CHARS:
            raise BadSignature(
                "a data connection needs an Authorization header with a Bearer token"
            )
        now_s = int(time.time())
        claims = verify_jws(
            token, typ=api.DATA.typ, audience=self._address, now_s=now_s, check=self._check_plan
        )
        name = (claims.issuer, claims.body["execution_id"])
        if len(self._sockets) >= tuning.MAX_LINKS and name not in self._sockets:
            over = next((name for name in self._sockets if not self._may_open(*name)), None)
            if over is None:
                raise Unavailable(f"{tuning.MAX_LINKS} data connections are open; try again later")
            self._close(over)
        self._replays.add(claims, now_s)
        return Link(*name)

    def _check_plan(self, claims: Claims) -> None:
        execution_id = claims.body.get("execution_id")
        if not isinstance(execution_id, str) or len(claims.body) != 1:
            raise PeerFault("a data connection's token names exactly one execution_id, or ''")
        if not self._may_open(claims.issuer, execution_id):
            raise Unavailable("no plan that this node has names you; try again when it has yours")

    def _close(self, name: tuple[str, str]) -> None:
        known = self._sockets.pop(name, None)
        if known is not None:
            self._closing.start(known[1].close(code=aiohttp.WSCloseCode.GOING_AWAY))
