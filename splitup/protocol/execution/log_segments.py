"""Log segments: the form in which a producer's tensors are stored. Pure; no I/O, no clock.

    segment   u32 header bytes | SegmentHeader, canonical | the tensors in order, except zeros

Segments of one port are chained by their digests and written in order, so a reader that reaches a
step has all steps before it. The producer keeps tensors that are not stored yet, and sends them
again to a node that replaces a consumer.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.core.tensors import compute_zero_digest, is_zero
from splitup.messages.storage import LogName, SegmentHeader

FIRST_PREVIOUS: Final = "0" * 64
_PREFIX_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One step of a port. ``data`` is None for a tensor that is an object of its own."""

    step: int
    digest: bytes  # SHA-256
    length: int
    data: bytes | memoryview | None

    @property
    def is_zero(self) -> bool:
        """Return whether the tensor is all zeros; such tensors are not stored."""
        return self.data is not None and is_zero(self.digest, self.length)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive entries that are stored as one object."""

    name: LogName
    entries: tuple[LogEntry, ...]

    def encode(self, execution_id: str, previous: str) -> list[bytes | memoryview]:
        """Return the object's bytes in parts, the tensors uncopied.

        ``previous`` is the digest of the segment before.
        """
        header = SegmentHeader(
            execution_id=execution_id,
            task=self.name.task,
            port=self.name.port,
            node=self.name.node,
            index=self.name.number,
            first_step=self.entries[0].step,
            lengths=tuple(entry.length for entry in self.entries),
            apart=tuple(
                (place, entry.digest.hex())
                for place, entry in enumerate(self.entries)
                if entry.data is None
            ),
            zeros=tuple(place for place, entry in enumerate(self.entries) if entry.is_zero),
            previous=previous,
        ).canonical_bytes()
        size = len(header).to_bytes(_PREFIX_BYTES, "big")
        tensors = (
            entry.data for entry in self.entries if entry.data is not None and not entry.is_zero
        )
        return [size + header, *tensors]


class PortLog:
    """One producer's log of one port: entries in, segments out; keeps what is not stored yet."""

    def __init__(self, task: int, port: int, node: str) -> None:
        self._name = LogName.of(task, port, node, 0)
        self._open: list[LogEntry] = []
        self._open_bytes = 0
        self._opened_at = 0.0
        self._closed: deque[Segment] = deque()  # not stored, oldest first
        self._next_index = 0
        self.next_step = 0
        self.previous = FIRST_PREVIOUS  # digest of the last segment that was encoded
        self.unstored_bytes = 0

    def resume(self, reader: LogNameer) -> None:
        """Continue after the segments of an earlier run, all of which ``reader`` has read."""
        self._next_index, self.next_step = reader.name.number, reader.next_step
        self.previous = reader.previous

    def append(self, entry: LogEntry, now: float) -> None:
        """Add the next step. Steps come in order."""
        assert entry.step == self.next_step, f"step {entry.step} after {self.next_step - 1}"
        self.next_step += 1
        size = 0 if entry.data is None else len(entry.data)
        if self._open and self._open_bytes + size > limits.SEGMENT_BYTES:
            self._close()
        if not self._open:
            self._opened_at = now
        self._open.append(entry)
        self._open_bytes += size
        self.unstored_bytes += size
        if len(self._open) >= limits.SEGMENT_STEPS or self._open_bytes >= limits.SEGMENT_BYTES:
            self._close()

    def flush(self, before: float) -> bool:
        """Close a segment opened at ``before`` or earlier; return whether any is to be stored."""
        if self._open and self._opened_at <= before:
            self._close()
        return bool(self._closed)

    @property
    def stored_steps(self) -> int:
        """Return how many steps are stored."""
        return next((entry.step for entry in self.iter_unstored()), self.next_step)

    @property
    def is_behind(self) -> bool:
        """Return whether a segment was filled before the last one was stored."""
        return len(self._closed) > 1

    def get_oldest(self) -> Segment | None:
        """Return the segment to store next."""
        return self._closed[0] if self._closed else None

    def mark_stored(self, segment: Segment, digest: str) -> None:
        """Drop a segment that is stored now; ``digest`` is its SHA-256."""
        assert segment is self._closed[0], "segments are stored in order"
        self._closed.popleft()
        self.previous = digest
        self.unstored_bytes -= sum(len(e.data) for e in segment.entries if e.data is not None)

    def iter_unstored(self) -> Iterator[LogEntry]:
        """Yield the entries that may not be stored yet, in order of steps."""
        for segment in self._closed:
            yield from segment.entries
        yield from self._open

    def _close(self) -> None:
        name = self._name.model_copy(update={"number": self._next_index})
        self._closed.append(Segment(name, tuple(self._open)))
        self._next_index += 1
        self._open, self._open_bytes = [], 0


