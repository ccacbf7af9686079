"""A client that ends like a crashed one: ``python killed_client.py NETWORK MODEL``.

Prints the execution's id and the number of its steps, and kills itself without any farewell. All
tasks are drawn, and the store lacks the last inputs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from splitup.client.connection import SplitUp
from splitup.core import limits
from splitup.decode.step import make_arrays, make_causal_step

STEPS = limits.INTERIM_STEPS + 8


async def main(directory: str, model: str, chunk: int) -> None:
    async with SplitUp.connect(directory) as net:
        async with net.session(model, steps=2 * STEPS, deadline_s=20, verify="100%") as session:
            for place in range(STEPS):
                await session.step(make_arrays(make_causal_step([place + 3], place), chunk))
            print(session.execution_id, STEPS, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
