"""Messages that are fetched in parts: whole, or not at all."""

from __future__ import annotations

import hashlib
import zlib

import pytest
from aiohttp import web

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.net.chunked_messages import Parcel, Parcels, fetch_parcel, unpack_parcel
from splitup.net.http import SignedClient, error_reply, make_app, serve_app

DATA = bytes(range(256)) * 4_000


def announce(packed: bytes, raw_bytes: int) -> Parcel:
    digest = hashlib.sha256(packed).hexdigest()
    return Parcel(packed_digest=digest, packed_bytes=len(packed), raw_bytes=raw_bytes)


async def test_a_parcel_arrives_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARCEL_PART_BYTES", 1_000)
    parcels = Parcels()
    parcel = parcels.offer(DATA)
    assert parcel.packed_bytes > 3_000
    asked: list[int] = []

    async def serve(request: web.Request) -> web.Response:
        asked.append(int(request.match_info["part"]))
        part = parcels.find_part(request.match_info["digest"], asked[-1])
        return web.Response(body=part) if part else error_reply(404, "gone")

    app = make_app()
    app.router.add_get("/v1/parcel/{digest}/{part}", serve)
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        async with SignedClient() as http:
            assert await fetch_parcel(http, server.url, parcel) == DATA
            assert asked == list(range(-(-parcel.packed_bytes // 1_000)))
            longer = parcel.model_copy(update={"packed_bytes": parcel.packed_bytes + 1})
            with pytest.raises(PeerFault):
                await fetch_parcel(http, server.url, longer)
    finally:
        await server.close()
    assert parcels.find_part(parcel.packed_digest, len(asked)) is None


def test_only_the_latest_are_kept() -> None:
    parcels = Parcels()
    first, *_ = [parcels.offer(bytes([n])) for n in range(limits.MAX_PARCELS + 1)]
    assert parcels.find_part(first.packed_digest, 0) is None
    with pytest.raises(PeerFault):
        parcels.offer(bytes(limits.MAX_PARCEL_BYTES + 1))


def test_a07_a_parcel_that_unpacks_to_more_is_refused_before_it_does() -> None:
    packed = zlib.compress(bytes(50_000_000))
    assert len(packed) < 100_000
    with pytest.raises(PeerFault, match="more or less"):
        unpack_parcel(announce(packed, 1_000), packed)


@pytest.mark.parametrize(
    "packed", [zlib.compress(DATA)[:-4], zlib.compress(DATA) + b"more", b"\x00" * 50]
)
def test_a09_other_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(PeerFault):
        unpack_parcel(announce(packed, len(DATA)), packed)
    with pytest.raises(PeerFault, match="not those announced"):
        unpack_parcel(announce(b"x", len(DATA)), packed)
