"""A node's side of a relay: it connects out and serves the requests that come back.

Requests go to the node's own HTTP server, data connections to its ``LinkAcceptor``. Both make all
their checks, as for direct connections. ``splitup.net.relay`` documents the protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.errors import BadSignature, PeerFault, SplitUpError, Unavailable, describe
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import Identity
from splitup.messages import api
from splitup.messages.base import RELAY_PATH
from splitup.net.endpoints import open_peer_session
from splitup.net.links import LinkAcceptor
from splitup.net.relay import (
    CONTROL_HEADER_BYTES,
    REGISTERED,
    TICKET_CHARS,
    RelayKind,
    decode_control,
    encode_control,
)

_MAX_WORK = tuning.RELAY_REQUESTS + tuning.RELAY_NODE_STREAMS
_Socket = aiohttp.ClientWebSocketResponse[bool]

_log = logging.getLogger("splitup.relay")


class Tunnel:
    """Registers a node at a relay, at one at a time. Close it."""

    def __init__(self, identity: Identity, acceptor: LinkAcceptor, local_url: str) -> None:
        """``local_url`` is the base URL of the node's own HTTP server."""
        self._identity = identity
        self._acceptor = acceptor
        self._local_url = local_url
        self._session: aiohttp.ClientSession | None = None
        self._background = BackgroundTasks()

    def make_endpoint(self, relay: str) -> str:
        """Return the endpoint at which others reach the node through a relay."""
        return f"{relay}{RELAY_PATH}/{self._identity.address}"

    async def serve(self, relay: str, on_up: Callable[[], Awaitable[None]]) -> None:
        """Register at a relay, call ``on_up``, and serve until the connection ends.

        Raises Unavailable when the relay does not answer or does not register the node.
        """
        socket = await self._register(relay)
        try:
            await on_up()
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._take(relay, socket, message.data)
        except PeerFault as fault:
            raise Unavailable(f"relay {relay}: {fault}") from None
        finally:
            await socket.close()

    async def close(self) -> None:
        """Close all connections to relays."""
        await self._background.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _register(self, relay: str) -> _Socket:
        try:
            async with asyncio.timeout(tuning.HTTP_TIMEOUT_S):
                socket = await self._dial(
                    api.RELAY.url(relay), CONTROL_HEADER_BYTES + limits.HTTP_BODY_BYTES
                )
                try:
                    await self._prove(relay, socket)
                except BaseException:
                    await socket.close()
                    raise
                return socket
        except aiohttp.WSServerHandshakeError as error:
            raise Unavailable(f"relay {relay} answered {error.status}") from None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"relay {relay} cannot be reached: {describe(error)}") from None

    async def _prove(self, relay: str, socket: _Socket) -> None:
        """Sign the relay's nonce; raise Unavailable unless it registers the node."""
        nonce = await socket.receive()
        if nonce.type is aiohttp.WSMsgType.TEXT:
            token = sign_jws(
                self._identity,
                typ=api.RELAY.typ,
                audience=relay,
                body={
                    "node": self._identity.address,
                    "nonce": nonce.data[: limits.LINK_TOKEN_CHARS],
                },
                now_s=int(time.time()),
            )
            await socket.send_str(token)
            answer = await socket.receive()
            if answer.type is aiohttp.WSMsgType.TEXT and answer.data == REGISTERED:
                return
            if answer.type is aiohttp.WSMsgType.CLOSE:
                raise Unavailable(f"relay {relay} does not take this node: {answer.extra}")
        raise Unavailable(f"relay {relay} did not register this node")

    async def _dial(self, url: str, max_message_bytes: int) -> _Socket:
        if self._session is None:
            # relays come from our configuration or the committee, so that private ones are allowed
            self._session = open_peer_session(allow_loopback=True)
        return await self._session.ws_connect(
            url, heartbeat=tuning.LINK_PING_S, max_msg_size=max_message_bytes
        )

    # ---- messages from the relay -----------------------------------------------------------

    def _take(self, relay: str, socket: _Socket, data: bytes) -> None:
        kind, place, number, payload = decode_control(data)
        if len(self._background.tasks) >= _MAX_WORK:
            _log.warning("relay %s sends more requests than allowed; one is ignored", relay)
            return  # its sender will time out
        if kind is RelayKind.REQUEST and number < len(api.RELAYED_REQUESTS):
            work = self._answer(socket, place, number, payload)
        elif kind is RelayKind.OPEN and len(payload) > TICKET_CHARS and payload.isascii():
            text = payload.decode()
            ticket, header = text[:TICKET_CHARS], text[TICKET_CHARS:]
            if not ticket.isalnum():
                raise PeerFault("the relay sent a malformed ticket")
            work = self._open(relay, socket, place, ticket, header)
        else:
            raise PeerFault("the relay sent a message of a kind that relays do not send")
        self._background.start(work)

    async def _answer(self, socket: _Socket, place: int, number: int, body: bytes) -> None:
        route = api.RELAYED_REQUESTS[number]
        try:
            status, reply = await self._ask_self(route, body)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reason = f"the node's own server does not answer: {describe(error)}"
            status, reply = 503, _make_error(reason)
        await _reply(socket, place, status, reply)

    async def _ask_self(self, route: api.Route[Any], body: bytes) -> tuple[int, bytes]:
        assert self._session is not None  # the request came through it
        async with self._session.request(
            route.method,
            route.url(self._local_url),
            data=body if route.method == "POST" else None,
            headers={"Content-Type": "application/json"} if route.method == "POST" else {},
            timeout=aiohttp.ClientTimeout(total=tuning.HTTP_TIMEOUT_S),
        ) as response:
            return response.status, (await response.read())[: limits.RELAY_REPLY_BYTES]

    async def _open(
        self, relay: str, socket: _Socket, place: int, ticket: str, header: str
    ) -> None:
        """Check the opener of a data connection, then connect to the relay and serve it."""
        try:
            link = self._acceptor.authenticate(header)
            link.endpoints.appendleft(self.make_endpoint(relay))
            async with asyncio.timeout(tuning.HTTP_TIMEOUT_S):
                stream = await self._dial(
                    api.RELAY_STREAM.url(relay, ticket=ticket), limits.MAX_FRAME_BYTES + 1
                )
        except SplitUpError as error:
            await _reply(socket, place, _get_status(error), _make_error(str(error)))
            return
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            _log.info("relay %s: a data connection was not opened: %s", relay, error)
            return  # the opener has gone, or the relay has
        try:
            await self._acceptor.serve(link, stream)
        except (aiohttp.ClientError, ConnectionError) as error:
            _log.info("a data connection through %s broke: %s", relay, error)
        finally:
            await stream.close()


def _get_status(error: SplitUpError) -> int:
    if isinstance(error, BadSignature):
        return 401
    return 503 if isinstance(error, Unavailable) else 400


def _make_error(text: str) -> bytes:
    return json.dumps({"error": text[: tuning.MAX_ERROR_CHARS]}).encode()


async def _reply(socket: _Socket, place: int, status: int, body: bytes) -> None:
    try:
        await socket.send_bytes(encode_control(RelayKind.REPLY, place, status, body))
    except ConnectionError as error:
        _log.info("a reply could not be sent to a relay: %s", error)
