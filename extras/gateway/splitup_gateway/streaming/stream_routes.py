"""Connections to streams of answers: what a request gets, and what one that comes back gets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from aiohttp import web

from splitup_gateway.access import Access
from splitup_gateway.errors import ApiError
from splitup_gateway.streaming.stream import Stream, StreamedCall
from splitup_gateway.streaming.streams import Streams, Work

WRITE_S: Final = 30.0  # a reader that takes nothing for so long is gone
PATH: Final = "/v1/streams/{stream}"
STREAM_HEADER: Final = "x-splitup-stream"


class StreamRoutes:
    """Answers requests from streams."""

    def __init__(self, access: Access, folder: Path | None = None) -> None:
        self.streams = Streams(folder)
        self._access = access

    def add_to(self, app: web.Application) -> None:
        """Register the routes of streams."""
        app.router.add_get(PATH, self._read_on)
        app.router.add_delete(PATH, self._stop)

    async def answer(
        self, request: web.Request, owner: str, body: bytes, work: Work
    ) -> web.StreamResponse:
        """Answer a request by ``work``, or from the stream that it was asked for before."""
        call = StreamedCall.make(owner, request.path, body, request.headers)
        last = request.headers.get("Last-Event-ID")
        if last is None:
            return await _send(request, self.streams.join_or_start(call, work), 0)
        stream_id, _, number = last.rpartition(":")
        stream = self.streams.find(stream_id, owner)
        if stream.call.digest != call.digest:
            raise ApiError(
                "this Last-Event-ID is one of another request; leave it out, or read on with GET "
                "/v1/streams/ID",
                status=422,
                param="Last-Event-ID",
            )
        return await _send(request, stream, _read_number(number))

    async def _find(self, request: web.Request) -> Stream:
        key = await self._access.let_in(request, is_counted=False)
        return self.streams.find(request.match_info["stream"], "" if key is None else key.name)

    async def _read_on(self, request: web.Request) -> web.StreamResponse:
        stream = await self._find(request)
        last = request.headers.get("Last-Event-ID", request.query.get("after", "0"))
        return await _send(request, stream, _read_number(last.rpartition(":")[2]))

    async def _stop(self, request: web.Request) -> web.Response:
        stream = await self._find(request)
        stream.stop()
        status = "complete" if stream.is_whole else "stopped"
        return web.json_response({"id": stream.id, "object": "stream", "status": status})


async def _send(request: web.Request, stream: Stream, after: int) -> web.StreamResponse:
    """Send what follows ``after`` events, as it comes."""
    with stream.attach(after) as reader:
        head = await stream.wait_for_head()
        headers = {**head.headers, STREAM_HEADER: stream.id, "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        response.content_type = head.content_type
        if head.is_streamed:
            async with limit_write():
                await response.prepare(request)
        async for events in reader:
            if not response.prepared:
                response.content_length = len(events)
                await response.prepare(request)
            async with limit_write():
                await response.write(events)
        async with limit_write():
            await response.write_eof()
        return response


def _read_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ApiError(
            "'after' and Last-Event-ID name the last event that was read, as its id does",
            param="Last-Event-ID",
        )
    return int(text)


@contextlib.asynccontextmanager
async def limit_write() -> AsyncGenerator[None, None]:
    """Raise ConnectionError when the reader takes nothing for ``WRITE_S``."""
    try:
        async with asyncio.timeout(WRITE_S):
            yield
    except TimeoutError:
        raise ConnectionResetError(f"the client read nothing for {WRITE_S:g} s") from None
