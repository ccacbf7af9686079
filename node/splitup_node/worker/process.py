"""The process that owns the device: loads tasks, keeps them and their states in memory, runs steps.

It is confined (``splitup.sandbox``): no network, no keys, no files except libraries, the device's
and the weights that it is handed open. It answers one request after the other over the socket that
it inherited, and ends when that closes. A task comes compiled
(``splitup.backend.compiler.compile_server``) and is loaded on a thread, so that steps run
meanwhile. Whatever a task does, at worst this process dies, and the daemon survives that.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, BinaryIO, Final, NoReturn

from splitup.core import tuning
from splitup.core.errors import InvalidInput, SplitUpError, Unavailable
from splitup.core.garbage_collection import pause_garbage_collection
from splitup.sandbox.confinement import confine
from splitup.sandbox.lifeline import end_with_peer
from splitup_node.worker.ipc import (
    HEADER,
    LoadRequest,
    QuestionKind,
    RunAnswer,
    RunRequest,
    decode_load,
    decode_runs,
    describe_failure,
    encode_answers,
    encode_message,
)

_SWITCH_S: Final = 0.001  # a step waits this long for the thread that loads a task


class Worker:
    """Programs and states on one device, within ``memory_bytes``."""

    runs_together = True

    def __init__(
        self,
        memory_bytes: int,
        *,
        device_index: int = 0,
        threads: int = 1,
        lacks: Sequence[str] = (),
    ) -> None:
        """``lacks`` are the sentences of ``confine``."""
        with pause_garbage_collection():
            from splitup.backend import runtime  # imports tinygrad, which takes half a second

        self._runtime = runtime
        self._options: dict[str, Any] = {"device_index": device_index, "threads": threads}
        self._lacks = lacks
        self._memory_bytes = memory_bytes
        self._programs: dict[int, Any] = {}
        self._next_program = 0
        self._states: dict[int, tuple[int, Any]] = {}  # session -> (program, state)
        self._state_bytes = 0
        self._probe: Any = None
        self.has_failed = False  # since the device was last known to answer

    def describe(self) -> dict[str, str]:
        """Return a report of the device, and in "sandbox" what this process's lacks."""
        report: dict[str, str] = self._runtime.describe_device(
            self._options["device_index"]
        ).to_dict()
        self._probe = self._runtime.DeviceProbe(self._options["device_index"])
        return {**report, "sandbox": "; ".join(self._lacks)}

    def find_loss(self) -> str:
        """Return why the device is of no more use; "" if it is, or nothing has failed meanwhile."""
        has_failed, self.has_failed = self.has_failed, False
        return self._probe.find_loss() if has_failed and self._probe is not None else ""

    def load(
        self,
        wanted: LoadRequest,
        weights: BinaryIO | None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Any:
        """Return the program of a task, run once; other threads may use the worker.

        The daemon has checked the digests of graph and weights, and has the graph compiled.
        """
        return self._runtime.TaskProgram(
            wanted.graph,
            weights,
            kernels=wanted.kernels,
            memory_bytes=min(wanted.memory_bytes, self._memory_bytes),
            gate=wanted.gate,
            on_progress=on_progress,
            **self._options,
        )

    def add(self, program: Any) -> dict[str, Any]:
        """Give a loaded program its number; return what the daemon needs to know of it."""
        number = self._next_program
        self._next_program += 1
        self._programs[number] = program
        return {
            "program": number,
            "task_id": program.task_id,
            "vram_bytes": program.vram_bytes,
            "state_bytes": program.state_bytes,
            "width": program.width if self.runs_together else 1,
            "merges": program.merges and self.runs_together,
            "longest_s": program.longest_s,
        }

    def unload(self, number: int) -> None:
        """Free a program's memory and that of its sessions; its number is not used again."""
        self._find_program(number)
        self.drop([session for session, known in self._states.items() if known[0] == number])
        del self._programs[number]
        self._runtime.free_memory(self._options["device_index"])

    def run(self, request: RunRequest) -> RunAnswer:
        """Run one step in a session; the state is zero at the first step."""
        program, state = self._get_state(request)
        started_ns = time.time_ns()
        outputs = self.compute(program, state, request.inputs)
        return RunAnswer(started_ns, time.time_ns(), outputs)

    def run_all(self, requests: Sequence[RunRequest]) -> list[RunAnswer | Exception]:
        """Run one step of one program in each session, as many of them at once as fit.

        The failure of one step does not affect the others. Several requests of one session alone
        are consecutive steps: behind one that fails none is run.
        """
        if len(requests) == 1:
            return [self._try_run(requests[0])]
        if len({request.session for request in requests}) == 1:
            return self._run_in_order(requests)
        answers: dict[int, RunAnswer | Exception] = {}
        group: dict[int, tuple[Any, dict[str, int]]] = {}  # by request: state, rows
        for index, request in enumerate(requests):
            try:
                program, state = self._get_state(request)
                rows = program.check(state, request.inputs)
            except SplitUpError as error:
                answers[index] = error
                continue
            if group and not program.fits([*(count for _, count in group.values()), rows]):
                answers |= self._run_group(requests, group)
                group = {}
            group[index] = (state, rows)
        answers |= self._run_group(requests, group)
        return [answers[index] for index in range(len(requests))]

    def _run_in_order(self, requests: Sequence[RunRequest]) -> list[RunAnswer | Exception]:
        program, state = self._get_state(requests[0])
        started_ns = time.time_ns()
        try:
            results = program.run_in_order(state, [request.inputs for request in requests])
        except InvalidInput:  # nothing has run; the steps before the wrong one are good
            answers: list[RunAnswer | Exception] = []
            for request in requests:
                failed = answers and isinstance(answers[-1], Exception)
                answers.append(answers[-1] if failed else self._try_run(request))
            return answers
        ended_ns = time.time_ns()
        return [RunAnswer(started_ns, ended_ns, outputs) for outputs in results]

    def _run_group(
        self, requests: Sequence[RunRequest], group: Mapping[int, tuple[Any, dict[str, int]]]
    ) -> dict[int, RunAnswer | Exception]:
        if len(group) > 1:
            program = self._programs[requests[next(iter(group))].program]
            steps = [(state, requests[index].inputs) for index, (state, _) in group.items()]
            started_ns = time.time_ns()
            with suppress(Exception):  # no state has advanced, so each can be tried alone
                outputs = program.run_together(steps)
                ended_ns = time.time_ns()
                return {
                    index: RunAnswer(started_ns, ended_ns, own)
                    for index, own in zip(group, outputs, strict=True)
                }
        return {index: self._try_run(requests[index]) for index in group}

    def _try_run(self, request: RunRequest) -> RunAnswer | Exception:
        try:
            return self.run(request)
        except SplitUpError as error:
            return error
        except Exception as error:  # tinygrad raises anything; the daemon decides what it means
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self.has_failed = True
            return error

    def _get_state(self, request: RunRequest) -> tuple[Any, Any]:
        """Return a session's program and state; the first step creates the state."""
        program = self._find_program(request.program)
        known = self._states.get(request.session)
        if known is None:
            self._reserve(program)
            known = self._states[request.session] = (request.program, program.new_state())
            self._state_bytes += program.state_bytes
        elif known[0] != request.program:
            raise InvalidInput(f"session {request.session} belongs to another program")
        return program, known[1]

    def _find_program(self, number: int) -> Any:
        if number not in self._programs:
            raise InvalidInput(f"program {number} is not loaded")
        return self._programs[number]

    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        """Return the outputs of one step."""
        outputs: Sequence[bytes] = program.run(state, inputs)
        return outputs

    def digest_state(self, session: int) -> bytes:
        """Return the SHA-256 of a session's state tensors as they are now."""
        known = self._states.get(session)
        if known is None:
            raise InvalidInput(f"session {session} holds no state")
        return bytes.fromhex(self._programs[known[0]].compute_state_digest(known[1]))

    def drop(self, sessions: Sequence[int]) -> None:
        """Free the state of sessions; unknown ones are fine."""
        for session in sessions:
            known = self._states.pop(session, None)
            if known is not None:
                program = self._programs[known[0]]
                self._state_bytes -= program.state_bytes
                program.take_back(known[1])

    def _reserve(self, program: Any) -> None:
        if len(self._states) >= tuning.MAX_SESSIONS:
            raise Unavailable(
                f"the node holds {len(self._states)} states already, which is the limit"
            )
        state_bytes, programs = program.state_bytes, self._programs.values()
        fixed = sum(one.vram_bytes - one.state_bytes for one in programs)
        spare = sum(one.spare_bytes for one in programs)
        new_bytes = 0 if program.spare_bytes else state_bytes
        if fixed + spare + self._state_bytes + new_bytes > self._memory_bytes:
            for one in programs:
                one.free_spare()
        if state_bytes and fixed + self._state_bytes + state_bytes > self._memory_bytes:
            raise Unavailable(
                f"no memory for another state of {state_bytes} bytes: {fixed} bytes of tasks and "
                f"{self._state_bytes} bytes of states are in memory; the limit is "
                f"{self._memory_bytes}"
            )


def serve(worker: Worker, stream: socket.socket, files: socket.socket) -> None:
    """Answer requests until the daemon closes its end, those of steps while a task is loading.

    Open files arrive over ``files``. It ends, too, when the device does not answer any more.
    """
    loader = _Loader(worker)
    sources: list[socket.socket | _Loader] = [stream, loader]
    while not (loss := worker.find_loss()):
        ready = select.select(sources, [], [])[0]
        if loader in ready:
            _tell_of_load(worker, stream, *loader.pop())  # a program is kept by nobody else
        if stream not in ready:
            continue
        head = _receive(stream, HEADER.size)
        if head is None:
            return
        length, kind, request_id = HEADER.unpack(head)
        body = _receive(stream, length)
        if body is None:
            return
        if kind == QuestionKind.LOAD:
            wanted, has_weights = decode_load(body)
            loader.start(request_id, wanted, _receive_file(files) if has_weights else None)
        else:
            _reply(worker, stream, kind, request_id, functools.partial(_answer, worker, kind, body))
    print(loss, file=sys.stderr, flush=True)
    _send(stream, encode_message(QuestionKind.LOST, 0, [loss.encode()]))


def _reply(
    worker: Worker,
    stream: socket.socket,
    kind: int,
    request_id: int,
    answer: Callable[[], Sequence[bytes | memoryview]],
) -> None:
    """Send an answer, or why there is none."""
    try:
        parts = answer()
    except SplitUpError as error:
        kind, parts = QuestionKind.FAILED, [str(error).encode()]
    except Exception as error:  # tinygrad raises anything; the daemon decides what it means
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        worker.has_failed = True
        kind, parts = QuestionKind.FAILED, [describe_failure(error).encode()]
    _send(stream, encode_message(QuestionKind(kind), request_id, parts))


_GetProgram = Callable[[], Any]  # returns a program, or raises why there is none


class _Loader:
    """Loads tasks one after the other on a thread, while steps run."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._wanted: SimpleQueue[tuple[int, LoadRequest, BinaryIO | None]] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, _GetProgram | None]] = SimpleQueue()
        self._reader, self._writer = os.pipe()
        # nobody waits for it when the worker ends
        threading.Thread(target=self._load_all, name="loader", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that can be read when there is something to ``pop``."""
        return self._reader

    def start(self, request_id: int, wanted: LoadRequest, weights: BinaryIO | None) -> None:
        """Load a task, after those that were started before."""
        self._wanted.put((request_id, wanted, weights))

    def pop(self) -> tuple[int, _GetProgram | None]:
        """Return a request that is done, or that goes on (None)."""
        os.read(self._reader, 1)
        return self._done.get()

    def _load_all(self) -> None:
        while True:
            request_id, wanted, weights = self._wanted.get()
            tell = functools.partial(self._tell, request_id)
            tell(self._load(wanted, weights, functools.partial(tell, None)))

    def _tell(self, request_id: int, get_program: _GetProgram | None) -> None:
        self._done.put((request_id, get_program))
        os.write(self._writer, b"\0")

    def _load(
        self, wanted: LoadRequest, weights: BinaryIO | None, on_progress: Callable[[], None]
    ) -> _GetProgram:
        try:
            program = self._worker.load(wanted, weights, on_progress)
        except Exception as error:
            return functools.partial(_raise, error)
        return lambda: program


def _raise(error: Exception) -> NoReturn:
    raise error


def _tell_of_load(
    worker: Worker, stream: socket.socket, request_id: int, get_program: _GetProgram | None
) -> None:
    if get_program is None:
        _send(stream, encode_message(QuestionKind.PROGRESS, request_id, []))
        return

    def answer() -> Sequence[bytes]:
        return [json.dumps(worker.add(get_program())).encode()]

    _reply(worker, stream, QuestionKind.LOAD, request_id, answer)


def _answer(worker: Worker, kind: int, body: memoryview) -> Sequence[bytes | memoryview]:
    if kind == QuestionKind.RUN:
        return encode_answers(worker.run_all(decode_runs(body)))
    if kind == QuestionKind.DROP:
        worker.drop(struct.unpack(f"<{len(body) // 8}Q", body))
        return []
    if kind == QuestionKind.STATE:
        return [worker.digest_state(struct.unpack("<Q", body)[0])]
    if kind == QuestionKind.UNLOAD:
        worker.unload(struct.unpack("<Q", body)[0])
        return []
    return [json.dumps(worker.describe()).encode()]


def _receive_file(files: socket.socket) -> BinaryIO:
    _, (file,), _, _ = socket.recv_fds(files, 1, 1)
    return os.fdopen(file, "rb")


def _receive(stream: socket.socket, length: int) -> memoryview | None:
    """Return exactly ``length`` bytes, None at the end of the stream."""
    view = memoryview(bytearray(length))
    received = 0
    while received < length:
        count = stream.recv_into(view[received:])
        if not count:
            return None
        received += count
    return view


def _send(stream: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    sent = stream.sendmsg(buffers)
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
            continue
        stream.sendall(memoryview(buffer)[sent:])
        sent = 0


def main(argv: Sequence[str] | None = None, worker_class: type[Worker] = Worker) -> None:
    """Run a worker on two inherited sockets within ``--memory`` bytes.

    Requests come over ``--fd``, open files over ``--files``.
    """
    parser = argparse.ArgumentParser(prog="splitup-node-worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--files", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    lacks = confine(os.environ.get("DEV", ""))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon handles Ctrl-C and closes the socket
    sys.setswitchinterval(_SWITCH_S)
    end_with_peer(arguments.fd)
    with (
        socket.socket(fileno=arguments.fd) as stream,
        socket.socket(fileno=arguments.files) as files,
    ):
        worker = worker_class(
            arguments.memory,
            device_index=arguments.device_index,
            threads=arguments.threads,
            lacks=lacks,
        )
        serve(worker, stream, files)


if __name__ == "__main__":
    main()
