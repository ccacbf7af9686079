"""Files that are written whole or not at all, locks, and no link that leads elsewhere.

A folder may be a stranger's, who left links in it under the names that will be written there.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file, or a link, in one step; ``mode`` is less the umask.

    Raises OSError, whose ``filename`` is the path.
    """
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(
            made, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)
        ) as file:
            file.write(text)
        made.replace(path)
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        made.unlink(missing_ok=True)


def follow_no_link(path: str, flags: int) -> int:
    """Open a file as ``open`` does; raise OSError for a link. For its ``opener``."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


# ---- locks of directories, each by its file ``lock``, which names who holds it ----------------


def take_lock(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed or the process ends; None if it is taken."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(directory / "lock", flags, 0o600)
    try:
        for _ in range(10):
            if try_lock(descriptor, fcntl.LOCK_EX):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
            time.sleep(0.02)  # ``find_holder`` holds it for microseconds
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def find_holder(directory: Path) -> int | None:
    """Return the id of the process that has locked a directory, None when there is none."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if try_lock(descriptor, fcntl.LOCK_SH):
            return None
        text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock an open file, ``fcntl.LOCK_SH`` or ``LOCK_EX``; return whether nobody else has."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
