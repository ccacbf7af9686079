"""A random Llama over four nodes, each with a worker on this device, beside one process."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.modes.split import CONTEXT, compare
from bench.testbed.engines import run_engines
from bench.testbed.models import CHUNK, LLAMA_15M, make_llama, place_tasks
from bench.testbed.uncut_process import run_one_piece
from splitup.core import event_loop

ROUNDS = 4


async def run() -> dict[str, Any]:
    """Return what ``bench.modes.split`` finds of 15 M parameters."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        checkpoint, model = await asyncio.to_thread(make_llama, Path(name), LLAMA_15M)
        async with (
            run_engines(place_tasks([model])) as engines,
            run_one_piece(checkpoint, CHUNK, CONTEXT) as one_piece,
        ):
            return await compare(engines, model, one_piece, ROUNDS)


if __name__ == "__main__":
    print(json.dumps(event_loop.run(run())))
