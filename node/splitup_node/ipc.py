"""What the daemon and its worker say to each other: length-prefixed frames over a socket pair.

Both ends are this package, started together; the worker still checks nothing it computes on less
than a stranger's input, since the bytes inside come from strangers. A run carries no JSON: it is on
the path of every token.

    message   u64 body bytes | u8 kind | u64 request id | body
    RUN       u64 session | u16 program | u16 inputs | per input: u64 bytes | the inputs
    answer    u64 started ns | u64 ended ns | u16 outputs | per output: u64 bytes | the outputs
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

HEADER: Final = struct.Struct("<QBQ")
_RUN: Final = struct.Struct("<QHH")
_ANSWER: Final = struct.Struct("<QQH")


class Kind(IntEnum):
    """What a message asks for; the answer to a request repeats its kind, or is FAILED."""

    DESCRIBE = 1  # -> JSON of a DeviceReport
    LOAD = 2  # JSON {"task": path, "weights": path or ""} -> JSON of what was loaded
    RUN = 3
    DROP = 4  # u64 sessions to forget -> nothing
    FAILED = 5  # UTF-8 sentence
    STATE = 6  # u64 session -> SHA-256 of its state, 32 bytes


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One step of one program in one session; a session is one task of one execution."""

    session: int
    program: int
    inputs: Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """The outputs of a run and when it was computed, in nanoseconds since the epoch."""

    started_ns: int
    ended_ns: int
    outputs: Sequence[bytes | memoryview]


def encode_message(
    kind: Kind, request_id: int, parts: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Return the buffers of one message, for a scattered write."""
    return [HEADER.pack(sum(map(len, parts)), kind, request_id), *parts]


def encode_run(request: RunRequest) -> list[bytes | memoryview]:
    """Return the body of a RUN request, the tensors uncopied."""
    head = _RUN.pack(request.session, request.program, len(request.inputs))
    return [head + _encode_lengths(request.inputs), *request.inputs]


def decode_run(body: memoryview) -> RunRequest:
    """Parse a RUN request; the inputs are views of ``body``."""
    session, program, count = _RUN.unpack_from(body)
    return RunRequest(session, program, _split(body, _RUN.size, count))


def encode_answer(answer: RunAnswer) -> list[bytes | memoryview]:
    """Return the body of the answer to a run."""
    head = _ANSWER.pack(answer.started_ns, answer.ended_ns, len(answer.outputs))
    return [head + _encode_lengths(answer.outputs), *answer.outputs]


def decode_answer(body: memoryview) -> RunAnswer:
    """Parse the answer to a run; the outputs are copies, since they outlive the buffer."""
    started_ns, ended_ns, count = _ANSWER.unpack_from(body)
    return RunAnswer(
        started_ns, ended_ns, [bytes(view) for view in _split(body, _ANSWER.size, count)]
    )


def _encode_lengths(tensors: Sequence[bytes | memoryview]) -> bytes:
    return struct.pack(f"<{len(tensors)}Q", *map(len, tensors))


def _split(body: memoryview, offset: int, count: int) -> list[memoryview]:
    lengths = struct.unpack_from(f"<{count}Q", body, offset)
    offset += 8 * count
    views = []
    for length in lengths:
        views.append(body[offset : offset + length])
        offset += length
    return views
