"""The messages between the daemon and its worker: length-prefixed frames over a socket pair.

Both ends are this package and start together, so the framing is trusted. The tensors inside come
from strangers, so the worker checks them like any stranger's input. A run carries no JSON: it is on
the path of every token.

    message   u64 body bytes | u8 kind | u64 request id | body
    LOAD      u8 1 if weights follow, as an open file over the second socket |
              u64 memory bytes | i32 gate, -1 for none | u64 graph bytes | the graph | its kernels
    RUN       u64 session | u16 program | u16 inputs | per input: u64 bytes | the inputs
    answer    u64 started ns | u64 ended ns | u16 outputs | per output: u64 bytes | the outputs
    RUNS      u16 runs | per run: u64 bytes | the runs
    answer    u16 runs | per run: u64 bytes | per run: u8 RUN or FAILED, and what answers it
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from splitup.core import limits
from splitup.core.errors import SplitUpError

HEADER: Final = struct.Struct("<QBQ")
_LOAD: Final = struct.Struct("<BQiQ")
_RUN: Final = struct.Struct("<QHH")
_ANSWER: Final = struct.Struct("<QQH")
_KIND: Final = struct.Struct("<B")


class QuestionKind(IntEnum):
    """What a message asks for; the answer to a request repeats its kind, or is FAILED."""

    DESCRIBE = 1  # -> JSON of a DeviceReport
    LOAD = 2  # -> JSON of what was loaded
    RUN = 3
    DROP = 4  # u64 sessions to forget -> nothing
    FAILED = 5  # UTF-8 sentence
    STATE = 6  # u64 session -> SHA-256 of its state, 32 bytes
    RUNS = 7  # of one program: in several sessions, or consecutive ones of one session
    UNLOAD = 8  # u64 program -> nothing; its memory is freed
    PROGRESS = 10  # empty; a LOAD goes on, its answer follows
    LOST = 9  # answers no request: UTF-8 sentence, why the worker ends with its device


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A task, its machine code, and its memory and its gate as the manifest says."""

    graph: bytes
    kernels: bytes
    memory_bytes: int
    gate: int | None


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
    kind: QuestionKind, request_id: int, parts: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Return the buffers of one message, for a scattered write."""
    return [HEADER.pack(sum(map(len, parts)), kind, request_id), *parts]


def encode_load(request: LoadRequest, *, has_weights: bool) -> list[bytes]:
    """Return the body of a LOAD request."""
    gate = -1 if request.gate is None else request.gate
    head = _LOAD.pack(has_weights, request.memory_bytes, gate, len(request.graph))
    return [head, request.graph, request.kernels]


def decode_load(body: memoryview) -> tuple[LoadRequest, bool]:
    """Parse a LOAD request, and whether weights follow."""
    has_weights, memory_bytes, gate, length = _LOAD.unpack_from(body)
    end = _LOAD.size + length
    graph, kernels = bytes(body[_LOAD.size : end]), bytes(body[end:])
    request = LoadRequest(graph, kernels, memory_bytes, None if gate < 0 else gate)
    return request, bool(has_weights)


def encode_run(request: RunRequest) -> list[bytes | memoryview]:
    """Return the body of a RUN request, the tensors uncopied."""
    inputs = request.inputs
    head = _RUN.pack(request.session, request.program, len(inputs))
    return [head + struct.pack(f"<{len(inputs)}Q", *map(len, inputs)), *inputs]


def decode_run(body: memoryview) -> RunRequest:
    """Parse a RUN request; the inputs are views of ``body``."""
    session, program, count = _RUN.unpack_from(body)
    return RunRequest(session, program, _split(body, _RUN.size, count))


def encode_answer(answer: RunAnswer) -> list[bytes | memoryview]:
    """Return the body of the answer to a run."""
    head = _ANSWER.pack(answer.started_ns, answer.ended_ns, len(answer.outputs))
    lengths = struct.pack(f"<{len(answer.outputs)}Q", *map(len, answer.outputs))
    return [head + lengths, *answer.outputs]


def decode_answer(body: memoryview) -> RunAnswer:
    """Parse the answer to a run; small outputs are copied, so that they keep no buffer alive."""
    started_ns, ended_ns, count = _ANSWER.unpack_from(body)
    outputs: list[bytes | memoryview] = []
    start = _ANSWER.size + 8 * count
    for length in struct.unpack_from(f"<{count}Q", body, _ANSWER.size):
        view = body[start : start + length]
        start += length
        outputs.append(view if length > limits.INLINE_TENSOR_BYTES else bytes(view))
    return RunAnswer(started_ns, ended_ns, outputs)


def encode_runs(requests: Sequence[RunRequest]) -> list[bytes | memoryview]:
    """Return the body of a RUNS request."""
    return _encode_items([encode_run(request) for request in requests])


def decode_runs(body: memoryview) -> list[RunRequest]:
    """Parse a RUNS request; the inputs are views of ``body``."""
    return [decode_run(item) for item in _decode_items(body)]


def encode_answers(answers: Sequence[RunAnswer | Exception]) -> list[bytes | memoryview]:
    """Return the body of the answer to several runs."""
    items: list[list[bytes | memoryview]] = []
    for answer in answers:
        if isinstance(answer, RunAnswer):
            items.append([_KIND.pack(QuestionKind.RUN), *encode_answer(answer)])
        else:
            items.append([_KIND.pack(QuestionKind.FAILED), describe_failure(answer).encode()])
    return _encode_items(items)


def decode_answers(body: memoryview) -> list[RunAnswer | str]:
    """Parse the answer to several runs; a text says why a run failed."""
    answers: list[RunAnswer | str] = []
    for item in _decode_items(body):
        rest = item[_KIND.size :]
        is_failed = _KIND.unpack_from(item)[0] == QuestionKind.FAILED
        answers.append(bytes(rest).decode(errors="replace") if is_failed else decode_answer(rest))
    return answers


def describe_failure(error: Exception) -> str:
    """Return the text of an error, with its type when it is not a SplitUpError."""
    return (
        str(error) if isinstance(error, SplitUpError) else f"{type(error).__name__}: {error}"[:400]
    )


def _encode_items(items: Sequence[Sequence[bytes | memoryview]]) -> list[bytes | memoryview]:
    lengths = [sum(map(len, item)) for item in items]
    head = struct.pack(f"<H{len(items)}Q", len(items), *lengths)
    return [head, *(part for item in items for part in item)]


def _decode_items(body: memoryview) -> list[memoryview]:
    (count,) = struct.unpack_from("<H", body)
    return _split(body, 2, count)


def _split(body: memoryview, offset: int, count: int) -> list[memoryview]:
    lengths = struct.unpack_from(f"<{count}Q", body, offset)
    offset += 8 * count
    views = []
    for length in lengths:
        views.append(body[offset : offset + length])
        offset += length
    return views
