"""An answer as it is told: a log of events that one task fills and any connections read.

A connection that breaks ends nothing: whoever comes back reads on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitup.client.queueing import Caller
from splitup.core import tuning
from splitup.core.errors import SplitUpError
from splitup_gateway.errors import ApiError, translate

Note = dict[str, Any]  # in JSON's types

_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_INTERNAL = ApiError(
    "internal error; the server's log has the details", status=500, kind="server_error"
)


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A request as far as it tells whether another one is the same.

    ``key`` is its Idempotency-Key, "" without one. ``retries`` is how often its client has sent it
    before, None for clients that do not tell.
    """

    owner: str  # the name of an API key, "" without keys
    digest: bytes
    key: str = ""
    retries: int | None = None
    patience_s: float | None = None  # that its client waits for a byte, None when it does not say
    # path and body, for the server that goes on with its answer; None when they are too large
    asked: tuple[str, bytes] | None = None

    @classmethod
    def make(cls, owner: str, path: str, body: bytes, headers: Mapping[str, str]) -> StreamedCall:
        """Read a request; raise ApiError for a key that is none."""
        key = headers.get("Idempotency-Key", "")
        if len(key) > tuning.IDEMPOTENCY_KEY_CHARS:
            raise ApiError(
                f"an Idempotency-Key has up to {tuning.IDEMPOTENCY_KEY_CHARS} characters, this one "
                f"has {len(key)}; a UUID will do",
                param="Idempotency-Key",
            )
        told = headers.get("x-stainless-retry-count", "")  # of clients of OpenAI and Anthropic
        retries = int(told) if told.isascii() and told.isdigit() and len(told) < 4 else None
        waits = headers.get("x-stainless-read-timeout") or headers.get("x-stainless-timeout", "")
        patience_s = float(waits) if _SECONDS.fullmatch(waits) else None
        digest = hashlib.sha256(path.encode() + b"\n" + body).digest()
        asked = (path, body) if len(body) <= tuning.STREAM_REQUEST_BYTES else None
        return cls(owner, digest, key, retries, patience_s, asked)


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before the first event."""

    content_type: str
    headers: Mapping[str, str]
    is_streamed: bool  # else there is one event, the whole answer
    describe_error: Callable[[ApiError], bytes] = lambda _: b""  # of what ends it early
    describe_state: Callable[[], dict[str, Any]] = dict  # with which another server goes on


class Stream:
    """An answer: its head, and its events as they come.

    Events that every reader has are dropped when there are too many; while a reader is behind, the
    producer waits. It waits, too, while nobody reads events, for ``tuning.STREAM_GRACE_S`` if the
    client can come back; then the work ends. An answer in one piece is computed meanwhile.
    """

    def __init__(self, call: StreamedCall, stream_id: str) -> None:
        self.id = stream_id
        self.created = int(time.time())
        self.call = call
        self.caller = Caller(patience_s=call.patience_s)
        self.head: Head | None = None
        self.refusal: Exception | None = None  # instead of a head
        self.is_ended = False
        self.is_whole = False  # it ended as it should
        self.is_delivered = False  # a reader had all of it
        self.size = 0  # of the events that are kept, in bytes
        self.task: asyncio.Task[None] | None = None
        self.notes: list[Note] = []  # of its producer, with which another server goes on
        self.state: dict[str, Any] = {}  # that another server has left
        self._events: deque[bytes] = deque()
        self._first = 0  # events that were dropped
        self._again = 0  # of the last ones, that are told to whoever comes back
        self._at: dict[object, int] = {}  # how many events each reader has had
        self._left_at = 0  # of the last one that left
        self._changed = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self._is_cut = False  # by the death of the server that it is told by

    @property
    def count(self) -> int:
        """How many events there have been."""
        return self._first + len(self._events)

    @property
    def is_read(self) -> bool:
        """Whether a connection reads it."""
        return bool(self._at)

    @property
    def is_left(self) -> bool:
        """Whether it waits for its client to come back."""
        return self._grace is not None

    # ---- the producer --------------------------------------------------------------------------

    def begin(self, head: Head) -> None:
        """Say that the request is served; before that it can be refused."""
        self.head = head
        self._save([])
        self._tell()

    async def append(self, events: Sequence[bytes], note: Note | None = None) -> None:
        """Add events; wait while nobody reads, or a reader is behind by as many as are kept.

        With the ``note``, whoever goes on with the answer knows that these events were told.
        """
        if note is not None:
            self._keep_note(note)
        self._save([self._add(event) for event in events], note)
        self._tell()
        self._drop()
        while self.is_left or (self.size > tuning.STREAM_BYTES and len(self._events) > 1):
            await self._changed.wait()
            self._drop()

    def _keep_note(self, note: Note) -> None:
        """Keep what another server needs to go on: none does without a file."""
        if self.call.asked is not None:
            self._forget_request()

    def _save(self, events: Sequence[bytes], note: Note | None = None) -> None:
        """Keep these events, the last ones, and the note for another server."""

    def _forget_request(self) -> None:
        """Let no other server go on with it."""
        self.notes, self.call = [], replace(self.call, asked=None)

    def end(self) -> None:
        """Say that all is told."""
        self.is_whole = True
        self._finish([])

    def fail(self, error: Exception) -> None:
        """Refuse the request; one that is served already ends with the error as an event."""
        last = []
        if self.head is None:
            self.refusal = error
        elif not self.is_ended:
            known = error if isinstance(error, SplitUpError) else _INTERNAL
            last.append(self._add(self.head.describe_error(translate(known))))
        self._finish(last)

    def stop(self) -> None:
        """End the work now."""
        if self.task is not None:
            self.task.cancel()

    def _finish(self, last: Sequence[bytes]) -> None:
        self.is_ended = True
        self._save(last)
        self._forget_request()
        self._stop_waiting()
        self._tell()

    def _stop_waiting(self) -> None:
        """Forget when to end, also because the timer keeps what it ends in memory."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _add(self, event: bytes) -> bytes:
        """Add an event; return it as readers get it."""
        if self.head is not None and self.head.content_type == "text/event-stream":
            if not event.startswith(b":"):  # a comment has no id
                event = f"id: {self.id}:{self.count + 1}\n".encode() + event
        self._events.append(event)
        self.size += len(event)
        return event

    def _drop(self) -> None:
        had = min(self._at.values(), default=self._left_at)
        while self.size > tuning.STREAM_BYTES and self._first < had:
            self.size -= len(self._events.popleft())
            self._first += 1

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- readers -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attach(self, after: int = 0) -> Iterator[AsyncIterator[bytes]]:
        """Read on after so many events; raise ApiError (410) when some of the rest are gone."""
        if after < self._first:
            raise ApiError(
                f"the stream's events up to {self._first} are no longer kept; ask again for the "
                "whole answer, as a new request",
                status=410,
                code="stream_gone",
            )
        self._stop_waiting()
        reader = object()
        # a client may have had events that a machine lost with its power: they come again
        is_ahead = self._is_cut and not self.is_ended
        self._at[reader] = after if is_ahead else min(after, self.count - self._again)
        self._tell()  # the producer may wait for somebody
        is_streamed = self.head is not None and self.head.is_streamed
        patience_s = None if is_streamed else self.call.patience_s
        self.caller.come(asyncio.get_running_loop().time(), patience_s)
        try:
            yield self._read(reader)
        finally:
            self._left_at = self._at.pop(reader)
            self._tell()
            if not self._at and not self.is_ended:
                self.caller.leave()
                self._wait_for_readers()

    def wait_for_client(self) -> None:
        """Let a stream of another server wait for its client, as if that had left just now."""
        self.caller.leave()
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        call = self.call
        knows_id = self.head is not None and self.head.is_streamed
        if not (knows_id or call.key or call.retries is not None):
            self.stop()
            return
        loop = asyncio.get_running_loop()
        self._grace = loop.call_later(tuning.STREAM_GRACE_S, self.stop)

    async def wait_for_head(self) -> Head:
        """Return the head; raise what the request is refused with."""
        while self.head is None and self.refusal is None:
            await self._changed.wait()
        if self.refusal is not None:
            raise self.refusal
        assert self.head is not None
        return self.head

    async def _read(self, reader: object) -> AsyncIterator[bytes]:
        """Yield what a reader has not had, as it comes."""
        while True:
            at = self._at[reader]
            if at < self.count:
                found = b"".join(
                    self._events[place - self._first] for place in range(at, self.count)
                )
                count = self.count
                yield found
                self._at[reader] = count
                self._tell()  # the producer may wait for it
            elif self.is_ended:
                self.is_delivered = True
                return
            else:
                await self._changed.wait()
