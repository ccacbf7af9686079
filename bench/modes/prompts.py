"""Long prompts of a published model: four nodes against one process, and beside another's text.

SmolLM2 135M, which pip fetches once. Both sides compute the same steps of ``CHUNK`` tokens. The
steps of a prompt need no outputs of each other, so a client sends all at once and nodes work on as
many of them as there are nodes, as far as the machine has processors.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.report import Bar, Report, median_ratio, read_cpu_s, read_tree_cpu_s, say, spread
from bench.testbed.engines import Engines, Model, run_engines
from bench.testbed.models import NODES, cut_published, place_tasks, spread_tasks
from bench.testbed.uncut_process import (
    FIRST,
    Arrays,
    OnePiece,
    make_prompt_arrays,
    make_step_arrays,
    pick,
    run_one_piece,
)
from splitup.client.execution.session import Session
from splitup.client.outcome import compute_percentile
from splitup.demo.models import MODELS

CHUNK: Final = 16  # of the demo with this model
CONTEXT: Final = 2_048
PROMPTS: Final = (100, 500, 2_000)
ROUNDS: Final = 3
TOKENS: Final = 24  # of a text that nothing runs beside
_MS: Final = 1_000


@dataclass(slots=True)
class Rounds:
    """What prompts of one length took, by round."""

    split_s: list[float] = field(default_factory=list)
    split_cpu_s: list[float] = field(default_factory=list)
    one_s: list[float] = field(default_factory=list)
    one_cpu_s: list[float] = field(default_factory=list)
    equal: bool = True

    @property
    def ratio(self) -> float:
        """Return how much faster four nodes read than one process."""
        return round(median_ratio(self.one_s, self.split_s), 3)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "split_s": spread(self.split_s),
            "one_s": spread(self.one_s),
            "ratio": self.ratio,
            "split_cpu_s": spread(self.split_cpu_s),
            "one_cpu_s": spread(self.one_cpu_s),
            "cpu_ratio": round(median_ratio(self.split_cpu_s, self.one_cpu_s), 3),
            "equal": self.equal,
        }


async def run(quick: bool) -> Report:
    """Measure how fast prompts are read, then another's text beside the longest one."""
    source = await asyncio.to_thread(MODELS["smollm2"].find)
    rounds = 1 if quick else ROUNDS
    prompts = PROMPTS[:-1] if quick else PROMPTS
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        model = await asyncio.to_thread(cut_published, source, Path(name) / "cut", CHUNK, CONTEXT)
        async with run_engines(place_tasks([model])) as engines:
            async with run_one_piece(source, CHUNK, CONTEXT) as one_piece:
                found = await compare(engines, model, one_piece, prompts, rounds)
            gaps = await measure_gaps(engines, model, prompts[-1], rounds)
    longest = found[prompts[-1]]
    bound = min(NODES, os.cpu_count() or 1)
    bars = [
        Bar(
            f"a prompt of {prompts[-1]:,} tokens over four nodes against one process of one thread",
            longest.ratio,
            "×",
            at_least=0.8,
            beside={"what this machine allows, at most": bound, "tokens equal": longest.equal},
        ),
        Bar(
            f"p99 gap between tokens against their median, beside a prompt of {prompts[-1]:,}",
            gaps["p99_to_median"],
            "×",
            at_most=3,
            beside={
                "median gap beside it, ms": gaps["beside_ms"]["median"],
                "median gap alone, ms": gaps["alone_ms"]["median"],
            },
        ),
    ]
    return Report(bars, {"prompts": {n: one.to_dict() for n, one in found.items()}, "gaps": gaps})


# ---- time to the first token -------------------------------------------------------------------


async def compare(
    engines: Engines, model: Model, one_piece: OnePiece, prompts: tuple[int, ...], rounds: int
) -> dict[int, Rounds]:
    """Read every prompt alternately with the split and the uncut model."""
    await read_split(engines, model, CHUNK)  # warms up
    await one_piece.read(CHUNK)
    found = {tokens: Rounds() for tokens in prompts}
    for number in range(rounds):
        for tokens, one in found.items():
            say(f"round {number + 1} of {rounds}: {tokens} tokens")
            split_s, split_cpu_s, token = await read_split(engines, model, tokens)
            one_s, one_cpu_s, expected = await one_piece.read(tokens)
            one.split_s.append(split_s)
            one.split_cpu_s.append(split_cpu_s)
            one.one_s.append(one_s)
            one.one_cpu_s.append(one_cpu_s)
            one.equal &= token == expected
    return found


async def read_split(engines: Engines, model: Model, tokens: int) -> tuple[float, float, int]:
    """Return the seconds to the first token, those of all processors, and the token."""
    steps = make_prompt_arrays(tokens, CHUNK, CONTEXT)
    async with engines.session(model.manifest, spread_tasks(model), len(steps)) as session:
        begun_s, begun_cpu_s = time.perf_counter(), _read_cpu(engines)
        token = await read_prompt(session, steps)
        return time.perf_counter() - begun_s, _read_cpu(engines) - begun_cpu_s, token


async def read_prompt(session: Session, steps: list[Arrays]) -> int:
    """Send all steps as a client does; return the token after the last one."""
    outputs = await asyncio.gather(*map(session.submit, steps))
    return pick(outputs[-1]["logits"])


def _read_cpu(engines: Engines) -> float:
    return read_cpu_s(os.getpid()) + sum(read_tree_cpu_s(node.child.pid) for node in engines.nodes)


# ---- another's text ----------------------------------------------------------------------------


async def measure_gaps(engines: Engines, model: Model, tokens: int, rounds: int) -> dict[str, Any]:
    """Generate in one session, alone and while another one reads a prompt, in turn."""
    alone_ms: list[float] = []
    beside_ms: list[float] = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}: a text beside {tokens} tokens")
        alone, beside = await _write_beside(
            engines, model, make_prompt_arrays(tokens, CHUNK, CONTEXT)
        )
        alone_ms += alone
        beside_ms += beside
    nanoseconds = [round(1e6 * value) for value in beside_ms]
    p99 = round(compute_percentile(nanoseconds, 99) / 1e6, 3)
    return {
        "alone_ms": spread(alone_ms),
        "beside_ms": {**spread(beside_ms), "p99": p99, "count": len(beside_ms)},
        "p99_to_median": round(p99 / statistics.median(beside_ms), 3),
    }


async def _write_beside(
    engines: Engines, model: Model, steps: list[Arrays]
) -> tuple[list[float], list[float]]:
    """Return the gaps between tokens before and while another session reads a prompt."""
    runs = spread_tasks(model)
    async with (
        engines.session(model.manifest, runs, CONTEXT) as text,
        engines.session(model.manifest, runs, len(steps)) as other,
    ):
        writer = _Writer(text)
        alone = [await writer.write() for _ in range(1 + TOKENS)]
        reading = asyncio.create_task(read_prompt(other, steps))
        beside = []
        while not reading.done() and writer.position < CONTEXT:
            beside.append(await writer.write())
        await reading
    return alone[1:], beside  # the first one waits for the session to open


class _Writer:
    """Writes a text greedily."""

    def __init__(self, session: Session) -> None:
        self.position = 0
        self._session = session
        self._token = FIRST

    async def write(self) -> float:
        """Write a token; return the milliseconds it took."""
        begun = time.perf_counter()
        outputs = await self._session.step(make_step_arrays(self._token, self.position, CHUNK))
        self._token = pick(outputs["logits"])
        self.position += 1
        return _MS * (time.perf_counter() - begun)
