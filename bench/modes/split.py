"""Generation over four nodes against the same kernels in one process, batch 1, in turn."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.report import Bar, Report, median_ratio, say, spread
from bench.testbed.engines import Engines, Model, run_engines
from bench.testbed.models import (
    CHUNK,
    LLAMA_15M,
    LLAMA_124M,
    LLAMA_693M,
    make_llama,
    place_tasks,
    spread_tasks,
)
from bench.testbed.uncut_process import FIRST, OnePiece, make_step_arrays, pick, run_one_piece
from splitup.client.execution.session import Session

CONTEXT: Final = 256
TOKENS: Final = 24
ROUNDS: Final = 10
MODELS: Final = (("15 M", LLAMA_15M, 1), ("124 M", LLAMA_124M, 1), ("693 M", LLAMA_693M, 2))
PEERS: Final = {  # measured once on another quiet machine with two cores, docs/benchmarks.md
    "peer llama.cpp RPC, ms": "0.1–0.4",
    "peer distributed-llama, ms": "0.5–2.8",
    "peer exo, ms": 3.2,
    "peer Petals, ms": 7,
}


async def generate(session: Session, tokens: int) -> tuple[float, list[int]]:
    """Generate greedily; return the seconds after the first step, and the tokens."""
    token, found, begun = FIRST, [], 0.0
    for position in range(tokens + 1):
        if position == 1:
            begun = time.perf_counter()
        outputs = await session.step(make_step_arrays(token, position, CHUNK))
        token = pick(outputs["logits"])
        found.append(token)
    return time.perf_counter() - begun, found


async def run(quick: bool) -> Report:
    """Measure every model; ``MODELS`` holds by what its rounds are divided."""
    rounds = 2 if quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        rows = {
            label: await measure_size(Path(name), label, config, rounds // divisor)
            for label, config, divisor in MODELS
        }
    small = rows["15 M"]
    bars = [
        Bar(
            f"tokens/s over four nodes against one process, {label} parameters",
            rows[label]["ratio"],
            "×",
            at_least=0.85,
            beside={
                "tokens equal": rows[label]["equal"],
                "one process, ms": rows[label]["one_ms"]["median"],
            },
        )
        for label in ("124 M", "693 M")
    ]
    bars += [
        Bar(
            "added per hop and token, 15 M parameters",
            small["added_ms_per_hop"],
            "ms",
            at_most=1.0,
            beside={**PEERS, "tokens equal": small["equal"]},
        ),
    ]
    return Report(bars, rows)


async def measure_size(
    folder: Path, label: str, config: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Compare four nodes with one process on a random Llama of one size."""
    folder /= label.replace(" ", "")
    checkpoint, model = await asyncio.to_thread(make_llama, folder, config)
    say(f"{label}: {len(model.manifest.tasks)} tasks")
    async with (
        run_engines(place_tasks([model])) as engines,
        run_one_piece(checkpoint, CHUNK, CONTEXT) as one_piece,
    ):
        return await compare(engines, model, one_piece, rounds)


async def compare(
    engines: Engines, model: Model, one_piece: OnePiece, rounds: int
) -> dict[str, Any]:
    """Generate alternately with the split and the uncut model; figures are per token."""
    split_ms, one_ms, equal = [], [], True
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}")
        async with engines.session(model.manifest, spread_tasks(model), TOKENS + 1) as session:
            split_s, tokens = await generate(session, TOKENS)
        one_s, expected = await one_piece.generate(TOKENS)
        equal = equal and tokens == expected
        if number:  # the first one warms up
            split_ms.append(1000 * split_s / TOKENS)
            one_ms.append(1000 * one_s / TOKENS)
    added = statistics.median(s - o for s, o in zip(split_ms, one_ms, strict=True))
    return {
        "tasks": len(model.manifest.tasks),
        "split_ms": spread(split_ms),
        "one_ms": spread(one_ms),
        "ratio": round(median_ratio(one_ms, split_ms), 3),
        "added_ms_per_hop": round(added / len(model.manifest.tasks), 3),
        "equal": equal,
    }
