"""When Python looks for cycles of unused objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leave_cycles() -> Iterator[None]:
    """Do not look for cycles of unused objects.

    A compiler makes a million objects without cycles and keeps them: looking takes up to a third of
    its time and finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
