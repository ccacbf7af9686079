"""Messages too large for one request: announced by digest, fetched from their sender in chunks."""

from __future__ import annotations

import hashlib
import zlib
from typing import Annotated

from pydantic import Field

from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, PeerFault
from splitup.core.latest import Latest
from splitup.messages import api
from splitup.messages.base import DigestField, Message
from splitup.net.http import SignedClient

_LEVEL = 1  # compresses to a quarter at 200 MB/s; higher levels save a fifth of that


class ChunkedMessage(Message):
    """Announces a message: SHA-256 and length of its compressed bytes, and its own length."""

    packed_digest: DigestField
    packed_bytes: Annotated[int, Field(ge=1, le=limits.MAX_CHUNKED_MESSAGE_BYTES)]
    raw_bytes: Annotated[int, Field(ge=1, le=limits.MAX_CHUNKED_MESSAGE_BYTES)]


class ChunkedMessages:
    """The latest ``tuning.MAX_CHUNKED_MESSAGES`` messages that this process offers to others."""

    def __init__(self) -> None:
        self._packed: Latest[str, bytes] = Latest(tuning.MAX_CHUNKED_MESSAGES)

    def offer(self, data: bytes) -> ChunkedMessage:
        """Keep a message for its receivers; raise InvalidInput for one that is too large."""
        if len(data) > limits.MAX_CHUNKED_MESSAGE_BYTES:
            raise InvalidInput(
                f"a message of {len(data)} bytes; members take {limits.MAX_CHUNKED_MESSAGE_BYTES}"
            )
        packed = zlib.compress(data, _LEVEL)
        digest = hashlib.sha256(packed).hexdigest()
        self._packed[digest] = packed
        return ChunkedMessage(packed_digest=digest, packed_bytes=len(packed), raw_bytes=len(data))

    def find_chunk(self, digest: str, index: int) -> bytes | None:
        """Return a chunk by its index from 0, None when it is not offered (any more)."""
        packed = self._packed.get(digest, b"")
        start = index * limits.MESSAGE_CHUNK_BYTES
        return packed[start : start + limits.MESSAGE_CHUNK_BYTES] or None


async def fetch_chunked_message(
    http: SignedClient, endpoint: str, chunked_message: ChunkedMessage
) -> bytes:
    """Fetch the compressed bytes of a message that a party offers; they are not checked yet.

    Raises PeerFault when it sends something else, Refused when it offers it no longer, Unavailable.
    """
    route = api.MESSAGE_CHUNK
    packed = bytearray()
    index = 0
    while len(packed) < chunked_message.packed_bytes:
        wanted = min(limits.MESSAGE_CHUNK_BYTES, chunked_message.packed_bytes - len(packed))
        url = route.url(endpoint, digest=chunked_message.packed_digest, index=index)
        data = await http.get_bytes(url, max_bytes=wanted, timeout_s=route.timeout_s)
        if len(data) != wanted:
            raise PeerFault(f"{url} has {len(data)} bytes instead of {wanted}")
        packed += data
        index += 1
    return bytes(packed)


def unpack_chunked_message(chunked_message: ChunkedMessage, packed: bytes) -> bytes:
    """Decompress a message; raise PeerFault when its bytes are not those announced."""
    if hashlib.sha256(packed).hexdigest() != chunked_message.packed_digest:
        raise PeerFault("a chunked message's bytes are not those announced")
    decoder = zlib.decompressobj()
    try:
        data = decoder.decompress(packed, chunked_message.raw_bytes)
    except zlib.error as error:
        raise PeerFault(f"a chunked message cannot be unpacked: {error}") from None
    is_whole = decoder.eof and not decoder.unconsumed_tail and not decoder.unused_data
    if len(data) != chunked_message.raw_bytes or not is_whole:
        raise PeerFault("a chunked message holds more or less than announced")
    return data
