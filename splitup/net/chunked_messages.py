"""Messages too large for one request: announced by digest, fetched from their sender in parts."""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from typing import Annotated

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import DigestField, Message
from splitup.net.http import SignedClient

_LEVEL = 1  # four times smaller at 200 MB/s; more effort saves a fifth


class Parcel(Message):
    """What stands for a message: SHA-256 and length of its compressed bytes, length of itself."""

    packed_digest: DigestField
    packed_bytes: Annotated[int, Field(ge=1, le=limits.MAX_PARCEL_BYTES)]
    raw_bytes: Annotated[int, Field(ge=1, le=limits.MAX_PARCEL_BYTES)]


class Parcels:
    """What this process offers to be fetched: the latest ``limits.MAX_PARCELS``."""

    def __init__(self) -> None:
        self._packed: OrderedDict[str, bytes] = OrderedDict()

    def offer(self, data: bytes) -> Parcel:
        """Keep a message for its receivers; raise PeerFault for one that none would take."""
        if len(data) > limits.MAX_PARCEL_BYTES:
            raise PeerFault(
                f"a message of {len(data)} bytes; members take {limits.MAX_PARCEL_BYTES}"
            )
        packed = zlib.compress(data, _LEVEL)
        digest = hashlib.sha256(packed).hexdigest()
        self._packed[digest] = packed
        while len(self._packed) > limits.MAX_PARCELS:
            self._packed.popitem(last=False)
        return Parcel(packed_digest=digest, packed_bytes=len(packed), raw_bytes=len(data))

    def find_part(self, digest: str, part: int) -> bytes | None:
        """Return a part, counted from 0; None when there is no such one."""
        packed = self._packed.get(digest, b"")
        start = part * limits.PARCEL_PART_BYTES
        return packed[start : start + limits.PARCEL_PART_BYTES] or None


async def fetch_parcel(http: SignedClient, endpoint: str, parcel: Parcel) -> bytes:
    """Fetch what a party offers; raise PeerFault when it is something else, Unavailable."""
    packed = bytearray()
    part = 0
    while len(packed) < parcel.packed_bytes:
        wanted = min(limits.PARCEL_PART_BYTES, parcel.packed_bytes - len(packed))
        url = f"{endpoint}/v1/parcel/{parcel.packed_digest}/{part}"
        data = await http.get_bytes(url, max_bytes=wanted, timeout_s=limits.PARCEL_TIMEOUT_S)
        if len(data) != wanted:
            raise PeerFault(f"{url} has {len(data)} bytes instead of {wanted}")
        packed += data
        part += 1
    return unpack_parcel(parcel, bytes(packed))


def unpack_parcel(parcel: Parcel, packed: bytes) -> bytes:
    """Return the message; raise PeerFault for other bytes, or more of them than announced."""
    if hashlib.sha256(packed).hexdigest() != parcel.packed_digest:
        raise PeerFault("a parcel's bytes are not those announced")
    decoder = zlib.decompressobj()
    try:
        data = decoder.decompress(packed, parcel.raw_bytes)
    except zlib.error as error:
        raise PeerFault(f"a parcel cannot be unpacked: {error}") from None
    is_whole = decoder.eof and not decoder.unconsumed_tail and not decoder.unused_data
    if len(data) != parcel.raw_bytes or not is_whole:
        raise PeerFault("a parcel holds more or less than announced")
    return data
