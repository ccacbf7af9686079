"""What the worker's sandbox costs: steps of one task in a confined and in an unconfined worker.

``python -m bench.measure.sandbox_cost`` alternates between the two, so that both see the same
machine, and prints the ratio of their lower quartiles, which other load disturbs least. Both
workers stay on one core and this process on another: between which cores a step and its answer go
changes more than what is measured.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import WORKER_ARGV, Supervisor

from splitup.core.errors import SplitUpError
from tests.node.graphs import make_accumulator

ROUNDS: Final = 120
STEPS: Final = 60
SIZES: Final = (64, 100_000)
UNCONFINED: Final = (
    *(sys.executable, "-P", "-c"),
    "from splitup_node.worker import process; process.confine = lambda device: (); process.main()",
)


async def measure(size: int) -> tuple[float, float]:
    """Return the lower quartiles of a step, in microseconds: confined, unconfined."""
    times: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as name:
        workers = [
            Supervisor(
                Path(name), memory_bytes=10**9, device="CPU:X86", name=str(n), worker_argv=argv
            )
            for n, argv in enumerate((WORKER_ARGV, UNCONFINED))
        ]
        path = Path(name) / "task.json"
        path.write_bytes(make_accumulator(size).to_bytes())
        try:
            programs = []
            for worker in workers:
                await worker.start()
                _stay_on(worker.pid, 1)
                programs.append((await worker.load(path, None))["program"])
            for round_ in range(ROUNDS):
                order = (0, 1) if round_ % 2 else (1, 0)
                for n in order:
                    begun = time.perf_counter()
                    for _ in range(STEPS):
                        await _step(workers[n], programs[n], size)
                    times[n].append((time.perf_counter() - begun) / STEPS * 1e6)
        finally:
            for worker in workers:
                await worker.close()
    confined, unconfined = (statistics.quantiles(one, n=4)[0] for one in times)
    return confined, unconfined


def _stay_on(pid: int | None, core: int) -> None:
    assert pid is not None
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


async def _step(worker: Supervisor, program: int, size: int) -> None:
    answer: asyncio.Future[RunAnswer | SplitUpError] = asyncio.get_running_loop().create_future()
    worker.run(RunRequest(1, program, [np.zeros(size, np.float32).tobytes()]), answer.set_result)
    assert isinstance(await answer, RunAnswer)


def main() -> None:
    _stay_on(os.getpid(), 0)
    for size in SIZES:
        confined, unconfined = asyncio.run(measure(size))
        print(
            f"{size:>7} numbers: {confined:.1f} µs confined, {unconfined:.1f} µs unconfined, "
            f"{100 * (confined / unconfined - 1):+.2f} %"
        )


if __name__ == "__main__":
    main()
