"""The streams of one server: what runs, what is kept of what ended, and who joins what.

A request that is sent again joins the stream that runs. A stream belongs to the API key that asked
for it. With a folder, streams outlive the server: the next one goes on with those that its death
cut off.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from splitup.core import tuning
from splitup.core.errors import SplitUpError, Throttled
from splitup_gateway.errors import ApiError
from splitup_gateway.streaming.kept_streams import KeptStream
from splitup_gateway.streaming.stream import Stream, StreamedCall
from splitup_gateway.streaming.stream_files import StreamFile, list_files

_log = logging.getLogger("splitup.serve")

Work = Callable[[Stream], Awaitable[None]]  # answers a request


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
        for file, rest_s in list_files(self.folder):
            try:
                stream = KeptStream.restore(file)
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
        name = f"strm_{secrets.token_urlsafe(24)}"
        if self.folder is None:
            stream = Stream(call, name)
        else:
            stream = KeptStream(call, StreamFile(self.folder / name))
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
        if isinstance(stream, KeptStream):
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
