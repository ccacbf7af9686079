"""A confined child's side: it gets open files and messages, nothing else, and answers.

A child's module calls ``confinement.serve_confined``. This imports little, because every child pays
for it at its start.

    message    u32 bytes of the head | u32 buffers | per buffer: u64 bytes | head | buffers
    head       a JSON object; an answer with "error" says in a sentence why there is no other, and
               "lacks" what the machine lacked: "time", "something", or "" if it is not the cause;
               "passed" in a question are the numbers of open files that came with its first byte,
               and are closed after the answer
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from splitup.core.errors import SplitUpError, TooSlow, Unavailable
from splitup.sandbox.lifeline import end_with_peer

HEAD: Final = struct.Struct("<II")
_MAX_FILES: Final = 253  # of one message; Linux passes on as many

Buffers = Sequence[bytes | memoryview]
Answer = tuple[Mapping[str, Any], Buffers]


def serve(answer: Callable[[Mapping[str, Any], Sequence[memoryview]], Answer]) -> None:
    """Answer the parent's questions until it closes its end; a SplitUpError becomes an error.

    What libraries print goes to standard error.
    """
    with socket.socket(fileno=os.dup(0)) as parent:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # a fork that compiles must not speak for this process
        os.close(nothing)
        os.dup2(2, 1)
        end_with_peer(parent.fileno())
        while (question := _receive_question(parent)) is not None:
            head, buffers = question
            said: Mapping[str, Any]
            made: Buffers
            try:
                said, made = answer(head, buffers)
            except SplitUpError as error:
                said, made = {"error": str(error), "lacks": _describe_lack(error)}, ()
            finally:
                for number in head.get("passed", ()):
                    os.close(number)
            for part in encode_message(said, made):
                parent.sendall(part)


def _receive_question(parent: socket.socket) -> tuple[dict[str, Any], list[memoryview]] | None:
    """Return the next question, None at the end."""
    start, files, _, _ = socket.recv_fds(parent, HEAD.size, _MAX_FILES)
    if not start:
        return None
    head_bytes, count = HEAD.unpack(start + _receive(parent, HEAD.size - len(start)))
    sizes = struct.unpack(f"<{count}Q", _receive(parent, 8 * count))
    head = json.loads(bytes(_receive(parent, head_bytes)))
    if files:
        head["passed"] = files
    return head, [_receive(parent, size) for size in sizes]


def _receive(parent: socket.socket, length: int) -> memoryview:
    view, received = memoryview(bytearray(length)), 0
    while received < length:
        count = parent.recv_into(view[received:])
        if not count:
            raise EOFError("the parent ended in the middle of a question")
        received += count
    return view


def _describe_lack(error: SplitUpError) -> str:
    if isinstance(error, TooSlow):
        return "time"
    return "something" if isinstance(error, Unavailable) else ""


def encode_message(head: Mapping[str, Any], buffers: Buffers) -> list[bytes | memoryview]:
    """Return the parts of a message."""
    text = json.dumps(head).encode()
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return [HEAD.pack(len(text), len(buffers)) + sizes + text, *buffers]
