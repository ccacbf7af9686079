"""The LM head in a browser: time per token and memory. Run ``python -m bench.browser_head``.

The private page's own modules and kernels run in Chromium, in one thread, on random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
from pathlib import Path

from gateway_tests.page.browser import open_page, run_in_worker

_PROGRAM = Path(__file__).with_suffix(".js")
_MODULES = (
    *("./kernels", "./logits", "./sampler", "./tensor_store"),
    "@noble/hashes/sha2.js",
)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1_536)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    shape = [options.rows, options.width]
    with open_page(*_MODULES) as page:
        page.add_script_tag(content=_PROGRAM.read_text())
        times = page.evaluate("measureHead", [*shape, options.repeats])
    with open_page(*_MODULES) as page:
        reader = PeakReader()
        reader.start()
        loading = run_in_worker(page, f"{_PROGRAM.read_text()} return loadTable(given);", shape)
        grown = reader.stop()
    table = 2 * options.rows * options.width
    memory = {"table_mb": table / 1e6, "most_beside_the_table_mb": (grown - table) / 1e6}
    print(json.dumps({"ms": times, "loading_ms": loading, "memory": memory}, indent=2))


if __name__ == "__main__":
    main()
