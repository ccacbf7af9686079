"""What requests are answered: logs of events that one task fills and any connections read.

A connection that breaks ends nothing: whoever comes back reads on where it was, and a request that
is sent again joins the one that runs. A stream belongs to the API key that asked for it. With a
folder, streams outlive the server: the next one goes on with those that its death cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from splitup.client.queueing import Caller
from splitup.core import tuning
from splitup.core.errors import SplitUpError, Throttled
from splitup_gateway.errors import ApiError, translate
from splitup_gateway.stream_files import StreamFile, list_files, open_folder

_log = logging.getLogger("splitup.serve")

_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
Work = Callable[["Stream"], Awaitable[None]]  # answers a request
Note = dict[str, Any]  # in JSON's types


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A request, for the server that goes on with its answer."""

    path: str
    body: bytes


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
    asked: KeptRequest | None = None  # None when it is too large to be kept

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
        asked = KeptRequest(path, body) if len(body) <= tuning.STREAM_REQUEST_BYTES else None
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

    def __init__(self, call: StreamedCall, file: StreamFile | None = None) -> None:
        self.id = _make_id() if file is None else file.path.name
        self.created = int(time.time())
        self.call = call
        self.file = file
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
        self._noted = 0  # bytes of the notes
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
        self._noted += len(json.dumps(note))
        if self.file is not None and self._noted <= tuning.STREAM_BYTES:
            self.notes.append(note)
        elif self.call.asked is not None:  # its file would be written anew all the time
            self._forget_request()
            if self.file is not None:
                self.file.size = 0  # what it has of the request is to be gone

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

    # ---- its file ------------------------------------------------------------------------------

    def _save(self, events: Sequence[bytes], note: Note | None = None) -> None:
        """Write these events, the last ones; at the end, and in a long file, only what is kept."""
        if self.file is None or self.file.is_given_up or self.head is None:
            return
        if 0 < self.file.size < tuning.STREAM_FILE_BYTES and not self.is_ended:
            self.file.append({**self._describe(events), **({"note": note} if note else {})})
            return
        head = {
            **{"owner": self.call.owner, "digest": self.call.digest.hex(), "key": self.call.key},
            **{"content_type": self.head.content_type, "headers": dict(self.head.headers)},
            **{"is_streamed": self.head.is_streamed, "first": self._first},
        }
        asked = self.call.asked
        if asked is not None and self.head.is_streamed and not self.is_ended:
            named = {"path": asked.path, "body": asked.body.decode(errors="surrogateescape")}
            head |= {"asked": named, "notes": self.notes, "created": self.created}
        self.file.rewrite(head, self._describe(list(self._events)))

    def _describe(self, events: Sequence[bytes]) -> dict[str, Any]:
        """Return a line: events, and how it ended or what ends it if there is no other line."""
        assert self.head is not None
        line: dict[str, Any] = {"events": [event.decode() for event in events]}
        if self.is_ended:
            return {**line, "is_whole": self.is_whole}
        last = self.head.describe_error(RESTARTED).decode()
        return {**line, "last": last, "state": self.head.describe_state()}

    @classmethod
    def restore(cls, file: StreamFile) -> Self:
        """Return the stream of a file, ended unless ``resume`` can go on with it.

        Raises OSError, ValueError and LookupError.
        """
        head, *lines = file.read()
        call = StreamedCall(head["owner"], bytes.fromhex(head["digest"]), head["key"])
        stream = cls(call, file)
        last = lines[-1].get("last", "").encode()
        stream.head = Head(
            head["content_type"], head["headers"], head["is_streamed"], lambda _: last
        )
        stream._events.extend(event.encode() for line in lines for event in line["events"])
        stream._first = head["first"]
        stream.size = sum(map(len, stream._events))
        # an answer in one piece is whole with its one event
        stream.is_whole = lines[-1].get("is_whole", stream.count > 0 and not head["is_streamed"])
        stream._is_cut = bool(last)
        if stream._is_cut and "asked" in head:
            asked = head["asked"]
            body = asked["body"].encode(errors="surrogateescape")
            stream.call = replace(call, asked=KeptRequest(asked["path"], body))
            stream.created, stream.state = head["created"], lines[-1]["state"]
            for note in [*head["notes"], *(line["note"] for line in lines if "note" in line)]:
                stream._keep_note(note)
            file.size = 0  # to be written anew: its last line may have no end
        if stream.call.asked is None:
            stream.is_delivered = True  # only its Idempotency-Key joins it
            stream._end_cut()
        return stream

    def _end_cut(self) -> None:
        """End what nobody goes on with."""
        if self._is_cut and self.head is not None:
            self._add(self.head.describe_error(RESTARTED))
            self._again = 1  # its client may have had events that a machine lost with its power
        self.is_ended = True

    def wait_for_client(self) -> None:
        """Let a stream of another server wait for its client, as if that had left just now."""
        self.caller.leave()
        self._wait_for_readers()

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
    def attach(self, after: int = 0) -> Iterator[Reader]:
        """Read on after so many events; raise ApiError (410) when some of the rest are gone."""
        if after < self._first:
            raise ApiError(
                f"the stream's events up to {self._first} are no longer kept; ask again for the "
                "whole answer, as a new request",
                status=410,
                code="stream_gone",
            )
        self._stop_waiting()
        reader = Reader(self)
        # a client may have had events that a machine lost with its power: they come again
        is_ahead = self._is_cut and not self.is_ended
        self._at[reader] = after if is_ahead else min(after, self.count - self._again)
        self._tell()  # the producer may wait for somebody
        is_streamed = self.head is not None and self.head.is_streamed
        patience_s = None if is_streamed else self.call.patience_s
        self.caller.come(asyncio.get_running_loop().time(), patience_s)
        try:
            yield reader
        finally:
            self._left_at = self._at.pop(reader)
            self._tell()
            if not self._at and not self.is_ended:
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

    async def read(self, reader: Reader) -> AsyncIterator[bytes]:
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


