"""Starts one worker process and talks to it; survives its crash, hang and lack of memory.

Answers arrive in the event loop's own callback, so that a finished run leads to the next one, and
to the frames with its outputs, without a task switch. When the worker dies, every pending request
fails with ``WorkerLost`` and the states it held are lost. The daemon then starts another worker and
loads the tasks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from splitup.backend.compiler import compile_server
from splitup.backend.compiler.compile_server import CompileServer
from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.core import tuning
from splitup.core.codec import parse_json
from splitup.core.errors import InvalidModel, SplitUpError, Unavailable
from splitup.core.files import follow_no_link
from splitup.sandbox.child import make_command, make_environment
from splitup.sandbox.warm_child import WarmChild
from splitup_node.worker.ipc import (
    HEADER,
    LoadRequest,
    QuestionKind,
    RunAnswer,
    RunRequest,
    decode_answers,
    encode_load,
    encode_message,
    encode_runs,
)

WORKER_ARGV: Final = make_command("splitup_node.worker.process")

_log = logging.getLogger("splitup.node.worker")


class WorkerLost(Unavailable):
    """The worker process died or was killed; the states it held are gone."""


class TaskFailed(SplitUpError):
    """The worker refused or failed a request; it is still running."""


def parse_device(text: str) -> tuple[str, int]:
    """Split "CUDA:1" or "CPU:0:X86" into what tinygrad's DEV takes and the device's number."""
    name, *rest = text.split(":")
    if rest and rest[0].isdigit():
        return ":".join([name, *rest[1:]]), int(rest[0])
    return text, 0


BatchHandler = Callable[[Sequence[RunAnswer | SplitUpError]], None]
A = TypeVar("A")
_Handler = Callable[[memoryview | SplitUpError], None]


def fulfil(future: asyncio.Future[A], answer: A | SplitUpError) -> None:
    """Hand an answer to whoever waits for it, unless nobody does any more."""
    if future.done():
        return
    if isinstance(answer, SplitUpError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


@dataclass(slots=True)
class _Pending:
    kind: QuestionKind
    handler: _Handler
    timeout_s: float


class Supervisor:
    """One worker process. Requests are answered in order, but for loads; one run is in flight."""

    def __init__(
        self,
        directory: Path,
        *,
        memory_bytes: int,
        device: str = "",
        threads: int = 1,
        name: str = "worker",
        cache_directory: Path | None = None,
        worker_argv: Sequence[str] = WORKER_ARGV,
        run_timeout_s: float = tuning.RUN_TIMEOUT_S,
    ) -> None:
        self._directory = directory
        self.memory_bytes = memory_bytes
        self._device, self._device_index = parse_device(device)
        self._threads = threads
        self._name = name  # of the log file
        self._worker_argv = tuple(worker_argv)
        self._run_timeout_s = run_timeout_s
        cache = KernelCache(cache_directory or directory / "kernels")
        compiler = WarmChild(compile_server.MODULE, self._device)
        self._compiler = CompileServer(compiler, self._device_index, cache)
        self._process: asyncio.subprocess.Process | None = None
        self._connection: _Connection | None = None
        self.is_running = False  # requests can be sent
        self._files: socket.socket | None = None  # hands open files to the worker
        self._resources = contextlib.ExitStack()  # of the present worker
        self._pending: dict[int, _Pending] = {}  # in the order of the answers
        self._loads: dict[int, _Pending] = {}  # answered when they are done
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when the timer fires
        self._due_s = 0.0  # when the oldest request must have been answered
        self._next_id = 0
        self._loaded: dict[int, dict[str, Any]] = {}  # by program: what the worker said of it
        self.limit_s = run_timeout_s  # without an answer: the worker then counts as hung
        self._freeing: asyncio.Task[None] | None = None  # a load that was cancelled, as it ends
        self._load_moves = 0  # answers and progress of loads so far
        self._lost: asyncio.Event = asyncio.Event()
        self._closing = False
        self.restarts = 0
        self.problem = ""  # why there is no worker
        self.report: dict[str, str] = {}  # the device report of the present worker

    @property
    def pid(self) -> int | None:
        """Return the worker's process id, None when there is none."""
        return None if self._process is None else self._process.pid

    def _set_limit(self) -> None:
        """Decide after how long without an answer the worker counts as hung.

        Tasks need very different times, and so do machines: the longest step that one of the loaded
        tasks can take, as measured when it was loaded, counts ``RUN_FACTOR`` times.
        """
        longest_s = max((one["longest_s"] for one in self._loaded.values()), default=0.0)
        self.limit_s = max(self._run_timeout_s, tuning.RUN_FACTOR * longest_s)

    async def start(self) -> dict[str, str]:
        """Start a worker and return its device report. Raises WorkerLost, TaskFailed."""
        try:
            await self._spawn()
        except OSError as error:  # no memory for another process, no descriptor, no disk
            self._lost.set()
            self.problem = f"no worker can be started ({error.strerror or error})"
            raise WorkerLost(self.problem) from None
        report: dict[str, str] = parse_json(
            bytes(await self._ask(QuestionKind.DESCRIBE, [], tuning.LOAD_QUIET_S))
        )
        self.report = report
        self.problem = ""
        return report

    async def wait_lost(self) -> None:
        """Wait until the worker is gone."""
        await self._lost.wait()

    async def restart(self) -> dict[str, str]:
        """Start another worker after the last one was lost. Raises WorkerLost."""
        await self._reap()
        self.restarts += 1
        try:
            return await self.start()
        except TaskFailed as error:
            self.kill(f"it cannot use its device: {error}")
            raise WorkerLost(str(error)) from None

    async def load(
        self,
        task: Path,
        weights: Path | None,
        memory_bytes: int | None = None,
        gate: int | None = None,
    ) -> dict[str, Any]:
        """Load a task; returns program, task_id, vram_bytes, state_bytes and width.

        Raises TaskFailed for a task that needs more than ``memory_bytes``, or than the worker has,
        and for one that ``gate`` does not shut. Raises WorkerLost.
        """
        memory_bytes = min(memory_bytes or self.memory_bytes, self.memory_bytes)
        graph = await asyncio.to_thread(task.read_bytes)
        if self._connection is None:
            raise WorkerLost("the worker is not running")
        try:
            kernels = await self._compiler.find(graph, self.report, memory_bytes, gate)
        except (InvalidModel, Unavailable) as error:
            raise TaskFailed(str(error)) from None
        if weights is not None and self._files is not None:
            with weights.open("rb") as file, contextlib.suppress(OSError):  # the worker is gone
                socket.send_fds(self._files, [b"\0"], [file.fileno()])
        request = LoadRequest(graph, kernels, memory_bytes, gate)
        body = encode_load(request, has_weights=weights is not None)
        if self._freeing is not None:
            await asyncio.wait({self._freeing})
        loading = asyncio.create_task(
            self._await_load(self._ask(QuestionKind.LOAD, body, 0.0), task)
        )
        try:
            loaded = await asyncio.shield(loading)
        except asyncio.CancelledError:  # the worker goes on with it
            self._freeing = asyncio.create_task(self._free(loading))
            raise
        self._loaded[loaded["program"]] = loaded
        self._set_limit()
        return loaded

    async def _await_load(self, asked: asyncio.Future[memoryview], task: Path) -> dict[str, Any]:
        """Return the answer to a load, however long it takes while parts of it get done."""
        while not asked.done():
            moves = self._load_moves
            await asyncio.wait({asked}, timeout=tuning.LOAD_QUIET_S)
            if not asked.done() and self._load_moves == moves:
                self.kill(f"a LOAD made no progress for {tuning.LOAD_QUIET_S:g} s")
                asked.add_done_callback(lambda lost: lost.exception())  # ours says more
                raise WorkerLost(f"the worker was killed while it loaded {task}")
        loaded: dict[str, Any] = parse_json(bytes(asked.result()))
        return loaded

    async def _free(self, loading: asyncio.Task[dict[str, Any]]) -> None:
        """Free a task once it is loaded, since nobody waits for it any more."""
        with contextlib.suppress(SplitUpError):
            await self.unload((await loading)["program"])

    async def unload(self, program: int) -> None:
        """Free a program after its runs that wait. Raises TaskFailed or WorkerLost."""
        await self._ask(QuestionKind.UNLOAD, [struct.pack("<Q", program)], self.limit_s)
        self._loaded.pop(program, None)
        self._set_limit()

    def get_width(self, program: int) -> int:
        """Return how many runs of a program, in different sessions, fit into one batch."""
        width: int = self._loaded[program]["width"]
        return width

    def merges(self, program: int) -> bool:
        """Return whether consecutive steps of one session can run in one pass."""
        return program in self._loaded and bool(self._loaded[program]["merges"])

    def run_together(self, requests: Sequence[RunRequest], handler: BatchHandler) -> None:
        """Send runs of one program: of several sessions, or consecutive ones of a session.

        ``handler`` is called later, with the answer, TaskFailed or WorkerLost of each, in order.
        """

        def on_answer(answer: memoryview | SplitUpError) -> None:
            if isinstance(answer, SplitUpError):
                handler([answer] * len(requests))
            else:
                handler(decode_answers(answer, TaskFailed))

        timeout_s = self.limit_s * len(requests)  # they may have to run one by one
        self._send(QuestionKind.RUN, encode_runs(requests), timeout_s, on_answer)

    async def digest_state(self, session: int) -> str:
        """Return the SHA-256 of a session's state, in hex. Raises TaskFailed or WorkerLost."""
        answer = await self._ask(QuestionKind.STATE, [struct.pack("<Q", session)], self.limit_s)
        return bytes(answer).hex()

    def drop(self, sessions: Sequence[int]) -> None:
        """Free the states of sessions; does not wait for the answer."""
        if self._connection is not None and sessions:
            body = struct.pack(f"<{len(sessions)}Q", *sessions)
            self._send(QuestionKind.DROP, [body], self.limit_s, lambda answer: None)

    def kill(self, reason: str) -> None:
        """Kill the worker; its pending requests fail with ``reason``."""
        _log.warning("killing the worker: %s", reason)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._connection is not None:
            self._connection.transport.abort()
        self._on_lost(reason)

    async def close(self) -> None:
        """Let the worker finish its request, then end it."""
        self._closing = True
        if self._connection is not None:
            self._connection.transport.abort()
        await self._reap()
        self._compiler.close()
        self._resources.close()

    async def _spawn(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._files, files = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._resources.close()
        self._resources.enter_context(self._files)
        scratch = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="splitup-"))
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            with theirs, files:
                await self._connect(ours, theirs, files, Path(scratch))
            stack.pop_all()  # the transport closes it from now on

    async def _connect(
        self, ours: socket.socket, theirs: socket.socket, files: socket.socket, scratch: Path
    ) -> None:
        for end in (ours, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, tuning.WORKER_SOCKET_BYTES)
        ours.setblocking(False)
        self._lost.clear()
        self._loaded.clear()
        self._set_limit()
        with self._open_log() as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._worker_argv,
                f"--fd={theirs.fileno()}",
                f"--files={files.fileno()}",
                f"--memory={self.memory_bytes}",
                f"--device-index={self._device_index}",
                f"--threads={self._threads}",
                pass_fds=(theirs.fileno(), files.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=make_environment(scratch, self._device),
                start_new_session=True,  # keeps a terminal's Ctrl-C from it
            )
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_unix_connection(
            lambda: _Connection(self._on_message, self._on_lost), sock=ours
        )
        connection, self.is_running = self._connection, True

        def on_stopped() -> None:
            if self._connection is connection:
                self.kill("its process was stopped by a signal")

        _watch_stop(self._process.pid, on_stopped)

    def _open_log(self) -> BinaryIO:
        """Open the worker's log, from its end; one that has grown long begins again."""
        path = self._directory / f"{self._name}.log"
        is_long = path.exists() and path.stat().st_size > tuning.MAX_WORKER_LOG_BYTES
        return open(path, "wb" if is_long else "ab", opener=follow_no_link)

    def _ask(
        self, kind: QuestionKind, parts: Sequence[bytes | memoryview], timeout_s: float
    ) -> asyncio.Future[memoryview]:
        future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

        self._send(kind, parts, timeout_s, partial(fulfil, future))
        return future

    def _send(
        self,
        kind: QuestionKind,
        parts: Sequence[bytes | memoryview],
        timeout_s: float,
        handler: _Handler,
    ) -> None:
        if self._connection is None:
            asyncio.get_running_loop().call_soon(handler, WorkerLost("the worker is not running"))
            return
        self._next_id += 1
        pending = _Pending(kind, handler, timeout_s)
        if kind is QuestionKind.LOAD:
            self._loads[self._next_id] = pending
        else:
            self._pending[self._next_id] = pending
            if len(self._pending) == 1:
                self._start_timer()
        self._connection.transport.writelines(encode_message(kind, self._next_id, parts))

    def _start_timer(self) -> None:
        """Watch the oldest request from now on.

        One timer serves all requests: it is set again when it fires too early, which is cheaper
        than a timer for every run.
        """
        oldest = next(iter(self._pending.values()), None)
        if oldest is None:
            return
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + oldest.timeout_s
        if self._timer is None or self._due_s < self._timer_s:
            self._set_timer(self._due_s)

    def _set_timer(self, at_s: float) -> None:
        self._stop_timer()
        self._timer_s = at_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        oldest = next(iter(self._pending.values()), None)
        if oldest is None:
            return
        if asyncio.get_running_loop().time() < self._due_s:
            self._set_timer(self._due_s)
        else:
            self.kill(f"no answer to {oldest.kind.name} within {oldest.timeout_s:g} s")

    def _on_message(self, kind: int, request_id: int, body: memoryview) -> None:
        if kind == QuestionKind.LOST:
            self.kill(bytes(body).decode(errors="replace"))
            return
        self._load_moves += request_id in self._loads
        if kind == QuestionKind.PROGRESS:
            return
        pending = self._loads.pop(request_id, None)
        if pending is None:
            pending = self._pending.pop(request_id, None)
            if self._pending:
                self._start_timer()
        if pending is None:
            return
        if kind == QuestionKind.FAILED:
            pending.handler(TaskFailed(bytes(body).decode(errors="replace")))
        else:
            pending.handler(body)

    def _on_lost(self, reason: str) -> None:
        if self._connection is None:
            return
        self._connection, self.is_running = None, False
        self.problem = reason
        if not self._closing:
            _log.warning("the worker died: %s", reason)
        pending = [*self._pending.values(), *self._loads.values()]
        self._pending, self._loads = {}, {}
        self._stop_timer()
        for entry in pending:
            entry.handler(WorkerLost(f"the worker process died: {reason}"))
        self._lost.set()

    async def _reap(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(tuning.WORKER_STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _watch_stop(pid: int, on_stopped: Callable[[], None]) -> None:
    """Have ``on_stopped`` called when a child process is stopped: its silence alone tells it late.

    The kernel tells the parent at once. A thread waits for that, until the child ends.
    """
    if not hasattr(os, "waitid"):  # on macOS before Python 3.13
        return
    loop = asyncio.get_running_loop()

    def wait() -> None:
        # gone already, or the loop is closed
        with contextlib.suppress(ChildProcessError, RuntimeError):
            told = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if told is not None and told.si_code == os.CLD_STOPPED:
                loop.call_soon_threadsafe(on_stopped)

    threading.Thread(target=wait, name=f"stop of process {pid}", daemon=True).start()


class _Connection(asyncio.Protocol):
    """Splits the worker's bytes into messages."""

    def __init__(
        self,
        on_message: Callable[[int, int, memoryview], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._buffer = bytearray()
        self.transport: asyncio.Transport  # set before the connection is handed out

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length, kind, request_id = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            message, self._buffer = self._buffer, self._buffer[end:]
            self._on_message(kind, request_id, memoryview(message)[HEADER.size : end])

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(
            str(error) if error else "its process ended (out of memory, or a crash in a kernel)"
        )
