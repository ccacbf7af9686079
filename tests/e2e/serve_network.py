"""A devnet that verifies every task: ``serve_network.py DIR NODES VRAM_BYTES MEMBERS``."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from splitup.devnet.funding import DEVNET_PARAMETERS
from splitup.devnet.network import DevnetOptions, run_devnet

EVERY_TASK_BPS = 10_000

if __name__ == "__main__":
    options = DevnetOptions(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        replace(DEVNET_PARAMETERS, sampling_bps=EVERY_TASK_BPS),
        int(sys.argv[4]),
    )
    asyncio.run(run_devnet(options, print, lambda health: print(health.describe())))
