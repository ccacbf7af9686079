"""How soon the kernel runs this process when something for it arrives.

A tensor's way through a node is many short runs of two processes, each of which waits until a
processor is free. Linux (6.12 and later) lets a thread that asks for short slices run at once in
place of one with longer slices; on average it gets no more of the processor than before. Without
that, a wake-up on a busy machine waits for the timer, up to 4 ms.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Final

_SYSCALLS: Final = {"x86_64": 314, "aarch64": 274}  # sched_setattr, which glibc has no name for
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")  # sched_attr: size, policy, flags, nice, …
_SHORT_NS: Final = 100_000  # the least that the kernel takes
_LONG_NS: Final = 10_000_000


def ask_for_short_slices() -> bool:
    """Ask for this thread, and those that it starts, to run soon; return whether it could be."""
    return _set_slice(_SHORT_NS)


def ask_for_long_slices() -> bool:
    """Take that back, for a thread whose work nobody waits for."""
    return _set_slice(_LONG_NS)


def _set_slice(nanoseconds: int) -> bool:
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    policy = os.sched_getscheduler(0)
    if policy != os.SCHED_OTHER:  # the operator's own choice
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, nanoseconds, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(number, 0, attributes, 0) == 0)
