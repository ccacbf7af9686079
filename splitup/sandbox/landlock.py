"""Landlock: a process gives up, for good, all files but those it names (Linux 5.13 and newer).

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Mapping
from enum import IntFlag
from pathlib import Path
from typing import Final

# The numbers of the three system calls are the same on every architecture.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_CREATE_RULESET_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
_ALL_NETWORK: Final = 0b11  # binding and connecting TCP sockets
_ALL_SCOPES: Final = 0b11  # abstract UNIX sockets, and signals, of processes outside


class FileRight(IntFlag):
    """What a rule may allow; all that is known and not allowed is refused."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    REFER = 1 << 13  # renaming from one folder to another
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15

    READ = READ_FILE | READ_DIR
    DEVICE = READ_FILE | READ_DIR | WRITE_FILE | IOCTL_DEV
    SCRATCH = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE


_OF_FILES: Final = (
    FileRight.EXECUTE
    | FileRight.WRITE_FILE
    | FileRight.READ_FILE
    | FileRight.TRUNCATE
    | FileRight.IOCTL_DEV
)


def find_version() -> int:
    """Return the version of Landlock's interface, 0 where there is none."""
    return max(0, _call(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION))


def restrict(allowed: Mapping[Path, FileRight]) -> None:
    """Refuse this thread, and those it starts, every file that is not at or below a path.

    Paths that do not exist are left out. ``no_new_privs`` must be set. Raises OSError where
    Landlock is missing.
    """
    version = find_version()
    known = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network = _ALL_NETWORK if version >= 4 else 0
    scopes = _ALL_SCOPES if version >= 6 else 0
    attributes = struct.pack("<QQQ", known, network, scopes)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _check(_call(_CREATE_RULESET, attributes, size, 0))
    try:
        for path, right in allowed.items():
            _allow(rules, path, int(right) & known)
        _check(_call(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _allow(rules: int, path: Path, right: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            right &= _OF_FILES
        rule = struct.pack("<Qi", right, opened)
        _check(_call(_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(opened)


def _call(*arguments: int | bytes | None) -> int:
    numbers = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return int(ctypes.CDLL(None, use_errno=True).syscall(*numbers))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
