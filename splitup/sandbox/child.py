"""A confined child process: its parent starts it, and asks it to compute.

One question is answered after the other, in messages of ``splitup.sandbox.serving``. The parent
trusts no answer: it may be of any form and size, or missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from splitup.core.codec import parse_json
from splitup.core.errors import SplitUpError, TooSlow, Unavailable
from splitup.core.limits import MIB
from splitup.sandbox.serving import HEAD, Buffers, encode_message

_MAX_HEAD_BYTES: Final = 1 * MIB
_MAX_BUFFERS: Final = 1_024
_MAX_COMPLAINT_BYTES: Final = 64 * 1024  # as much as a pipe holds
_MAX_COMPLAINT_CHARS: Final = 300
_PROCESSORS: Final = os.cpu_count() or 1
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_LAST_WORDS_S: Final = 1.0  # for a child that has closed its end
_PASSED_ENVIRONMENT: Final = (  # what compilers and drivers need; nothing else is passed on
    *("PATH", "LANG", "CC", "LLVM_PATH", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"),
    *("NVRTC_PATH", "NVJITLINK_PATH", "WEBGPU_PATH", "VK_ICD_FILENAMES", "OCL_ICD_VENDORS"),
    *("VIRTUAL_ENV", "PYTHONPATH"),
)

R = TypeVar("R")


def make_environment(scratch: Path, device: str = "") -> dict[str, str]:
    """Return the environment of a confined child that opens ``device``, by default DEV's.

    The driver of a GPU may write into ``scratch``.
    """
    environment = {n: os.environ[n] for n in _PASSED_ENVIRONMENT if n in os.environ}
    environment |= {"HOME": str(scratch), "TMPDIR": str(scratch)}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy computes nothing large here
    # glibc: memory that a thread frees, such as one that loads tasks, goes back to the system
    environment["MALLOC_ARENA_MAX"] = "1"
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA:0 is what nvidia-smi calls 0
    if device := (device or os.environ.get("DEV", "")):
        environment["DEV"] = device
    return environment


def make_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this installation, whatever the current folder."""
    return (sys.executable, "-P", "-m", module, *arguments)


