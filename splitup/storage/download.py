"""Downloads of large objects from presigned URLs to disk, in bounded memory and resumable.

The bytes so far stay in a ``.part`` file across errors, expired URLs and restarts; the file gets
its name only when its digest is right. Free space is checked before a download, because a full disk
would stop the journal as well.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Self

import aiohttp
from yarl import URL

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, SplitUpError, StorageUnavailable, Unavailable
from splitup.core.http_session import Redirected
from splitup.messages.storage import Grant
from splitup.net.object_transfer import (
    RETRYABLE,
    NotStored,
    TransferPatience,
    check_grant,
    describe_failure,
    make_refusal,
)

_WRITE_BYTES: Final = 4 * limits.MIB  # written at once, on a thread


async def download_object(
    session: aiohttp.ClientSession,
    grant: Grant,
    renew: Callable[[], Awaitable[Grant]],
    path: Path,
    *,
    length_bytes: int,
    digest: str,
    deadline_s: float,
) -> None:
    """Fetch the object of exactly ``length_bytes`` and SHA-256 ``digest`` (hex) to ``path``.

    ``renew`` returns another grant when this one has expired. Tries go on until ``deadline_s`` from
    now, as long as bytes arrive at least every ``tuning.DOWNLOAD_PATIENCE_S``. Raises
    StorageUnavailable (NotStored for a missing object), PeerFault (a wrong length or digest in each
    of ``tuning.OBJECT_FETCHES`` tries), Unavailable (the disk is full, or another process fetches
    the same object), and the errors of ``renew``.
    """
    faults = refusals = 0
    with (
        _Part(path, length_bytes) as part,
        TransferPatience(grant, deadline_s, tuning.DOWNLOAD_PATIENCE_S) as patience,
    ):
        while True:
            before = part.length
            try:
                check_grant(grant, "GET")
                reason = await _fetch_rest(session, grant, part, patience)
                if part.length == length_bytes:
                    await asyncio.to_thread(_check_digest, part, grant, digest)
                    await asyncio.to_thread(part.keep)
                    return
            except PeerFault as fault:
                part.truncate()
                faults += 1
                if faults == tuning.OBJECT_FETCHES:
                    raise
                reason = str(fault)
            except NotStored:
                raise
            except StorageUnavailable as error:  # the URL has expired
                refusals += 1
                if refusals > tuning.OBJECT_FETCHES:
                    raise
                reason = str(error)
                grant = await renew()
            if part.length > before:
                refusals = 0
            await patience.pause(reason)


def _check_digest(part: _Part, grant: Grant, digest: str) -> None:
    if part.compute_digest() != digest:
        raise PeerFault(f"object {grant.key} has another digest than {digest}")


async def _fetch_rest(
    session: aiohttp.ClientSession, grant: Grant, part: _Part, patience: TransferPatience
) -> str:
    """Append the missing bytes as far as they arrive; return why the transfer ended, or ""."""
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={part.length}-"} | grant.headers
    try:
        async with session.get(
            URL(grant.url, encoded=True),
            headers=headers,
            auto_decompress=False,
            timeout=patience.make_timeout(),
        ) as response:
            if (reason := _check_answer(response, grant, part)) == "":
                await _append_all(response, grant, part, patience)
            return reason
    except Redirected as error:
        raise make_refusal(grant, error.status) from None
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        return describe_failure(error)


def _check_answer(response: aiohttp.ClientResponse, grant: Grant, part: _Part) -> str:
    """Return "" when the body continues ``part``, or why it cannot be used."""
    status = response.status
    if status in RETRYABLE:
        return f"status {status}"
    if status == 404:
        raise NotStored(f"object {grant.key} does not exist (yet)")
    if status == 416:
        raise PeerFault(f"object {grant.key} ends before byte {part.length}")
    if status not in (200, 206):
        raise make_refusal(grant, status)
    if status == 200:
        part.truncate()  # the server does not support ranges
        total = response.content_length
    else:
        place, _, size = response.headers.get("Content-Range", "").partition("/")
        if not place.startswith(f"bytes {part.length}-"):
            raise PeerFault(f"the storage sends another range of {grant.key} than requested")
        total = int(size) if size.isdecimal() and len(size) < 20 else None
    if total not in (None, part.length_bytes):
        raise PeerFault(f"object {grant.key} has {total} bytes, not {part.length_bytes}")
    return ""


async def _append_all(
    response: aiohttp.ClientResponse, grant: Grant, part: _Part, patience: TransferPatience
) -> None:
    buffer = bytearray()
    try:
        async for chunk in response.content.iter_any():
            patience.note_progress()
            buffer += chunk
            if part.length + len(buffer) > part.length_bytes:
                buffer.clear()
                raise PeerFault(f"object {grant.key} is longer than {part.length_bytes} bytes")
            if len(buffer) >= _WRITE_BYTES:
                full, buffer = buffer, bytearray()
                await asyncio.to_thread(part.append, full)
    finally:
        part.append(buffer)  # also when the connection broke: these bytes are not fetched again


class _Part:
    """The bytes of a file that have arrived, locked for this process.

    Several commands of one user may share a cache, hence the lock.
    """

    def __init__(self, path: Path, length_bytes: int) -> None:
        self._path = path
        self._part = path.with_suffix(".part")
        self.length_bytes = length_bytes
        self.length = 0
        self._file = -1

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._open()
            self.length = os.fstat(self._file).st_size
            if self.length > self.length_bytes:
                self.truncate()
            check_space(self._path, self.length_bytes - self.length)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise explain_disk(error, self._path) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def append(self, data: bytes | bytearray) -> None:
        """Write at the end; empty the file when the disk is full."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file, view, self.length)
                self.length += written
                view = view[written:]
        except OSError as error:
            self.truncate()
            raise explain_disk(error, self._path) from None

    def truncate(self) -> None:
        """Drop all bytes."""
        os.ftruncate(self._file, 0)
        self.length = 0

    def compute_digest(self) -> str:
        """Return the SHA-256 of the bytes so far, in hex."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def keep(self) -> None:
        """Give the file its name, once its bytes are on the disk."""
        try:
            os.fsync(self._file)
            self._part.replace(self._path)
        except OSError as error:
            raise explain_disk(error, self._path) from None

    def _open(self) -> int:
        while True:
            file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file), self._part.stat()):
                    return file
            except FileNotFoundError:
                pass
            except BlockingIOError:
                os.close(file)
                raise Unavailable(
                    f"another process is fetching {self._path}; try again when it has finished"
                ) from None
            os.close(file)  # it was renamed or removed after we opened it

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a whole file or nothing; raise Unavailable when the disk is full or fails.

    Without ``sync`` the file may be lost in a power failure.
    """
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise explain_disk(error, path) from None


def check_space(path: Path, needed: int) -> None:
    """Raise Unavailable unless a file's disk has room for ``needed`` more bytes and the journal."""
    free = shutil.disk_usage(path.parent).free
    if free < needed + tuning.DISK_RESERVE_BYTES:
        raise Unavailable(
            f"the disk of {path.parent} has {free / 1e6:,.1f} MB left: {path.name} "
            f"needs {needed / 1e6:,.3f} MB, and {tuning.DISK_RESERVE_BYTES / 1e6:,.0f} MB are "
            "kept for the journal; free some space"
        )


def explain_disk(error: OSError, path: Path) -> SplitUpError:
    """Return the error for a file that cannot be written."""
    return Unavailable(
        f"cannot write {path} ({error.strerror or error}); free some space, or check the disk"
    )
