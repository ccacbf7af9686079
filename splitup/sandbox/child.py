"""A confined child process, and how its parent asks it to compute.

The child's module calls ``serve`` and gets open files and messages, nothing else. One question is
answered after the other. The parent believes the form of no answer.

    message    u32 bytes of the head | u32 buffers | per buffer: u64 bytes | head | buffers
    head       a JSON object; an answer with "error" says in a sentence why there is no other
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from splitup.core.codec import parse_json
from splitup.core.errors import SplitUpError, Unavailable
from splitup.core.limits import MIB

_HEAD: Final = struct.Struct("<II")
_MAX_HEAD_BYTES: Final = 1 * MIB
_MAX_BUFFERS: Final = 1_024
_MAX_COMPLAINT_CHARS: Final = 300
_PASSED_ENVIRONMENT: Final = (  # what compilers and drivers need; nothing else is passed on
    *("PATH", "LANG", "CC", "LLVM_PATH", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"),
    *("VIRTUAL_ENV", "PYTHONPATH"),
)

Buffers = Sequence[bytes | memoryview]
Answer = tuple[Mapping[str, Any], Buffers]


def make_environment(scratch: Path, device: str = "") -> dict[str, str]:
    """Return the environment of a confined child that opens ``device``, by default DEV's.

    The driver of a GPU may write into ``scratch``.
    """
    environment = {n: os.environ[n] for n in _PASSED_ENVIRONMENT if n in os.environ}
    environment |= {"HOME": str(scratch), "TMPDIR": str(scratch)}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy computes nothing large here
    if device := (device or os.environ.get("DEV", "")):
        environment["DEV"] = device
    return environment


def make_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this installation, whatever the current folder."""
    return (sys.executable, "-P", "-m", module, *arguments)


class ChildDied(Unavailable):
    """The child ended, or did not answer in time and was killed."""


class ChildFailed(SplitUpError):
    """The child refused a question; it is still running."""


@dataclass(slots=True)
class Child:
    """The parent's side of one child."""

    process: asyncio.subprocess.Process
    scratch: contextlib.ExitStack
    complaints: asyncio.Task[bytes]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str] = (),
        *,
        files: Sequence[int] = (),
        device: str = "",
    ) -> Child:
        """Start a module, with ``files`` open under the same numbers and ``device`` as its DEV."""
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="splitup-"))
            process = await asyncio.create_subprocess_exec(
                *make_command(module, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=files,
                env=make_environment(Path(scratch), device),
                start_new_session=True,
            )
            closing = stack.pop_all()
        assert process.stderr is not None
        return cls(process, closing, asyncio.create_task(_read_end(process.stderr)))

    async def ask(
        self,
        question: Mapping[str, Any],
        buffers: Buffers = (),
        *,
        timeout_s: float,
        max_bytes: int,
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the answer, with buffers of at most ``max_bytes`` in all.

        Raises ChildFailed when the child refuses, and ChildDied when it ends, when it does not
        answer in ``timeout_s`` or when its answer has another form; the child is dead then.
        """
        async with self.turn:
            try:
                async with asyncio.timeout(timeout_s):
                    head, found = await self._exchange(question, buffers, max_bytes)
            except TimeoutError:
                await self.close()
                raise ChildDied(f"no answer within {timeout_s:g} s") from None
            except (OSError, ValueError, asyncio.IncompleteReadError, SplitUpError) as error:
                await self.close()
                raise ChildDied(await self._describe_end(error)) from None
            except asyncio.CancelledError:
                await self.close()  # what it answers would be taken for the next answer
                raise
        if "error" in head:
            raise ChildFailed(str(head["error"])[:_MAX_COMPLAINT_CHARS])
        return head, found

    async def close(self) -> None:
        """Kill the child, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()
        await self.complaints
        self.scratch.close()

    async def _exchange(
        self, question: Mapping[str, Any], buffers: Buffers, max_bytes: int
    ) -> tuple[dict[str, Any], list[memoryview]]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.writelines(_encode(question, buffers))
        await stdin.drain()
        head_bytes, count = _HEAD.unpack(await stdout.readexactly(_HEAD.size))
        if head_bytes > _MAX_HEAD_BYTES or count > _MAX_BUFFERS:
            raise ValueError(f"its answer has {head_bytes} bytes and {count} buffers")
        sizes = struct.unpack(f"<{count}Q", await stdout.readexactly(8 * count))
        if sum(sizes) > max_bytes:
            raise ValueError(f"its answer has {sum(sizes)} bytes; the limit is {max_bytes}")
        head = parse_json(await stdout.readexactly(head_bytes))
        if not isinstance(head, dict):
            raise ValueError("its answer is no object")
        return head, [memoryview(await stdout.readexactly(size)) for size in sizes]

    async def _describe_end(self, error: Exception) -> str:
        status = self.process.returncode
        if isinstance(error, ValueError | SplitUpError):
            return str(error)
        last = (await self.complaints).decode(errors="replace").strip().rpartition("\n")[2]
        return f"its process ended with status {status}: {last[-_MAX_COMPLAINT_CHARS:]}"


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    """Return the last bytes of a stream that may be long."""
    end = b""
    while part := await stream.read(4096):
        end = (end + part)[-4096:]
    return end


def serve(answer: Callable[[Mapping[str, Any], Sequence[memoryview]], Answer]) -> None:
    """Answer the questions on standard input until it closes; a SplitUpError becomes an error.

    What libraries print goes to standard error.
    """
    with os.fdopen(os.dup(1), "wb") as output, os.fdopen(os.dup(0), "rb") as questions:
        os.dup2(2, 1)
        while (start := questions.read(_HEAD.size)) != b"":
            head, buffers = _read_question(questions, start)
            try:
                said, made = answer(head, buffers)
            except SplitUpError as error:
                said, made = {"error": str(error)}, ()
            for part in _encode(said, made):
                output.write(part)
            output.flush()


def _read_question(questions: BinaryIO, start: bytes) -> tuple[Mapping[str, Any], list[memoryview]]:
    head_bytes, count = _HEAD.unpack(start)
    sizes = struct.unpack(f"<{count}Q", questions.read(8 * count))
    head = json.loads(questions.read(head_bytes))
    return head, [memoryview(questions.read(size)) for size in sizes]


def _encode(head: Mapping[str, Any], buffers: Buffers) -> list[bytes | memoryview]:
    text = json.dumps(head).encode()
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return [_HEAD.pack(len(text), len(buffers)) + sizes + text, *buffers]


@contextlib.contextmanager
def open_files(paths: Sequence[Path]) -> Iterator[list[int]]:
    """Open files for a child to inherit."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(path.open("rb")).fileno() for path in paths]
