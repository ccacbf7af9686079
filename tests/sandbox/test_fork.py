"""Work in a fork: what it says, how it may end, and what it does not get."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from collections.abc import Callable
from typing import NoReturn

import pytest

from splitup.core.errors import InvalidModel, SplitUpError, TooSlow, Unavailable
from splitup.sandbox.fork import run_in_fork


def throw(error: Exception) -> Callable[[], bytes]:
    def work() -> NoReturn:
        raise error

    return work


def die_of(number: signal.Signals) -> Callable[[], bytes]:
    def work() -> bytes:
        os.kill(os.getpid(), number)
        return b"alive"

    return work


def spin() -> bytes:
    resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
    while True:
        pass


def test_it_returns_bytes_of_any_length() -> None:
    assert run_in_fork("work", lambda: b"") == b""
    assert run_in_fork("work", lambda: bytes(3 * 2**20)) == bytes(3 * 2**20)


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (throw(InvalidModel("no graph")), InvalidModel, "^no graph$"),
        (throw(SplitUpError("no use")), InvalidModel, "^no use$"),
        (throw(TooSlow("busy")), TooSlow, "^busy$"),
        (throw(Unavailable("no disk")), Unavailable, "^no disk$"),
        (throw(MemoryError()), Unavailable, "more memory"),
        (throw(OSError("the driver is gone")), Unavailable, "^OSError: the driver is gone$"),
        (spin, TooSlow, "work takes longer than this machine"),
        (die_of(signal.SIGALRM), TooSlow, "work takes longer than this machine"),
        (die_of(signal.SIGKILL), Unavailable, "lack of memory"),
        (die_of(signal.SIGSEGV), InvalidModel, "given up: the process died of SIGSEGV"),
    ],
)
def test_s04_only_what_is_no_matter_of_the_machine_refuses_a_task(
    work: Callable[[], bytes], error: type[SplitUpError], message: str
) -> None:
    with pytest.raises(SplitUpError, match=message) as failed:
        run_in_fork("work", work)
    assert failed.type is error


def test_s10_it_has_no_open_files_but_those_it_is_given() -> None:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as other:
        given.write(b"a task")
        given.flush()

        def work() -> bytes:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(other.fileno())
            return os.pread(given.fileno(), 100, 0)

        assert run_in_fork("work", work, [given.fileno()]) == b"a task"
        assert os.fstat(other.fileno()), "still open here"
