"""What a network costs that has nothing to do: CPU of each kind of process, in percent of a core.

    python -m bench.measure.idle_costs [SECONDS]    # 60

Starts six nodes with the example model, waits until they have loaded it, and then ``SETTLE_S``. No
client is connected while it measures. Prints JSON: for each kind how many processes there are,
their mean, and the network's sum. What a process has started is counted as its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from bench.report import read_tree_cpu_s, say
from splitup.client.connection import SplitUp
from splitup.config import NETWORK_FILE
from splitup.demo.models import find_example
from splitup.demo.run import EXAMPLE, NODES, register, wait_for_holders
from splitup.devnet.commands import down, up_detached
from splitup.devnet.network import DevnetOptions
from splitup.devnet.state import read_runtime

SETTLE_S: Final = 75.0  # members rest 30 s after the last snapshot, which is up to 30 s later


async def load_model(directory: Path) -> None:
    await register(directory, find_example())
    async with SplitUp.connect(directory / NETWORK_FILE) as net:
        await wait_for_holders(net, directory, say)


def measure(directory: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of the network that runs in ``directory``."""
    runtime = read_runtime(directory)

    def read() -> dict[str, float]:
        used = {process.name: read_tree_cpu_s(process.pid) for process in runtime.processes}
        used["supervisor"] = read_tree_cpu_s(runtime.supervisor) - sum(used.values())
        return used

    before, began = read(), time.monotonic()
    time.sleep(seconds)
    after, passed_s = read(), time.monotonic() - began
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, cpu_s in before.items():
        kinds[name.partition("-")[0]].append(100 * (after[name] - cpu_s) / passed_s)
    return {
        "seconds": round(passed_s, 1),
        "percent_of_a_core": {
            kind: {"processes": len(shares), "mean": round(sum(shares) / len(shares), 2)}
            for kind, shares in kinds.items()
        },
        "network_percent": round(sum(map(sum, kinds.values())), 2),
    }


def main() -> None:
    seconds = float(sys.argv[1]) if sys.argv[1:] else 60.0
    directory = Path(tempfile.mkdtemp(prefix="splitup-idle-"))
    try:
        up_detached(DevnetOptions(directory, NODES, EXAMPLE.node_vram_bytes), say, lambda _: None)
        try:
            asyncio.run(load_model(directory))
            say(f"measuring for {seconds:g} s")
            time.sleep(SETTLE_S)
            result = measure(directory, seconds)
        finally:
            down(directory, say)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({**result, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
