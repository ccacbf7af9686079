"""The messages between the daemon and its worker: length-prefixed frames over a socket pair.

Both ends are this package and start together, so the framing is trusted. The tensors inside come
from strangers, so the worker checks them like any stranger's input. A run carries no JSON: it is on
the path of every token.

    message   u64 body bytes | u8 kind | u64 request id | body
    LOAD      u8 1 if weights follow, as an open file over the second socket |
              u64 memory bytes | i32 gate, -1 for none | u64 graph bytes | the graph | its kernels
    RUN       u16 runs | per run: u64 session | u16 program | u16 inputs |
              per input: u64 bytes | the inputs
    answer    u16 runs | per run: u8 RUN or FAILED | u64 started ns | u64 ended ns | u16 outputs |
              per output: u64 bytes | the outputs; a failed one has one, a UTF-8 sentence
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from splitup.core import limits
from splitup.core.errors import SplitUpError

HEADER: Final = struct.Struct("<QBQ")
_LOAD: Final = struct.Struct("<BQiQ")
_COUNT: Final = struct.Struct("<H")
_RUN: Final = struct.Struct("<QHH")
_ANSWER: Final = struct.Struct("<BQQH")


class QuestionKind(IntEnum):
    """What a message asks for; the answer to a request repeats its kind, or is FAILED."""

    DESCRIBE = 1  # -> JSON of a DeviceReport
    LOAD = 2  # -> JSON of what was loaded
    RUN = 3  # of one program: in several sessions, or consecutive steps of one session
    DROP = 4  # u64 sessions to forget -> nothing
    FAILED = 5  # UTF-8 sentence
    STATE = 6  # u64 session -> SHA-256 of its state, 32 bytes
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


def encode_runs(requests: Sequence[RunRequest]) -> list[bytes | memoryview]:
    """Return the body of a RUN request, the tensors uncopied."""
    parts: list[bytes | memoryview] = [_COUNT.pack(len(requests))]
    for request in requests:
        inputs = request.inputs
        head = _RUN.pack(request.session, request.program, len(inputs))
        parts += (head + struct.pack(f"<{len(inputs)}Q", *map(len, inputs)), *inputs)
    return parts


def decode_runs(body: memoryview) -> list[RunRequest]:
    """Parse a RUN request; the inputs are views of ``body``."""
    requests, start = [], _COUNT.size
    for _ in range(_COUNT.unpack_from(body)[0]):
        session, program, count = _RUN.unpack_from(body, start)
        lengths = struct.unpack_from(f"<{count}Q", body, start + _RUN.size)
        start += _RUN.size + 8 * count
        inputs: list[bytes | memoryview] = []
        for length in lengths:
            inputs.append(body[start : start + length])
            start += length
        requests.append(RunRequest(session, program, inputs))
    return requests


def encode_answers(answers: Sequence[RunAnswer | Exception]) -> list[bytes | memoryview]:
    """Return the body of the answer to a RUN request."""
    parts: list[bytes | memoryview] = [_COUNT.pack(len(answers))]
    for answer in answers:
        kind = QuestionKind.RUN
        if not isinstance(answer, RunAnswer):
            kind, answer = QuestionKind.FAILED, RunAnswer(0, 0, [describe_failure(answer).encode()])
        outputs = answer.outputs
        head = _ANSWER.pack(kind, answer.started_ns, answer.ended_ns, len(outputs))
        parts += (head + struct.pack(f"<{len(outputs)}Q", *map(len, outputs)), *outputs)
    return parts


def decode_answers(
    body: memoryview, make_failure: Callable[[str], SplitUpError]
) -> list[RunAnswer | SplitUpError]:
    """Parse the answer to a RUN request; ``make_failure`` gets the text of what failed.

    Small outputs are copied, so that they keep no buffer alive.
    """
    answers: list[RunAnswer | SplitUpError] = []
    start = _COUNT.size
    for _ in range(_COUNT.unpack_from(body)[0]):
        kind, started_ns, ended_ns, count = _ANSWER.unpack_from(body, start)
        lengths = struct.unpack_from(f"<{count}Q", body, start + _ANSWER.size)
        start += _ANSWER.size + 8 * count
        outputs: list[bytes | memoryview] = []
        for length in lengths:
            view = body[start : start + length]
            start += length
            outputs.append(view if length > limits.INLINE_TENSOR_BYTES else bytes(view))
        if kind == QuestionKind.FAILED:
            answers.append(make_failure(bytes(outputs[0]).decode(errors="replace")))
        else:
            answers.append(RunAnswer(started_ns, ended_ns, outputs))
    return answers


def describe_failure(error: Exception) -> str:
    """Return the text of an error, with its type when it is not a SplitUpError."""
    return (
        str(error) if isinstance(error, SplitUpError) else f"{type(error).__name__}: {error}"[:400]
    )
