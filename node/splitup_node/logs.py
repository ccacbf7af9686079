"""What a node keeps of its outputs: running digests for the commitment, segments for the store.

Segments leave in the background, a few at a time; what waits beyond a few MiB waits on the disk.
The token path never waits for any of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from splitup import limits
from splitup.errors import PeerFault
from splitup.protocol.keys import Segment, iter_segments
from splitup.wire import Grant, Grants

_log = logging.getLogger("splitup.node.logs")

Put = Callable[[Grant, bytes, Grant | None], Awaitable[None]]


class PortLog:
    """The log of one output port of one execution: tensors go in, full segments come out."""

    def __init__(
        self, execution_id: str, task: int, port: int, tensor_bytes: int, steps: int
    ) -> None:
        self._segments: Iterator[Segment] = iter_segments(
            execution_id, task, port, tensor_bytes, steps
        )
        self._segment: Segment | None = None
        self._buffer = bytearray()

    def append(self, data: bytes | memoryview) -> tuple[Segment, bytes] | None:
        """Add the next step's tensor; return the segment that it completes."""
        if self._segment is None:
            self._segment = next(self._segments)
        self._buffer += data
        if len(self._buffer) < self._segment.length:
            return None
        return self._take()

    def finish(self) -> tuple[Segment, bytes] | None:
        """Return the last segment, its missing steps zero bytes, when one was begun."""
        if self._segment is None:
            return None
        self._buffer += bytes(self._segment.length - len(self._buffer))
        return self._take()

    def _take(self) -> tuple[Segment, bytes] | None:
        segment, data = self._segment, bytes(self._buffer)
        self._segment, self._buffer = None, bytearray()
        return None if segment is None else (segment, data)


class Digests:
    """SHA-256 over all steps of every input and output port of one task."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._inputs = [hashlib.sha256() for _ in range(inputs)]
        self._outputs = [hashlib.sha256() for _ in range(outputs)]

    def add_inputs(self, tensors: list[bytes | memoryview]) -> None:
        """Add one step's inputs, in order."""
        for digest, data in zip(self._inputs, tensors, strict=True):
            digest.update(data)

    def add_outputs(self, tensors: list[bytes | memoryview]) -> None:
        """Add one step's outputs, in order."""
        for digest, data in zip(self._outputs, tensors, strict=True):
            digest.update(data)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the input digests so far, 64 hexadecimal digits each."""
        return tuple(digest.hexdigest() for digest in self._inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the output digests so far, 64 hexadecimal digits each."""
        return tuple(digest.hexdigest() for digest in self._outputs)


class Uploader:
    """Writes segments to the store, a few at once; ``directory`` holds what memory should not."""

    def __init__(self, put: Put, directory: Path) -> None:
        self._put = put
        self._directory = directory
        self._slots = asyncio.Semaphore(limits.UPLOADS_AT_ONCE)
        self._memory_bytes = 0
        self._spooled = 0

    async def upload(self, grants: Awaitable[Grants], segment: Segment, data: bytes) -> None:
        """Write one segment; return when the store has it. Raises StorageUnavailable, PeerFault."""
        spool: Path | None = None
        if self._memory_bytes + len(data) > limits.UPLOAD_MEMORY_BYTES and self._slots.locked():
            self._spooled += 1
            spool = self._directory / f"{self._spooled:08d}"
            await asyncio.to_thread(_write_spool, spool, data)
            data = b""
        kept = len(data)
        self._memory_bytes += kept
        try:
            async with self._slots:
                if spool is not None:
                    data = await asyncio.to_thread(spool.read_bytes)
                issued = await grants
                await self._put(
                    issued.find("PUT", segment.key), data, _find_or_none(issued, segment.key)
                )
        finally:
            self._memory_bytes -= kept
            if spool is not None:
                spool.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what an earlier run of the node left in the spool."""
        for file in self._directory.glob("*"):
            file.unlink()


def _write_spool(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(data)


def _find_or_none(grants: Grants, key: str) -> Grant | None:
    try:
        return grants.find("GET", key)
    except PeerFault:
        return None
