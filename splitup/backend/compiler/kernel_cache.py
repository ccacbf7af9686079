"""Compiled tasks on the node's disk: after a restart nothing has to be compiled again.

Only daemons read and write here, with a key that no worker can read: a worker gets the bytes of the
task it loads, and what is kept comes from a process that compiled this task alone. The least
recently used files are deleted first.

    key      32 random bytes
    file     32 bytes HMAC-SHA256 of what it belongs to, and of the rest | a schedule's bytes

A file belongs to a task without its names, a determinism class, a device and this package's code;
its name is their digest. A file that was damaged, written by anybody else or moved to another name
is deleted.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from splitup.core import tuning
from splitup.core.codec import encode_canonical

_SUFFIX: Final = ".kernels"
_KEY_FILE: Final = "key"
_KEY_BYTES: Final = 32
_MAC_BYTES: Final = 32

_log = logging.getLogger("splitup.backend.compiler.kernel_cache")


class KernelCache:
    """A directory of compiled tasks, at most ``max_bytes`` of them; daemons may share it."""

    def __init__(self, directory: Path, max_bytes: int = tuning.KERNEL_CACHE_BYTES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes

    def load(self, task_id: str, determinism_class: str, device: str) -> bytes | None:
        """Return a task's schedule; None when there is none, or a false one, which is deleted."""
        entry = _name_entry(task_id, determinism_class, device)
        path = self._get_path(entry)
        try:
            mac, data = _split(path.read_bytes())
            expected = self._compute_mac(entry, data)
        except OSError:
            return None
        if not hmac.compare_digest(mac, expected):
            _log.warning("%s is damaged, or not this node's, and will be compiled again", path)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # the order in which files are removed
        return data

    def store(self, task_id: str, determinism_class: str, device: str, data: bytes) -> None:
        """Write a schedule; a disk that fails is logged, and the next start compiles again."""
        if len(data) > self._max_bytes:
            return
        entry = _name_entry(task_id, determinism_class, device)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._get_path(entry), self._compute_mac(entry, data) + data)
            self._trim()
        except OSError as error:
            _log.warning("compiled kernels are not kept: %s", error)

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """Wait until no other daemon compiles for this directory: it may be for the same task."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(self._directory, os.O_RDONLY)
        except OSError:  # a disk that fails, as in ``store``
            yield
            return
        try:
            # held until it is closed, or the process ends; no event tells when another ends
            while not _try_lock(number):  # noqa: ASYNC110
                await asyncio.sleep(tuning.COMPILE_POLL_S)
            yield
        finally:
            os.close(number)

    def _get_path(self, entry: bytes) -> Path:
        return self._directory / (hashlib.sha256(entry).hexdigest() + _SUFFIX)

    def _compute_mac(self, entry: bytes, data: bytes) -> bytes:
        message = hashlib.sha256(entry).digest() + data
        return hmac.digest(self._read_key(), message, "sha256")

    def _read_key(self) -> bytes:
        path = self._directory / _KEY_FILE
        with suppress(FileNotFoundError):
            if len(key := path.read_bytes()) == _KEY_BYTES:
                return key
            path.unlink()  # the disk was full when it was written
        with suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=self._directory) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            path.hardlink_to(file.name)  # the first of several daemons decides
        return path.read_bytes()

    def _write(self, path: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)  # several daemons may share the directory

    def _trim(self) -> None:
        files = []
        for path in self._directory.glob("*" + _SUFFIX):
            with suppress(OSError):  # another daemon may have removed it
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                return
            with suppress(OSError):
                path.unlink()
            total -= size


def _try_lock(number: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _name_entry(task_id: str, determinism_class: str, device: str) -> bytes:
    return encode_canonical([task_id, determinism_class, device, _get_code_digest()])


def _split(data: bytes) -> tuple[bytes, bytes]:
    return data[:_MAC_BYTES], data[_MAC_BYTES:]


@functools.cache
def _get_code_digest() -> str:
    """Return a digest of the code that decides what is compiled."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for folder in ("graph", "backend", "cpu"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
