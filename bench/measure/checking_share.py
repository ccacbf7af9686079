"""What verification takes of all CPU that texts of SmolLM2 cost on a network of six nodes.

    python -m bench.measure.checking_share [ROUNDS]    # 3

Texts with 8, 50 and 100 % of their tasks verified, in alternating rounds. A text's CPU is that of
all processes of the network and of the client from its submission to its settlement, without what
the network takes when nobody asks. Which tasks are drawn is chance, so a line is fitted through the
texts by the share of tasks that were verified indeed.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from typing import Final

import numpy as np

from bench.report import read_tree_cpu_s, say
from bench.testbed.network import put_model, run_network
from bench.testbed.published import SHORT
from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.demo.run import NODES

SHARES: Final = (0.08, 0.5, 1.0)
PROMPT: Final = (
    "Rain begins when water from seas, lakes and forests rises into the air as vapour, and"
)
TOKENS: Final = 128
IDLE_S: Final = 20.0


async def write_text(net: SplitUp, share: float, idle_share: float) -> tuple[float, float]:
    """Return which share of a text's tasks was verified, and its CPU seconds."""
    opened: list[Session] = []
    before_s, began = read_tree_cpu_s(os.getpid()), time.monotonic()
    text = net.generate(
        SHORT.name, PROMPT, max_tokens=TOKENS, verify=share, on_session=opened.append
    )
    tokens = [token async for token in text]
    receipt = await net.receipt(opened[0].execution_id)
    used_s = read_tree_cpu_s(os.getpid()) - before_s - idle_share * (time.monotonic() - began)
    evidence = await net.evidence(receipt)
    checked = len(evidence.verdicts) / len(opened[0].manifest.tasks)
    say(f"{len(tokens)} tokens, {checked:.0%} of tasks verified: {used_s:.2f} CPU seconds")
    return checked, used_s


async def measure(rounds: int) -> None:
    """Print what a text costs, and what of it is verification."""
    async with run_network(NODES, SHORT.node_vram_bytes) as (devnet, net):
        await put_model(devnet, net, SHORT)
        await write_text(net, 1.0, 0)  # what is compiled and loaded once
        before_s = read_tree_cpu_s(os.getpid())
        await asyncio.sleep(IDLE_S)
        idle_share = (read_tree_cpu_s(os.getpid()) - before_s) / IDLE_S
        say(f"idle: {idle_share:.1%} of a core")
        found = [
            await write_text(net, share, idle_share) for _ in range(rounds) for share in SHARES
        ]
    checked, used_s = zip(*found, strict=True)
    slope, base = np.polyfit(checked, used_s, 1)
    print(f"a text of {TOKENS} tokens: {base:.2f} CPU seconds without verification")
    for share in SHARES:
        print(f"{share:.0%} verified: {share * slope / (base + share * slope):.1%} of all CPU")
    left = [spent - base - slope * part for part, spent in found]
    print(f"texts lie {statistics.pstdev(left):.2f} CPU seconds around the line")


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if sys.argv[1:] else 3))