_INTERNAL = ApiError(
    "internal error; the server's log has the details", status=500, kind="server_error"
)
RESTARTED = ApiError(
    "the server was started anew before the answer's end; send the request again",
    status=503,
    kind="server_error",
    code="server_restarted",
)


def _make_id() -> str:
    return f"strm_{secrets.token_urlsafe(24)}"


@dataclass(eq=False, slots=True)
class Reader:
    """A connection that reads a stream."""

    stream: Stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.stream.read(self)


@dataclass(slots=True)
class Streams:
    """The streams that run or ended lately, in bounds of time, count and bytes.

    With a folder, those of the server that had it before are there, too; raises ConfigurationError.
    """

    folder: Path | None = None
    _streams: dict[str, Stream] = field(default_factory=dict)  # by id, oldest first

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        open_folder(self.folder)
        for file, rest_s in list_files(self.folder):
            try:
                stream = Stream.restore(file)
            except (OSError, ValueError, LookupError) as error:
                _log.warning("the stream in %s cannot be read: %s", file.path, error)
                file.delete()
                continue
            self._streams[stream.id] = stream
            if stream.is_ended:
                self._keep(stream, rest_s)

    def resume(self, work: Work) -> None:
        """Go on by ``work`` with what another server's death cut off, when its client is back."""
        for stream in [one for one in self._streams.values() if not one.is_ended]:
            self._begin(stream, work)
            stream.wait_for_client()

    def find(self, stream_id: str, owner: str) -> Stream:
        """Return a stream of this owner; raise ApiError (404) when there is none."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.call.owner != owner:
            raise ApiError(
                f"this server keeps no such stream of yours; streams are kept for "
                f"{tuning.STREAM_KEEP_S:g} s after their end. Send the request again",
                status=404,
                code="stream_not_found",
            )
        return stream

    def join_or_start(self, call: StreamedCall, work: Work) -> Stream:
        """Return the stream of the same request, or a new one that ``work`` fills.

        Raises ApiError: (422) if its Idempotency-Key came with another request, (429) when too
        many of this owner's run.
        """
        return self._find_same(call) or self._start(call, work)

    def _find_same(self, call: StreamedCall) -> Stream | None:
        theirs = [one for one in self._streams.values() if one.call.owner == call.owner]
        for stream in reversed(theirs):
            if stream.is_ended and not stream.is_whole:
                continue  # a retry tries again
            if call.key and stream.call.key == call.key:
                if stream.call.digest != call.digest:
                    raise ApiError(
                        "this Idempotency-Key came with another request; use a new one for each",
                        status=422,
                        param="Idempotency-Key",
                        code="idempotency_key_reused",
                    )
                return stream
            is_lost = not stream.is_read and not stream.is_delivered
            if call.retries and not call.key and stream.call.digest == call.digest and is_lost:
                return stream
        return None

    def _start(self, call: StreamedCall, work: Work) -> Stream:
        running = [
            one
            for one in self._streams.values()
            if one.call.owner == call.owner and not one.is_ended
        ]
        if len(running) >= tuning.STREAMS_RUNNING:
            raise Throttled(
                f"{len(running)} requests of this key run already; try again in a few seconds"
            )
        unread = [one for one in running if one.is_left]
        for stream in unread[: -tuning.STREAMS_UNREAD]:
            stream.stop()
        stream = Stream(call, None if self.folder is None else StreamFile(self.folder / _make_id()))
        self._streams[stream.id] = stream
        self._begin(stream, work)
        return stream

    def _begin(self, stream: Stream, work: Work) -> None:
        stream.task = asyncio.create_task(self._run(stream, work), name=f"stream {stream.id}")

    async def _run(self, stream: Stream, work: Work) -> None:
        try:
            await work(stream)
            stream.end()
        except asyncio.CancelledError:
            stream.fail(ApiError("the answer was stopped before its end", code="stopped"))
        except SplitUpError as error:
            stream.fail(error)
        except Exception as error:
            if stream.head is not None:  # else who reads the refusal logs it
                _log.exception("an answer failed")
            stream.fail(error)
        finally:
            if stream.refusal is not None:
                self._forget(stream.id)
            else:
                self._keep(stream, tuning.STREAM_KEEP_S)

    def _keep(self, ended: Stream, rest_s: float) -> None:
        # not the stream, which would stay in memory until then though it is forgotten
        asyncio.get_running_loop().call_later(rest_s, self._forget, ended.id)
        self._make_room(ended.call.owner)

    def _forget(self, stream_id: str) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None and stream.file is not None:
            stream.file.delete()

    def _make_room(self, owner: str) -> None:
        """Forget the oldest ended streams, of this owner and then of all, beyond the bounds."""
        theirs = [one for one in self._streams.values() if one.call.owner == owner]
        for streams, count, most_bytes in (
            (theirs, tuning.STREAMS_OF_ONE, tuning.STREAMS_BYTES_OF_ONE),
            (list(self._streams.values()), tuning.STREAMS, tuning.STREAMS_BYTES),
        ):
            ended = [one for one in streams if one.is_ended and one.id in self._streams]
            size = sum(one.size for one in ended)
            for place, stream in enumerate(ended):
                if len(ended) - place <= count and size <= most_bytes:
                    break
                size -= stream.size
                self._forget(stream.id)

    async def close(self) -> None:
        """Stop everything that runs."""
        tasks = [one.task for one in self._streams.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
