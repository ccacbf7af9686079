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

from tests.page.browser import open_page

_PROGRAM = Path(__file__).with_suffix(".js")
_MODULES = (
    *("./kernels", "./logits", "./sampler", "./tensor_store"),
    "@noble/hashes/sha2.js",
)


class PeakReader(threading.Thread):
    """Reads the most memory that processes of the browser have had at once, beyond the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = self._read()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, self._read())

    def stop(self) -> int:
        """Return the growth in bytes."""
        self._done.set()
        self.join()
        return self.peak_bytes - self.start_bytes

    def _read(self) -> int:
        parents: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                status = (folder / "status").read_text()
                command = (folder / "cmdline").read_text()
            except OSError:
                continue  # it has ended
            pid = int(folder.name)
            parents[pid] = int(re.findall(r"PPid:\s+(\d+)", status)[0])
            private = re.findall(r"RssAnon:\s+(\d+) kB", status)
            if private and "--type=renderer" in command:
                sizes[pid] = int(private[0]) * 1024
        return sum(size for pid, size in sizes.items() if _descends(pid, parents))


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
        page.add_script_tag(content=_PROGRAM.read_text())
        reader = PeakReader()
        reader.start()
        loading = page.evaluate("loadTable", shape)
        grown = reader.stop()
    table = 2 * options.rows * options.width
    memory = {"table_mb": table / 1e6, "most_beside_the_table_mb": (grown - table) / 1e6}
    print(json.dumps({"ms": times, "loading_ms": loading, "memory": memory}, indent=2))


if __name__ == "__main__":
    main()
