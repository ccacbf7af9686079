from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from splitup_node.scheduling import ask_for_long_slices, ask_for_short_slices


def test_a_thread_gets_short_slices_and_gives_them_back() -> None:
    """On a kernel that knows them; elsewhere it is only not harmed."""
    found: list[tuple[bool, int]] = []

    def ask() -> None:
        for function in (ask_for_short_slices, ask_for_long_slices):
            could, path = function(), Path(f"/proc/self/task/{threading.get_native_id()}/sched")
            match = re.search(r"se\.slice\s*:\s*(\d+)", path.read_text()) if path.exists() else None
            found.append((could, int(match[1]) if match else 0))

    thread = threading.Thread(target=ask)  # this one's slices stay as they are
    thread.start()
    thread.join()
    if not all(could and slice_ns for could, slice_ns in found):
        pytest.skip("the kernel does not tell slices")
    (_, short), (_, long) = found
    assert short < long
