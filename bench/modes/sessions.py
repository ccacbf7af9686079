"""32 sessions on four nodes against one, and what 10,000 steps leave in the daemons' memory.

The ceiling is what this machine's cores compute: one process per core with the uncut model, each
saturated. Where the cores are fewer than the nodes, it lies below what four machines could do.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from bench.modes.split import CONTEXT, generate
from bench.report import Bar, Report, read_cpu_s, read_rss_bytes, say
from bench.testbed.engines import Engines, Model, run_engines
from bench.testbed.models import (
    CHUNK,
    LLAMA_15M,
    cut_example,
    make_llama,
    place_tasks,
    spread_tasks,
)
from bench.testbed.uncut_process import run_one_piece

SESSIONS: Final = 32
TOKENS: Final = 16  # in every session
ROUNDS: Final = 3
STEPS: Final = 10_000
STEPS_PER_SESSION: Final = 200  # within the example's context
AT_ONCE: Final = 4


async def run(quick: bool) -> Report:
    """Measure throughput, then memory."""
    rounds, steps = (1, STEPS // 10) if quick else (ROUNDS, STEPS)
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        checkpoint, model = await asyncio.to_thread(make_llama, Path(name) / "llama", LLAMA_15M)
        example = await asyncio.to_thread(cut_example, Path(name) / "example", CHUNK)
        async with run_engines(place_tasks([model, example])) as engines:
            rows = await measure_throughput(engines, model, rounds)
            growth = await measure_growth(engines, example, steps)
        ceiling = await measure_ceiling(checkpoint)
    single = statistics.median(row["one"] for row in rows)
    ratio = statistics.median(row["many"] / row["one"] for row in rows)
    share = min(row["slowest"] for row in rows)
    bars = [
        Bar(
            f"tokens/s of {SESSIONS} sessions against one",
            round(ratio, 2),
            "×",
            at_least=3.0,
            beside={
                f"ceiling: {os.cpu_count()} saturated processes against one session, ×": round(
                    ceiling["all"] / single, 2
                ),
                "one saturated process against one session, ×": round(ceiling["one"] / single, 2),
                **{
                    name: round(statistics.median(row[name] for row in rows), 2)
                    for name in rows[0]
                    if name.startswith("CPU")
                },
            },
        ),
        Bar("slowest session's tokens/s against the mean", round(share, 2), "×", at_least=0.5),
        Bar(
            f"growth of a daemon's memory over {steps} steps",
            round(growth / 1e6, 1),
            "MB",
            at_most=24.0,
        ),
    ]
    return Report(bars, {"rounds": rows, "ceiling": ceiling})


async def measure_throughput(engines: Engines, model: Model, rounds: int) -> list[dict[str, float]]:
    """Return tokens/s of one session and of many at once, round by round."""
    rows = []
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}")
        [alone] = await generate_at_once(engines, model, 1)
        cpu = _read_cpu(engines)
        each = await generate_at_once(engines, model, SESSIONS)
        seconds = max(each)
        used = {part: cpu_s - cpu[part] for part, cpu_s in _read_cpu(engines).items()}
        if number:
            rows.append(
                {
                    "one": TOKENS / alone,
                    "many": SESSIONS * TOKENS / seconds,
                    "slowest": statistics.mean(each) / seconds,
                    **{
                        f"CPU ms per token, {part}": 1000 * cpu_s / (SESSIONS * (TOKENS + 1))
                        for part, cpu_s in used.items()
                    },
                }
            )
    return rows


async def generate_at_once(engines: Engines, model: Model, count: int) -> list[float]:
    """Generate in sessions that start together; return the seconds of each."""
    gate = asyncio.Barrier(count)

    async def one() -> float:
        async with engines.session(model.manifest, spread_tasks(model), TOKENS + 1) as session:
            await gate.wait()
            return (await generate(session, TOKENS))[0]

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def measure_growth(engines: Engines, model: Model, steps: int) -> int:
    """Return by how many bytes a daemon grows at most over consecutive sessions."""

    async def generate_some(sessions: int) -> None:
        for _ in range(sessions):
            async with engines.session(
                model.manifest, spread_tasks(model), STEPS_PER_SESSION
            ) as session:
                await generate(session, STEPS_PER_SESSION - 1)

    async def generate_all(sessions: int) -> None:
        await asyncio.gather(*(generate_some(sessions // AT_ONCE) for _ in range(AT_ONCE)))

    await generate_all(AT_ONCE)
    before = _read_memory(engines)
    say(f"{steps} steps")
    await generate_all(max(AT_ONCE, steps // STEPS_PER_SESSION))
    return max(a - b for a, b in zip(_read_memory(engines), before, strict=True))


def _read_memory(engines: Engines) -> list[int]:
    return [read_rss_bytes(node.child.pid) for node in engines.nodes]


def _read_cpu(engines: Engines) -> dict[str, float]:
    return {
        "daemons": sum(read_cpu_s(node.child.pid) for node in engines.nodes),
        "workers": sum(read_cpu_s(node.worker_pid) for node in engines.nodes),
        "client": read_cpu_s(os.getpid()),
    }


async def measure_ceiling(checkpoint: Path) -> dict[str, float]:
    """Return tokens/s of one saturated process, and of one per core together."""
    async with AsyncExitStack() as stack:
        pieces = [
            await stack.enter_async_context(run_one_piece(checkpoint, CHUNK, CONTEXT))
            for _ in range(os.cpu_count() or 1)
        ]
        tokens = 4 * TOKENS
        alone, _ = await pieces[0].generate(tokens)
        together = await asyncio.gather(*(piece.generate(tokens) for piece in pieces))
    return {"one": tokens / alone, "all": sum(tokens / seconds for seconds, _ in together)}
