"""Check and compile a task in a process of its own, with a limit of CPU time and memory.

Strangers choose what a task makes the code generator do, and the rules of a legal graph only
predict how long that takes (``splitup.graph.compile_cost``). So a process is forked for each task.
It gets CPU time and memory by what is predicted, a lower priority, and returns the schedule as
bytes (``splitup.backend.compiler.schedule_bytes``). It runs no kernel, and nothing that compiling
leaves in memory stays in the process that serves steps. So tasks share no kernels: those of one
model take two to three times the CPU of compiling them together.

The process is forked and not started anew, which would cost a second of CPU for each task. It does
not touch the device.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from splitup.backend.compiler.schedule import Schedule, compile_graph
from splitup.backend.compiler.schedule_bytes import decode_schedule, encode_schedule
from splitup.backend.native_code import find_native_code
from splitup.core import tuning
from splitup.core.errors import InvalidModel, SplitUpError
from splitup.graph.rules import CheckedGraph

_DONE: Final = b"\0"
_REFUSED: Final = b"\1"
_READ_BYTES: Final = 1 << 20
_ERROR_CHARS: Final = 400
_NICE: Final = 2  # steps come first; with a lower priority a busy machine would give it no time


def compile_apart(
    load: Callable[[], CheckedGraph], device: str, *, uses_native_code: bool = True
) -> Schedule:
    """Return the schedule of the graph that ``load`` returns. The caller's thread waits.

    Raises InvalidModel when ``load`` does, when tinygrad cannot compile the graph, and when both
    together take too much time or memory.
    """
    native = find_native_code(device) if uses_native_code else None
    data = compile_to_bytes(load, device, uses_native_code=uses_native_code)
    return decode_schedule(data, native)


def compile_to_bytes(
    load: Callable[[], CheckedGraph], device: str, *, uses_native_code: bool = True
) -> bytes:
    """Do the same and return the schedule's bytes, which this process need not trust."""
    native = find_native_code(device) if uses_native_code else None
    used_bytes = _get_data_bytes()

    def work() -> bytes:
        graph = load()
        _limit(graph.compile_us, used_bytes)
        schedule = compile_graph(graph, device, uses_native_code=uses_native_code)
        return encode_schedule(schedule, native)

    return _run_apart(work, used_bytes)


def _run_apart(work: Callable[[], bytes], used_bytes: int | None) -> bytes:
    """Return what ``work`` returns in a forked process; raise InvalidModel if it does not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(work, writer, used_bytes)
    os.close(writer)
    answer = bytearray()
    try:
        while part := os.read(reader, _READ_BYTES):
            answer += part
    except BaseException:  # Ctrl-C
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    kind, rest = answer[:1], bytes(answer[1:])
    if kind == _DONE and status == 0:
        return rest
    if kind == _REFUSED:
        raise InvalidModel(rest.decode(errors="replace"))
    reason = "died"
    if os.WIFSIGNALED(status):
        reason = f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    raise InvalidModel(
        f"the task was given up while it was compiled: the process {reason}; it may take "
        f"{tuning.COMPILE_S:.0f} s of CPU, or {tuning.COMPILE_FACTOR:.0f} times what is predicted"
    )


def _run_child(work: Callable[[], bytes], writer: int, used_bytes: int | None) -> NoReturn:
    """Do the work, write the answer and end; nothing of the parent runs on."""
    try:
        _confine(writer, used_bytes)
        try:
            answer = _DONE + work()
        except SplitUpError as error:
            answer = _REFUSED + str(error).encode()
        except MemoryError:
            answer = _REFUSED + b"compiling the task takes too much memory"
        except Exception as error:  # tinygrad raises anything
            answer = _REFUSED + f"{type(error).__name__}: {error}"[:_ERROR_CHARS].encode()
        view = memoryview(answer)
        while view:
            view = view[os.write(writer, view) :]
        os._exit(0)
    finally:
        os._exit(1)


def _confine(writer: int, used_bytes: int | None) -> None:
    """Give up what this process must not have: open files, signals, priority, time and memory."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, writer)
    os.closerange(writer + 1, most)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(0, used_bytes)


def _limit(predicted_us: int, used_bytes: int | None) -> None:
    """Allow what compiling may take, besides what the process has; a signal ends it otherwise."""
    predicted_s = predicted_us / 1e6
    allowed_s = math.ceil(max(tuning.COMPILE_S, tuning.COMPILE_FACTOR * predicted_s))
    _lower(resource.RLIMIT_CPU, allowed_s)
    signal.setitimer(signal.ITIMER_REAL, tuning.COMPILE_WAIT_S)
    if used_bytes is not None:
        room = max(tuning.COMPILE_BYTES, int(tuning.COMPILE_BYTES_PER_S * predicted_s))
        _lower(resource.RLIMIT_DATA, used_bytes + room)


def _open_memory() -> int | None:
    """Open the file that tells this process's memory, which a confined process can no more."""
    with suppress(OSError):  # only Linux has it
        return os.open("/proc/self/statm", os.O_RDONLY)
    return None


_MEMORY: Final = _open_memory()


def _get_data_bytes() -> int | None:
    """Return the memory that this process may write, as RLIMIT_DATA counts it."""
    if _MEMORY is None:
        return None
    return int(os.pread(_MEMORY, 256, 0).split()[5]) * resource.getpagesize()


def _lower(bound: int, value: int) -> None:
    """Set a soft limit, which may be raised later, within the hard one."""
    hard = resource.getrlimit(bound)[1]
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(bound, (soft, hard))
