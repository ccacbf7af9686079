"""Sends tensors that are too large for a frame directly to their readers, in chunks.

The producer sends the chunks and then a signed frame with their digest; the reader hashes them as
they arrive. This is only faster than the object store, and may fail: chunks are sent once, to peers
that keep up, and a tensor that does not arrive whole, in order and with the right digest is fetched
from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from splitup.core import limits, tuning
from splitup.core.tensors import NO_STEPS
from splitup.crypto.keys import Identity
from splitup.messages.base import RELAY_PATH
from splitup.messages.frames import TensorChunk
from splitup.net.links import Link
from splitup.net.object_transfer import compute_sha256
from splitup.net.signed_frames import make_entry_frame, seal_frame
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.task_queue import PortId

FindBefore = Callable[[int, bytes], Awaitable[bytes]]  # (step, digest)


def has_room(link: Link, nbytes: int, most_bytes: int) -> bool:
    """Return whether a tensor should be sent over a link in chunks.

    Not through a relay, whose bandwidth is small, and not when more than ``most_bytes`` would then
    wait for the peer.
    """
    is_direct = link.connected.is_set() and RELAY_PATH not in link.endpoints[0]
    return is_direct and link.bulk_bytes + nbytes <= most_bytes


async def send_direct(
    identity: Identity,
    links: Sequence[Link],
    execution_id: str,
    source: PortId,
    step: int,
    data: bytes | memoryview,
    find_before: FindBefore | None = None,
) -> tuple[bytes, bytes]:
    """Send a large tensor in chunks to readers, if any, then its digest.

    Returns the digest, and ``Frame.before`` as ``find_before`` gives it for the digest.
    """
    digest, _ = await asyncio.gather(
        compute_sha256(data), _send_chunks(links, execution_id, source, step, data)
    )
    before = NO_STEPS if find_before is None else await find_before(step, digest)
    if links:
        entry = LogEntry(step, digest, len(data), None)
        frame = make_entry_frame(execution_id, source, entry, before, direct=True)
        sealed = seal_frame(identity, frame)
        for link in links:
            link.send_bulk(sealed)  # after the chunks
        with contextlib.suppress(TimeoutError):  # the store does not wait for a slow reader
            async with asyncio.timeout(tuning.DIRECT_HEAD_START_S):
                for link in links:
                    await link.drain_bulk()
    return digest, before


async def _send_chunks(
    links: Sequence[Link], execution_id: str, source: PortId, step: int, data: bytes | memoryview
) -> None:
    """Send a tensor's chunks; a link that breaks loses them."""
    for offset in range(0, len(data) if links else 0, limits.TENSOR_CHUNK_BYTES):
        payload = data[offset : offset + limits.TENSOR_CHUNK_BYTES]
        chunk = TensorChunk(execution_id, *source, step, len(data), offset, payload).encode()
        for link in links:
            link.send_bulk(chunk)
        await asyncio.sleep(0)  # so that the first is sent before the last is copied


@dataclass(slots=True)
class _Incoming:
    data: bytearray
    received: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class TensorChunks:
    """Tensors that are arriving in chunks, ``tuning.TENSOR_CHUNKS_BYTES`` at most.

    When that is full, the execution that has the most gives way for one that would then have no
    more than it: it loses its newest tensors, which the store has. The caller checks of every chunk
    that its sender may send it.
    """

    def __init__(self) -> None:
        self._incoming: dict[str, dict[tuple[PortId, int], _Incoming]] = {}  # by execution
        self._bytes: Counter[str] = Counter()  # by execution

    def add(self, chunk: TensorChunk) -> None:
        """Add a chunk; one that is out of order is ignored, and the store has the tensor."""
        incoming = self._find(chunk)
        if incoming is None or chunk.offset != incoming.received:
            return
        incoming.data[chunk.offset : chunk.offset + len(chunk.payload)] = chunk.payload
        incoming.digest.update(chunk.payload)
        incoming.received += len(chunk.payload)

    def take(self, execution_id: str, port: PortId, step: int, digest: bytes) -> memoryview | None:
        """Remove a tensor; return it when it is whole and has this SHA-256, else None."""
        incoming = self._remove(execution_id, (port, step))
        if incoming is None:
            return None
        if incoming.received < len(incoming.data) or incoming.digest.digest() != digest:
            return None
        return memoryview(incoming.data)

    def drop(self, execution_id: str) -> None:
        """Forget the tensors of an execution."""
        self._incoming.pop(execution_id, None)
        self._bytes.pop(execution_id, None)

    def _find(self, chunk: TensorChunk) -> _Incoming | None:
        name, key = chunk.execution_id, ((chunk.task, chunk.port), chunk.step)
        incoming = self._incoming.get(name, {}).get(key)
        if incoming is not None:
            return incoming if len(incoming.data) == chunk.length else None
        if chunk.offset or not self._make_room(name, chunk.length):
            return None
        incoming = _Incoming(bytearray(chunk.length))
        self._incoming.setdefault(name, {})[key] = incoming
        self._bytes[name] += chunk.length
        return incoming

    def _make_room(self, execution_id: str, length: int) -> bool:
        """Return whether there is room for a tensor, for which larger executions give way."""
        while self._bytes.total() + length > tuning.TENSOR_CHUNKS_BYTES:
            most = max(self._bytes, key=lambda name: self._bytes[name], default=execution_id)
            if self._bytes[most] < self._bytes[execution_id] + length or most == execution_id:
                return False
            self._remove(most, next(reversed(self._incoming[most])))
        return True

    def _remove(self, execution_id: str, key: tuple[PortId, int]) -> _Incoming | None:
        tensors = self._incoming.get(execution_id, {})
        incoming = tensors.pop(key, None)
        if incoming is not None:
            self._bytes[execution_id] -= len(incoming.data)
            if not tensors:
                self.drop(execution_id)
        return incoming
