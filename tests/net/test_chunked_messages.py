"""Messages that are fetched in chunks arrive whole or not at all."""

from __future__ import annotations

import hashlib
import zlib

import pytest
from aiohttp import web

from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, PeerFault
from splitup.messages import api
from splitup.net.chunked_messages import (
    ChunkedMessage,
    ChunkedMessages,
    fetch_chunked_message,
    unpack_chunked_message,
)
from splitup.net.http import SignedClient
from splitup.net.http_server import error_reply, make_app, serve_app

DATA = bytes(range(256)) * 4_000


def announce(packed: bytes, raw_bytes: int) -> ChunkedMessage:
    digest = hashlib.sha256(packed).hexdigest()
    return ChunkedMessage(packed_digest=digest, packed_bytes=len(packed), raw_bytes=raw_bytes)


async def test_a_chunked_message_arrives_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGE_CHUNK_BYTES", 1_000)
    chunked_messages = ChunkedMessages()
    chunked_message = chunked_messages.offer(DATA)
    assert chunked_message.packed_bytes > 3_000
    asked: list[int] = []

    async def serve(request: web.Request) -> web.Response:
        asked.append(int(request.match_info["index"]))
        part = chunked_messages.find_chunk(request.match_info["digest"], asked[-1])
        return web.Response(body=part) if part else error_reply(404, "gone")

    app = make_app()
    app.router.add_get(api.MESSAGE_CHUNK.path, serve)
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        async with SignedClient() as http:
            packed = await fetch_chunked_message(http, server.url, chunked_message)
            assert unpack_chunked_message(chunked_message, packed) == DATA
            assert asked == list(range(-(-chunked_message.packed_bytes // 1_000)))
            longer = chunked_message.model_copy(
                update={"packed_bytes": chunked_message.packed_bytes + 1}
            )
            with pytest.raises(PeerFault):
                await fetch_chunked_message(http, server.url, longer)
    finally:
        await server.close()
    assert chunked_messages.find_chunk(chunked_message.packed_digest, len(asked)) is None


def test_only_the_latest_are_kept() -> None:
    chunked_messages = ChunkedMessages()
    first, *_ = [chunked_messages.offer(bytes([n])) for n in range(tuning.MAX_CHUNKED_MESSAGES + 1)]
    assert chunked_messages.find_chunk(first.packed_digest, 0) is None
    with pytest.raises(InvalidInput):
        chunked_messages.offer(bytes(limits.MAX_CHUNKED_MESSAGE_BYTES + 1))


def test_a07_a_chunked_message_that_unpacks_to_more_is_refused_before_it_does() -> None:
    packed = zlib.compress(bytes(50_000_000))
    assert len(packed) < 100_000
    with pytest.raises(PeerFault, match="more or less"):
        unpack_chunked_message(announce(packed, 1_000), packed)


@pytest.mark.parametrize(
    "packed", [zlib.compress(DATA)[:-4], zlib.compress(DATA) + b"more", b"\x00" * 50]
)
def test_a09_other_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(PeerFault):
        unpack_chunked_message(announce(packed, len(DATA)), packed)
    with pytest.raises(PeerFault, match="not those announced"):
        unpack_chunked_message(announce(b"x", len(DATA)), packed)
