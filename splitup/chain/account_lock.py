"""A lock per account among all processes of one user on one machine.

Two commands with one key would otherwise race for nonces and for the balance in the market. The
operating system releases the lock when its process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from splitup.core.errors import Unavailable
from splitup.core.files import try_lock

TIMEOUT_S: Final = 90.0  # holders keep it for one block at most; a block of Ethereum takes 12 s
_POLL_S: Final = 0.02
_SILENT_S: Final = 1.0  # a longer wait is announced
_TURN_S: Final = 1.0  # how long one process may go on when another one waits

_log = logging.getLogger(__name__)


class AccountLock:
    """The right to use an account for one purpose; shared by the tasks that use this object.

    When other processes wait, no task joins a turn older than ``_TURN_S``: the turn ends with the
    tasks that are in it, and the others come first.
    """

    def __init__(self, chain_id: int, address: str, purpose: str) -> None:
        self._path = _get_directory() / f"{chain_id}-{address}.{purpose}"
        self._queue_path = self._path.with_name(f"{self._path.name}.queue")
        self._descriptor: int | None = None
        self._users = 0
        self._since: float | None = None  # when the latest turn began; monotonic
        self._entering = asyncio.Lock()
        self._free = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold the lock; raise Unavailable when another process does not release it in time."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()

    async def acquire(self, timeout_s: float = TIMEOUT_S) -> None:
        """Take the lock, or join the tasks of this process that hold it; then call ``release``.

        Raises Unavailable when another process does not release it within ``timeout_s``.
        """
        async with self._entering:
            is_over = self._since is not None and time.monotonic() > self._since + _TURN_S
            if is_over and self._is_wanted():
                while self._users:
                    self._free.clear()
                    await self._free.wait()
                await asyncio.sleep(3 * _POLL_S)  # the process that waits looks this often
            if not self._users:
                await self._lock_file(timeout_s)
                self._since = time.monotonic()
            self._users += 1

    def release(self) -> None:
        """Leave the lock; the last task of this process that leaves releases it."""
        self._users -= 1
        if not self._users:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            self._free.set()

    def take_note_of_use(self) -> bool:
        """Return whether another process held the lock since this one did. Call it while held."""
        if self._descriptor is None:
            return False
        own = f"{os.getpid()} {id(self)}".encode()
        before = os.pread(self._descriptor, 64, 0)
        if before != own:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, own, 0)
        return before != own

    async def _lock_file(self, timeout_s: float) -> None:
        try:
            descriptor = _open(self._path)
            queue = _open(self._queue_path)
        except OSError as error:  # a disk that is full or read-only: better no lock than no command
            _log.warning("this account is not locked against other commands: %s", error)
            return
        start = time.monotonic()
        announced = False
        try:
            while not try_lock(descriptor, fcntl.LOCK_EX):
                try_lock(queue, fcntl.LOCK_SH)
                waited_s = time.monotonic() - start
                if waited_s > timeout_s:
                    raise Unavailable("another command is using this account; try again")
                if waited_s > _SILENT_S and not announced:
                    announced = True
                    _log.warning("another command is using this account; waiting…")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            os.close(queue)
        self._descriptor = descriptor

    def _is_wanted(self) -> bool:
        """Return whether another process waits: it holds a shared lock on the queue's file."""
        try:
            descriptor = _open(self._queue_path)
        except OSError:
            return False
        try:
            return not try_lock(descriptor, fcntl.LOCK_EX)
        finally:
            os.close(descriptor)


def _get_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"splitup-{os.getuid()}"


def _open(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    found = path.parent.lstat()  # another user may have made it, and would hold all locks in it
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"others may write into {path.parent}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
