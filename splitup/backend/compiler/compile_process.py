"""Check and compile a task in a process of its own, with a limit of CPU time and memory.

Strangers choose what a task makes the code generator do, and the rules of a legal graph only
predict how long that takes (``splitup.graph.compile_cost``). So a process is forked for each task
(``splitup.sandbox.fork``). It gets CPU time and memory by what is predicted, and returns the
schedule as bytes (``splitup.backend.compiler.schedule_bytes``). It runs no kernel, and nothing that
compiling leaves in memory stays in the process that serves steps. So different tasks share no
kernels.

How fast this machine is at the moment is measured first. The limit only bounds what a hostile task
costs: a task that does not meet it is slow here, not wrong, and may be tried again with more
``patience``.

The process is forked and not started anew, which would cost a second of CPU for each task. It does
not touch the device.
"""

from __future__ import annotations

import functools
import math
import resource
import signal
import time
from collections.abc import Callable
from typing import Final

from splitup.backend.compiler.schedule import Schedule, compile_graph
from splitup.backend.compiler.schedule_bytes import decode_schedule, encode_schedule
from splitup.core import tuning
from splitup.core.errors import InvalidModel, SplitUpError
from splitup.cpu.native_kernels import computes_for
from splitup.graph.rules import CheckedGraph, load_graph
from splitup.sandbox.fork import run_in_fork
from splitup.sandbox.memory import get_data_bytes, lower

_ERROR_CHARS: Final = 400
_OURS: Final = (  # a task: a state grows by the squares of its input
    b'{"format":"splitup.graph","inputs":[["x","float32",["T",4]]],"nodes":[["INPUT","float32",[],0],'
    b'["STATE","float32",[],0],["MUL","float32",[0,0],null],["CONTIGUOUS","float32",[2],null],'
    b'["REDUCE","float32",[3],["ADD",1]],["ADD","float32",[3,1],null],'
    b'["CONTIGUOUS","float32",[5],null],["ADD","float32",[1,4],null],'
    b'["CONTIGUOUS","float32",[7],null]],"outputs":[["y",6]],"states":[["s","float32",[4]]],'
    b'"symbols":[["T",8]],"updates":[[0,8]],"version":1,"weights":[]}'
)


def compile_apart(load: Callable[[], CheckedGraph], device: str) -> Schedule:
    """Return the schedule of the graph that ``load`` returns. The caller's thread waits.

    Raises InvalidModel when ``load`` does, when tinygrad cannot compile the graph, and when both
    together take too much memory. Raises TooSlow when they take too much time, and Unavailable when
    this machine lacks something.
    """
    return decode_schedule(compile_to_bytes(load, device))


def compile_to_bytes(load: Callable[[], CheckedGraph], device: str, *, patience: int = 1) -> bytes:
    """Do the same and return the schedule's bytes, which this process need not trust.

    With ``patience`` it may take so many times the usual time.
    """
    _prepare(device)
    used_bytes = get_data_bytes()

    def work() -> bytes:
        factor = patience * measure_slowness()
        signal.setitimer(signal.ITIMER_REAL, factor * tuning.COMPILE_WAIT_S)
        try:
            _limit(0, used_bytes, factor)
            graph = load()
            _limit(graph.compile_us, used_bytes, factor)
            return encode_schedule(compile_graph(graph, device))
        except SplitUpError:
            raise
        except MemoryError:
            raise InvalidModel("compiling the task takes too much memory") from None
        except Exception as error:  # tinygrad raises anything
            raise InvalidModel(f"{type(error).__name__}: {error}"[:_ERROR_CHARS]) from None

    return run_in_fork("compiling the task", work)


@functools.cache
def _prepare(device: str) -> None:
    """Compile a task of our own, so that forks need not make what tinygrad makes for its first.

    Its patterns become code when they are first tried, which takes a tenth of a second: two thirds
    of what a small task takes. Where there is a driver, it must not be opened before the fork.
    """
    if computes_for(device):
        compile_graph(load_graph(_OURS), device)


def _limit(predicted_us: int, used_bytes: int | None, factor: float) -> None:
    """Allow what compiling may take, besides what the process has; a signal ends it otherwise."""
    predicted_s = predicted_us / 1e6
    usual_s = max(tuning.COMPILE_S, tuning.COMPILE_FACTOR * predicted_s)
    lower(resource.RLIMIT_CPU, math.ceil(factor * usual_s))
    if used_bytes is not None:
        room = max(tuning.COMPILE_BYTES, int(tuning.COMPILE_BYTES_PER_S * predicted_s))
        lower(resource.RLIMIT_DATA, used_bytes + room)


_ENTRIES: Final = 8_000
_REFERENCE_S: Final = 0.013  # of CPU for ``_work``, where compiling takes what is predicted
_MOST: Final = 32.0  # a slower machine than this is of no use here; bounds what hostile work gets


def measure_slowness() -> float:
    """Return how many times the predicted CPU time compiling takes here: 1 or more.

    Takes a hundredth of the CPU that a usual task takes to compile.
    """
    start_s = time.process_time()
    _work()
    took_s = time.process_time() - start_s
    return min(max(took_s / _REFERENCE_S, 1.0), _MOST)


def _work() -> int:
    """Do what compiling does: build, hash and look up small objects, in more memory than caches."""
    table: dict[tuple[object, ...], object] = {}
    for number in range(_ENTRIES):
        key = (number * 7919 % 1009, str(number % 127), ("ADD", number % 61))
        found = table.get(key)
        table[key] = (key, found is None) if number % 3 else [key, None]
    return len(sorted(table, key=repr))
