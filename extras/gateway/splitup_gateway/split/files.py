"""The files that devices fetch, by digest: resumable, cached for ever, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from splitup_private.split.messages import SplitError

from splitup.core.places import Places

PARALLEL: Final = 8  # files that are sent at once; others of the same key wait
WAIT_S: Final = 30.0  # that they wait at most
STALL_S: Final = 30.0  # a reader that takes nothing for so long is gone
_PIECE_BYTES: Final = 256 * 1024


class FileSender:
    """Sends files whose names are their SHA-256.

    Where all places are taken, the key that has the most gives its newest one up for another's: its
    device goes on with a range later.
    """

    def __init__(self) -> None:
        self._places: Places[asyncio.Task[Any]] = Places(PARALLEL)
        self._left = asyncio.Event()  # another one each time that a place was left

    @asynccontextmanager
    async def _hold_place(self, principal: str) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(WAIT_S):
                while (shed := self._places.take(principal, task)) == (principal, task):
                    await self._left.wait()
        except TimeoutError:
            raise SplitError(
                "too_many_files", "too many files are being sent; try again", status=503
            ) from None
        if shed is not None:
            shed[1].cancel()
        try:
            yield
        finally:
            self._places.leave(principal, task)
            self._left.set()
            self._left = asyncio.Event()

    async def send(
        self, request: web.Request, path: Path, digest: str, principal: str
    ) -> web.StreamResponse:
        """Answer with a file, or with the range of it that was asked for (RFC 9110, 14).

        Raises SplitError for a range beyond the file (416) and when too many are sent (503).
        """
        etag = f'"{digest}"'
        headers = {
            "ETag": etag,
            "Accept-Ranges": "bytes",
            "Cache-Control": "public, max-age=31536000, immutable",
            "Content-Type": "application/octet-stream",
            "X-Content-Type-Options": "nosniff",
        }
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        size = (await asyncio.to_thread(path.stat)).st_size
        start, end = _find_range(request, etag, size)
        response = web.StreamResponse(headers=headers)
        if (start, end) != (0, size):
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        response.content_length = end - start
        async with self._hold_place(principal):
            await response.prepare(request)
            if request.method != "HEAD":
                await _write(response, path, start, end)
                await response.write_eof()
        return response


def _find_range(request: web.Request, etag: str, size: int) -> tuple[int, int]:
    """Return the first byte and the end of what is wanted; the whole for a range of old bytes."""
    if "Range" not in request.headers or request.headers.get("If-Range", etag) != etag:
        return 0, size
    try:
        wanted = request.http_range
    except ValueError:
        return 0, size  # another unit, or several ranges: a server may answer with everything
    start, end, _ = wanted.indices(size)
    if start >= end:
        raise SplitError("bad_range", f"the file has {size} bytes", status=416)
    return start, end


async def _write(response: web.StreamResponse, path: Path, start: int, end: int) -> None:
    # not in a thread: what it opens for a client that leaves meanwhile would stay open
    with path.open("rb") as file:
        file.seek(start)
        try:
            while start < end:
                data = await asyncio.to_thread(file.read, min(_PIECE_BYTES, end - start))
                if not data:
                    raise ConnectionResetError(f"{path} became shorter")
                async with asyncio.timeout(STALL_S):
                    await response.write(data)
                start += len(data)
        except TimeoutError:
            raise ConnectionResetError(f"the client read nothing for {STALL_S:g} s") from None
