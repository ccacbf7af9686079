"""One process: tokens/s against the memory's bandwidth and llama.cpp (docs/kernels.md)."""

from __future__ import annotations

import json
from typing import Any, Final

from bench.measure.kernel_speed import CONTEXT
from bench.report import Bar, Report
from bench.testbed.run_python import run_python

ROUNDS: Final = 3
DECODE_BAR: Final = 0.6
PREFILL_BAR: Final = 0.3
REPLAY_BARS: Final = {"124 M, f32": 0.25, "124 M, f16": 0.3, "124 M, q8_0": 0.5}
SHARES: Final = (8, 20, 50, 100)  # percent of the tasks that are verified


async def run(quick: bool) -> Report:
    """Run ``bench.measure.kernel_speed``; without llama.cpp the bars cannot be measured."""
    rounds = str(1 if quick else ROUNDS)
    found: dict[str, Any] = json.loads(await run_python("-m", "bench.measure.kernel_speed", rounds))
    bars = []
    for row in found["results"]:
        where = f"{row['weights']}, {row['threads']} threads"
        note = "" if "decode / peer" in row else "set $LLAMA_PYTHON to compare with llama.cpp"
        beside = {name: row[name] for name in row if "tok/s" in name or "/ floor" in name}
        for what, at_least in (("decode", DECODE_BAR), ("prefill", PREFILL_BAR)):
            name = f"{what} against llama.cpp, {where}"
            measured = row.get(f"{what} / peer")
            shown = beside if what == "decode" else {}
            bars.append(Bar(name, measured, "×", at_least=at_least, beside=shown, note=note))
    for form, row in found["replay"].items():
        row |= {f"verifying {p} %, % of decoding": p * row["again / decoded"] for p in SHARES}
        if form in REPLAY_BARS:
            name = f"CPU of computing {CONTEXT} decoded tokens again against decoding them, {form}"
            measured = row["again / decoded"]
            bars.append(Bar(name, measured, "×", at_most=REPLAY_BARS[form], beside=row))
    return Report(bars, found)
