"""A device's connection to a server of split inference: HTTP and WebSockets.

``splitup_private.split.messages`` has the messages, ``splitup_private.split.client`` what a device
computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator
from typing import Final, TypeVar

import aiohttp

from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.errors import SplitUpError, Unavailable, describe
from splitup.core.http_session import open_session
from splitup.messages.base import Message
from splitup.net.http import read_bounded
from splitup_private.split import messages as split
from splitup_private.split.messages import ErrorAnswer, PrivateModel, SplitError, parse_answer

FORWARD_S: Final = 120.0  # the server may have to wait for an execution
_BINARY: Final = {"Content-Type": "application/octet-stream"}
T = TypeVar("T", bound=Message)


class SplitServerConnection:
    """A server, at its base URL. Open it before any other call, and close it."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + split.PATH
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def open(self) -> None:
        """Make the HTTP session, in a running event loop."""
        self.http = open_session(headers=self.headers, auto_decompress=False)

    async def close(self) -> None:
        """Close the HTTP session."""
        await self.http.close()

    def get_file_url(self, digest: str) -> str:
        """Return where a file is."""
        return f"{self.url}/files/{digest}"

    async def fetch_models(self) -> tuple[PrivateModel, ...]:
        """Return the models that the server offers. Raises SplitError, Unavailable."""
        url = f"{self.url}/models"
        return split.decode_models(await self._get(url, limits.MAX_MANIFEST_BYTES))

    async def fetch_file(self, digest: str, *, max_bytes: int) -> bytes:
        """Return a small file, which the caller checks. Raises SplitError, Unavailable."""
        return await self._get(self.get_file_url(digest), max_bytes)

    async def _get(self, url: str, max_bytes: int) -> bytes:
        async with explaining(self.url), self.http.get(url) as response:
            data = await read_bounded(response, max_bytes)
        if response.status != 200:
            raise _read_error(data)
        return data


class SplitTransport:
    """Sends requests over a WebSocket, or over HTTP where none passes."""

    def __init__(self, server: SplitServerConnection) -> None:
        self._url = server.url
        self._http = server.http
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._uses_http = False

    async def ask(self, request: Message, tensor: bytes, kind: type[T]) -> tuple[T, bytes]:
        """Return the answer and its tensor. Raises SplitError, Unavailable."""
        message = split.encode_binary(request, tensor)
        try:
            async with explaining(self._url), asyncio.timeout(FORWARD_S):
                socket = await self._connect()
                data = await (
                    self._post(message) if socket is None else self._tell(socket, message)
                )
        except BaseException:
            await self.close()  # an answer that comes later must not be taken for the next one
            raise
        header, rest = split.split_binary(data)
        return parse_answer(kind, header), rest

    async def close(self) -> None:
        """Close the WebSocket."""
        if self._socket is not None:
            await self._socket.close()
            self._socket = None

    async def _connect(self) -> aiohttp.ClientWebSocketResponse | None:
        if (self._socket is None or self._socket.closed) and not self._uses_http:
            try:
                self._socket = await self._http.ws_connect(
                    f"{self._url}/stream",
                    protocols=(split.PROTOCOL,),
                    max_msg_size=2 * split.MAX_MESSAGE_BYTES,
                )
            except aiohttp.WSServerHandshakeError:
                self._uses_http = True  # a proxy that knows no upgrades, or a refusal with a reason
        return None if self._uses_http else self._socket

    async def _tell(self, socket: aiohttp.ClientWebSocketResponse, message: bytes) -> bytes:
        await socket.send_bytes(message)
        received = await socket.receive()
        if received.type != aiohttp.WSMsgType.BINARY:
            raise Unavailable(f"{self._url} closed the connection; try again")
        return bytes(received.data)

    async def _post(self, message: bytes) -> bytes:
        url = f"{self._url}/forward"
        async with self._http.post(url, data=io.BytesIO(message), headers=_BINARY) as response:
            data = await read_bounded(response, 2 * split.MAX_MESSAGE_BYTES)
        if response.status != 200:
            raise _read_error(data)
        return data


@contextlib.asynccontextmanager
async def explaining(url: str) -> AsyncGenerator[None, None]:
    """Turn errors of the connection into sentences."""
    try:
        yield
    except TimeoutError:
        raise Unavailable(f"{url} did not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"{url} cannot be reached: {describe(error)}") from None


def _read_error(data: bytes) -> SplitError:
    """Return the error in a server's answer."""
    try:
        fields = parse_json(data)
        error = ErrorAnswer.from_value(fields)
    except (ValueError, SplitUpError):
        return SplitError("bad_message", f"the server answered: {data[:200]!r}")
    return SplitError(error.code, error.message)
