"""Bounds of what a confined process may take besides what it has. Import it before confining."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final


def _open_memory() -> int | None:
    """Open the file that tells this process's memory, which a confined process can no more."""
    with suppress(OSError):  # only Linux has it
        return os.open("/proc/self/statm", os.O_RDONLY)
    return None


_MEMORY: Final = _open_memory()


def get_data_bytes() -> int | None:
    """Return the memory that this process may write, as RLIMIT_DATA counts it."""
    if _MEMORY is None:
        return None
    return int(os.pread(_MEMORY, 256, 0).split()[5]) * resource.getpagesize()


def lower(bound: int, value: int) -> None:
    """Set a soft limit, which may be raised later, within the hard one."""
    hard = resource.getrlimit(bound)[1]
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(bound, (soft, hard))


@contextmanager
def limit_growth(most: int) -> Iterator[None]:
    """Let a block take so many bytes more; what goes beyond raises MemoryError."""
    used = get_data_bytes()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if used is not None:
        lower(resource.RLIMIT_DATA, used + most)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