class LogNameer:
    """Checks one producer's segments as they are read, in order."""

    def __init__(
        self, execution_id: str, task: int, port: int, node: str, accepts: Callable[[int], bool]
    ) -> None:
        self._execution_id = execution_id
        self._accepts = accepts
        self.previous = FIRST_PREVIOUS  # digest of the last segment read
        self.name = LogName.of(task, port, node, 0)  # of the segment to read next
        self.next_step = 0

    def read(self, data: bytes) -> list[LogEntry]:
        """Return the entries of the next segment. Raises PeerFault for a chain that is broken."""
        view = memoryview(data)
        size = int.from_bytes(view[:_PREFIX_BYTES], "big")
        start = _PREFIX_BYTES + size
        self._check(len(view) >= start and size <= limits.SEGMENT_HEADER_BYTES, "is cut off")
        header = SegmentHeader.parse(bytes(view[_PREFIX_BYTES:start]))
        name = self.name
        self._check(
            (header.execution_id, header.task, header.port, header.node, header.index)
            == (self._execution_id, name.task, name.port, name.node, name.number),
            "does not match its key",
        )
        self._check(header.first_step == self.next_step, "skips steps")
        self._check(header.previous == self.previous, "does not follow the segment before it")
        self._check(all(map(self._accepts, header.lengths)), "has a tensor of impossible length")
        entries = list(self._split(header, view[start:]))
        self.previous = hashlib.sha256(view).hexdigest()
        self.next_step += len(entries)
        self.name = name.model_copy(update={"number": name.number + 1})
        return entries

    def _split(self, header: SegmentHeader, tensors: memoryview) -> Iterable[LogEntry]:
        apart, zeros = dict(header.apart), set(header.zeros)
        absent = zeros.union(apart)
        inside = sum(n for place, n in enumerate(header.lengths) if place not in absent)
        self._check(zeros.isdisjoint(apart), "stores zeros")
        count = len(header.lengths)
        self._check(all(place < count for place in zeros), "has zeros where it has no step")
        # they become bytes here: a segment may have no more of them than of other tensors
        size = inside + sum(header.lengths[place] for place in zeros)
        self._check(size <= limits.SEGMENT_BYTES, "has too many bytes, or zeros")
        self._check(inside == len(tensors), "has another length than its header says")
        offset = 0
        for place, length in enumerate(header.lengths):
            step = header.first_step + place
            if place in apart:
                yield LogEntry(step, bytes.fromhex(apart[place]), length, None)
                continue
            if place in zeros:
                yield LogEntry(step, compute_zero_digest(length), length, bytes(length))
                continue
            data = tensors[offset : offset + length]
            offset += length
            yield LogEntry(step, hashlib.sha256(data).digest(), length, data)

    def _check(self, condition: bool, problem: str) -> None:
        if not condition:
            raise PeerFault(
                f"the log object {self.name.get_key(self._execution_id)} {problem}",
                peer=self.name.node,
            )
