"""A devnet that verifies every task: ``serve_network.py DIR NODES VRAM_BYTES MEMBERS [DEVICE]``.

With DEVICE the members compute on that one only, and cannot open WebGPU.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from splitup.devnet import network
from splitup.devnet.funding import DEVNET_PARAMETERS
from splitup.devnet.network import DevnetOptions, run_devnet
from splitup.devnet.processes import DevnetProcess, spawn

EVERY_TASK_BPS = 10_000


def spawn_without_webgpu(name: str, command: Sequence[str | Path], *, log: Path) -> DevnetProcess:
    """Start a party; a member gets an environment in which there is no Dawn."""
    if name.startswith("member-"):
        command = ["env", f"DEV={sys.argv[5]}", "WEBGPU_PATH=/nowhere", *command]
    return spawn(name, command, log=log)


if __name__ == "__main__":
    options = DevnetOptions(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        replace(DEVNET_PARAMETERS, sampling_bps=EVERY_TASK_BPS),
        int(sys.argv[4]),
    )
    if sys.argv[5]:
        network.spawn = spawn_without_webgpu  # type: ignore[attr-defined]
    asyncio.run(run_devnet(options, print, lambda health: print(health.describe())))
