"""Kernels for cards that are not here, compiled and not run (bench/reports/gpus.md)."""

from __future__ import annotations

import json

from bench.measure.card_kernels import TARGETS
from bench.report import Bar, Report
from bench.testbed.run_python import run_python


async def run(quick: bool) -> Report:
    """Run ``bench.measure.card_kernels``: with one target where it is ``quick``."""
    targets = list(TARGETS)[:1] if quick else []
    found = json.loads(await run_python("-m", "bench.measure.card_kernels", *targets))
    bars = [
        Bar(
            f"tasks that do not compile for {name}",
            None if "error" in rows else float(sum(len(row["failed"]) for row in rows.values())),
            "",
            at_most=0.0,
            note=str(rows.get("error", "")),
        )
        for name, rows in found.items()
    ]
    return Report(bars, found)
