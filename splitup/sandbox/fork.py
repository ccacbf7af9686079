"""Work in a fork of this process, which cannot leave anything behind in it.

The fork has no open files but those it is given, no signal handlers and a lower priority, and
answers with bytes. It is thrown away after one answer. So whatever strangers make it do is over
then, and this process has paid only once for what it imported.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Collection
from typing import Final, NoReturn

from splitup.core.errors import InvalidModel, SplitUpError, TooSlow, Unavailable

_DONE: Final = b"\0"
_REFUSED: Final = b"\1"
_SLOW: Final = b"\2"
_FAILED: Final = b"\3"
_READ_BYTES: Final = 1 << 20
_ERROR_CHARS: Final = 400
_NICE: Final = 2  # steps come first; with a lower priority a busy machine would give it no time
_OUT_OF_TIME: Final = frozenset({signal.SIGXCPU, signal.SIGALRM})


def run_in_fork(what: str, work: Callable[[], bytes], files: Collection[int] = ()) -> bytes:
    """Return what ``work`` returns in a forked process that keeps ``files`` open.

    ``what`` is done there, for messages. Raises InvalidModel when the work raises an error that is
    no matter of this machine, or breaks the process; TooSlow when it used up the limits that it set
    for itself; Unavailable when the machine lacks something, such as memory.
    """
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        raise Unavailable(f"{what} needs another process: {error.strerror}") from None
    if child == 0:
        _run_child(work, writer, files)
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
    for prefix, error_type in ((_REFUSED, InvalidModel), (_SLOW, TooSlow), (_FAILED, Unavailable)):
        if kind == prefix:
            raise error_type(rest.decode(errors="replace"))
    _raise_death(what, status)


def _raise_death(what: str, status: int) -> NoReturn:
    if not os.WIFSIGNALED(status):
        raise InvalidModel(f"{what} was given up: the process died")
    number = signal.Signals(os.WTERMSIG(status))
    if number in _OUT_OF_TIME:
        raise TooSlow(f"{what} takes longer than this machine spends on it at once")
    if number == signal.SIGKILL:
        raise Unavailable(f"{what} was ended by this machine, perhaps for lack of memory")
    raise InvalidModel(f"{what} was given up: the process died of {number.name}")


def _run_child(work: Callable[[], bytes], writer: int, files: Collection[int]) -> NoReturn:
    """Do the work, write the answer and end; nothing of the parent runs on."""
    try:
        _give_up_rights({writer, *files})
        try:
            answer = _DONE + work()
        except TooSlow as error:
            answer = _SLOW + str(error).encode()
        except MemoryError:
            answer = _FAILED + b"it takes more memory than it may have here (MemoryError)"
        except Unavailable as error:
            answer = _FAILED + str(error).encode()
        except SplitUpError as error:
            answer = _REFUSED + str(error).encode()
        except Exception as error:  # libraries and drivers raise anything
            answer = _FAILED + f"{type(error).__name__}: {error}"[:_ERROR_CHARS].encode()
        view = memoryview(answer)
        while view:
            view = view[os.write(writer, view) :]
        os._exit(0)
    finally:
        os._exit(1)


def _give_up_rights(files: Collection[int]) -> None:
    """Give up what this process must not have: other open files, signals and priority."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for number in (signal.SIGTERM, *_OUT_OF_TIME):
        signal.signal(number, signal.SIG_DFL)
    first = 3
    for kept in sorted(files):
        os.closerange(first, kept)
        first = kept + 1
    os.closerange(first, max(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
