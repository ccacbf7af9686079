"""The user as whom a process runs, and its capabilities, given up for good."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_SET_KEEPCAPS: Final = 8
_SET_NO_NEW_PRIVS: Final = 38
_SET_DUMPABLE: Final = 4
_CAPABILITY_VERSION: Final = 0x20080522
_READ_SEARCH: Final = 1 << 2  # CAP_DAC_READ_SEARCH: read every file that Landlock allows
_NEW_USER: Final = 0x10000000
_NEW_NET_AND_IPC: Final = 0x40000000 | 0x08000000
# systemd's range for services without a user of their own: no file on a disk belongs to one of them
_FREE_USERS: Final = range(61_184, 65_520)
_MAX_THREADS: Final = 1_024  # of one user: 256 of kernels, and those of numpy and drivers


def forbid_new_privileges() -> None:
    """Make programs that this process starts as powerless as itself, whoever owns them."""
    _prctl(_SET_NO_NEW_PRIVS, 1)


def die_first() -> None:
    """Be the process that the kernel ends when the machine's memory is full, not the daemon."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def leave_namespaces() -> bool:
    """Leave the network, and the user's identity towards the kernel; returns whether it worked."""
    is_root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    flags = _NEW_NET_AND_IPC | (0 if is_root else _NEW_USER)
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        return False
    if not is_root:  # keep the same numbers inside
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def leave_root(groups: Sequence[int], scratch: Path | None, *, keeps_reading: bool) -> bool:
    """Become a user who owns nothing but ``scratch``; returns False where there is no such user.

    With ``keeps_reading`` this user may read every file that Landlock allows.
    """
    user = random.SystemRandom().choice(_FREE_USERS)
    if keeps_reading:
        _prctl(_SET_KEEPCAPS, 1)
    try:
        if scratch is not None:
            os.chown(scratch, user, user)
        os.setgroups(groups)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container without these users
        return False
    return True


def drop_capabilities(*, keeps_reading: bool) -> None:
    """Give up all capabilities but that to read the files that Landlock allows."""
    kept = _READ_SEARCH if keeps_reading else 0
    header = struct.pack("<Ii", _CAPABILITY_VERSION, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, struct.pack("<6I", kept, kept, *[0] * 4)):
        raise OSError(ctypes.get_errno(), "capset failed")


def limit_threads() -> None:
    """Bound the threads and processes of this user, who must be this process's alone."""
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_THREADS, _MAX_THREADS))


def show_own_files() -> None:
    """Let this process read its own files in /proc again, as drivers of GPUs do."""
    _prctl(_SET_DUMPABLE, 1)


def _prctl(option: int, value: int) -> None:
    arguments = [ctypes.c_ulong(one) for one in (value, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")
