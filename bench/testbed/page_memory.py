"""How much the memory of a page grows in Chromium."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path


class PeakReader(threading.Thread):
    """Reads how much the memory of the page's process grows at most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        sizes = {pid: read_private(pid) for pid in find_renderers()}
        self._pid = max(sizes, key=lambda pid: sizes[pid])  # others are spare
        self._start_bytes = self._peak_bytes = sizes[self._pid]
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.01):
            self._peak_bytes = max(self._peak_bytes, read_private(self._pid))

    def stop(self) -> int:
        """Return the growth in bytes."""
        self._done.set()
        self.join()
        return self._peak_bytes - self._start_bytes


def read_private(pid: int) -> int:
    """Return the memory that only this process has, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) * 1024


def find_renderers() -> list[int]:
    """Return the processes of pages, among those that this one has started."""
    parents: dict[int, int] = {}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            command = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(re.findall(r"PPid:\s+(\d+)", status)[0])
        if "--type=renderer" in command:
            found.append(int(folder.name))
    return [pid for pid in found if _descends(pid, parents)]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        pid = parents.get(pid, 0)
        if pid == os.getpid():
            return True
    return False
