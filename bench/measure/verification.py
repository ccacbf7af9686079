"""Measure the cost of verification: ``python -m bench.measure.verification [STEPS]``.

A network of real processes verifies every task (p = 100 %), so that the result is not random; at
p = 8 % it recomputes 8 % of that. The nodes' status files count the steps on their workers and
their time, for executions and for verifications.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from splitup.client.connection import SplitUp
from splitup.devnet.processes import find_program
from tests.e2e.conftest import CHUNK, EXAMPLE, MODEL, NODES, TARGET_VRAM, Network, wait_for
from tests.e2e.test_network import make_inputs

EXECUTIONS = 6
SAMPLING = 0.08


def read_work(network: Network) -> Counter[str]:
    """Return runs and microseconds over all nodes, executed and recomputed."""
    work: Counter[str] = Counter()
    for path in network.directory.glob("node-*/status.json"):
        status = json.loads(path.read_text())
        for kind in ("work", "work_again"):
            work.update({f"{kind} {name}": value for name, value in status[kind].items()})
    return work


async def execute(network: Network, steps: int) -> tuple[int, int]:
    """Execute a few times and settle; return how many judgements there were, and tasks."""
    judged = 0
    async with SplitUp.connect(network.config) as net:
        for _ in range(EXECUTIONS):
            result = await net.execute(MODEL, make_inputs(steps))
            evidence = await net.evidence(await result.receipt)
            judged += sum(len(verdict.validators) for verdict in evidence.verdicts)
        return judged, len(result.manifest.tasks)


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        network = Network(Path(name) / "net")
        try:
            network.start()
            subprocess.run(
                [
                    *(find_program("splitup-deploy"), "register", "--json", "--model", EXAMPLE),
                    *("--name", MODEL, "--target-vram", TARGET_VRAM),
                    *("--config", network.directory, "--chunk", str(CHUNK)),
                ],
                check=True,
                capture_output=True,
            )
            network.wait_for_holders(NODES)
            judged, tasks = asyncio.run(execute(network, steps))
            wanted = EXECUTIONS * tasks * steps
            wait_for(lambda: read_work(network)["work_again runs"] >= wanted, network.describe)
            work = read_work(network)
        finally:
            network.stop()
    print(f"{EXECUTIONS} executions of {tasks} tasks and {steps} steps; {judged} judgements")
    for unit in ("runs", "compute_us"):
        done, again = work[f"work {unit}"], work[f"work_again {unit}"]
        share = again / done
        print(
            f"{unit}: {done} executed, {again} again = {share:.3f}; x 8 % = {SAMPLING * share:.2%}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