@contextlib.contextmanager
def open_files(paths: Sequence[Path]) -> Iterator[list[int]]:
    """Open files for a child to inherit."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(path.open("rb")).fileno() for path in paths]


class ChildDied(Unavailable):
    """The child ended, or was killed because it did not answer in time or in form."""


class ChildFailed(SplitUpError):
    """The child refused a question; it is still running."""


class _Patience:
    """How long a child may still take, but for the time in which others have the processors.

    What it computes itself counts, on threads of its own too: they may keep its first one waiting.
    """

    def __init__(self, pid: int, seconds: float) -> None:
        self._directory = Path(f"/proc/{pid}")
        self._seconds, self._began_s = seconds, time.monotonic()
        self._queued_s, self._used_s = self._read_queued_s(), self._read_used_s()

    def compute_left_s(self) -> float:
        waited_s = time.monotonic() - self._began_s - (self._read_queued_s() - self._queued_s)
        used_s = (self._read_used_s() - self._used_s) / _PROCESSORS
        return self._seconds - max(waited_s, used_s)

    def _read_queued_s(self) -> float:
        """Return how long the child has been ready to run while others did; 0 if unknown."""
        return int(self._read("schedstat", "0 0").split()[1]) / 1e9

    def _read_used_s(self) -> float:
        """Return the processor time of the child; 0 if unknown."""
        fields = self._read("stat", "").rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / _TICKS_PER_S

    def _read(self, name: str, otherwise: str) -> str:
        try:
            return (self._directory / name).read_text()
        except OSError:
            return otherwise


class Child:
    """The parent's side of one child. Several threads may ask."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        files: Sequence[int] = (),
        device: str = "",
    ) -> None:
        """Start a module, with ``files`` open under the same numbers and ``device`` as its DEV."""
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="splitup-"))
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            with theirs:
                process = subprocess.Popen(
                    make_command(module, *arguments),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    pass_fds=files,
                    env=make_environment(Path(scratch), device),
                    start_new_session=True,
                )
            self._end = weakref.finalize(self, _end, process, stack.pop_all())
        self._process = process
        self._socket = ours
        self._turn = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "child")

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return whether it can be asked."""
        return self._end.alive

    def ask(
        self,
        question: Mapping[str, Any],
        buffers: Buffers = (),
        *,
        timeout_s: float,
        max_bytes: int,
        files: Sequence[int] = (),
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the answer, with buffers of at most ``max_bytes`` in all; blocks.

        The child gets copies of open ``files``. Raises ChildFailed when the child refuses, TooSlow
        or Unavailable when it says that the machine was the reason, and ChildDied when it ends,
        when it does not answer in ``timeout_s`` or when its answer has another form; the child is
        dead then. The time in which it waits for a processor does not count.
        """
        with self._turn:
            if not self.is_running:
                raise ChildDied("its process has ended")
            try:
                patience = _Patience(self.pid, timeout_s)
                self._send(encode_message(question, buffers), patience, files)
                head, found = self._receive_answer(max_bytes, patience)
            except TimeoutError:
                self._end()
                raise ChildDied(f"no answer within {timeout_s:g} s") from None
            except (OSError, EOFError):
                raise ChildDied(self._describe_end()) from None
            except (ValueError, SplitUpError) as error:
                self._end()
                raise ChildDied(f"its answer cannot be read: {error}") from None
        if "error" in head:
            raise _find_error_type(head.get("lacks"))(str(head["error"])[:_MAX_COMPLAINT_CHARS])
        return head, found

    async def ask_apart(
        self,
        question: Mapping[str, Any],
        buffers: Buffers = (),
        *,
        timeout_s: float,
        max_bytes: int,
        files: Sequence[int] = (),
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Do the same on the child's thread. Whoever is cancelled leaves the child running."""
        return await self.run_apart(
            lambda: self.ask(
                question, buffers, timeout_s=timeout_s, max_bytes=max_bytes, files=files
            )
        )

    async def run_apart(self, call: Callable[[], R]) -> R:
        """Make a call that asks this child on a thread of its own, where it delays nobody else.

        Raises ChildDied when the child has ended.
        """
        if not self.is_running:
            raise ChildDied("its process has ended")
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Kill the child, and what it started. Whoever is asking gets ChildDied."""
        self._end()
        self._thread.shutdown(wait=False)

    def _send(self, parts: Buffers, patience: _Patience, files: Sequence[int]) -> None:
        for place, part in enumerate(parts):
            left, passed = memoryview(part), files if not place else ()
            while left:
                sent = self._try(patience, partial(socket.send_fds, self._socket, [left], passed))
                left, passed = left[sent:], ()

    def _receive_answer(
        self, max_bytes: int, patience: _Patience
    ) -> tuple[dict[str, Any], list[memoryview]]:
        head_bytes, count = HEAD.unpack(self._receive(HEAD.size, patience))
        if head_bytes > _MAX_HEAD_BYTES or count > _MAX_BUFFERS:
            raise ValueError(f"it has {head_bytes} bytes and {count} buffers")
        sizes = struct.unpack(f"<{count}Q", self._receive(8 * count, patience))
        if sum(sizes) > max_bytes:
            raise ValueError(f"it has {sum(sizes)} bytes; the limit is {max_bytes}")
        head = parse_json(bytes(self._receive(head_bytes, patience)))
        if not isinstance(head, dict):
            raise ValueError("it is no object")
        return head, [self._receive(size, patience) for size in sizes]

    def _receive(self, length: int, patience: _Patience) -> memoryview:
        view, received = memoryview(bytearray(length)), 0
        while received < length:
            count = self._try(patience, partial(self._socket.recv_into, view[received:]))
            if not count:
                raise EOFError
            received += count
        return view

    def _try(self, patience: _Patience, call: Callable[[], int]) -> int:
        """Make one call of the socket. Raises TimeoutError."""
        while (left_s := patience.compute_left_s()) > 0:
            self._socket.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                return call()
        raise TimeoutError

    def _describe_end(self) -> str:
        """Kill what is left; return how it ended, and the last line that it wrote."""
        if not self.is_running:
            return "it was closed"
        assert self._process.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        _kill(self._process)
        os.set_blocking(self._process.stderr.fileno(), False)
        words = self._process.stderr.read(_MAX_COMPLAINT_BYTES) or b""
        last = words.decode(errors="replace").strip().rpartition("\n")[2]
        self._end()
        return f"its process ended with status {self._process.returncode}: " + (
            last[-_MAX_COMPLAINT_CHARS:] or "it wrote nothing"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(process: subprocess.Popen[bytes], rest: contextlib.ExitStack) -> None:
    _kill(process)
    assert process.stderr is not None
    process.stderr.close()
    rest.close()


def _find_error_type(lacks: object) -> type[SplitUpError]:
    if lacks == "time":
        return TooSlow
    return Unavailable if lacks == "something" else ChildFailed
