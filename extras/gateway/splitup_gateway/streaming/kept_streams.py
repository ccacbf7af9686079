"""Streams that outlive their server: what their files say, and how the next server goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from splitup.core import tuning
from splitup_gateway.errors import ApiError
from splitup_gateway.streaming.stream import Head, Note, Stream, StreamedCall
from splitup_gateway.streaming.stream_files import StreamFile

RESTARTED = ApiError(
    "the server was started anew before the answer's end; send the request again",
    status=503,
    kind="server_error",
    code="server_restarted",
)


class KeptStream(Stream):
    """A stream with a file, from which another server goes on with it."""

    def __init__(self, call: StreamedCall, file: StreamFile) -> None:
        super().__init__(call, file.path.name)
        self.file = file
        self._noted = 0  # bytes of the notes

    def _keep_note(self, note: Note) -> None:
        self._noted += len(json.dumps(note))
        if self._noted <= tuning.STREAM_BYTES:
            self.notes.append(note)
        elif self.call.asked is not None:  # its file would be written anew all the time
            self._forget_request()
            self.file.size = 0  # what it has of the request is to be gone

    def _save(self, events: Sequence[bytes], note: Note | None = None) -> None:
        """Write these events, the last ones; at the end, and in a long file, only what is kept.

        A longer answer in one piece is not worth the time that its file takes everybody.
        """
        if self.size > tuning.STREAM_FILE_BYTES:
            self.file.give_up()
        if self.file.is_given_up or self.head is None:
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
            named = {"path": asked[0], "body": asked[1].decode(errors="surrogateescape")}
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
            stream.call = replace(call, asked=(asked["path"], body))
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
