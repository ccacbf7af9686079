"""The committee: time to a certificate, a large plan, CPU of heartbeats."""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any, Final

from bench.report import Bar, Report, say
from bench.testbed.run_python import run_python
from splitup.messages.plans import Request
from splitup.protocol.planning.selection import compute_plan
from tests.builders import make_chain_manifest, make_snapshot

TASKS: Final = 1_000
NODES: Final = 10_000
HELD: Final = (1, 3, 10)  # tasks that each node holds
PLANS: Final = 5
MANY_NODES: Final = 100_000  # more than a committee follows: what a plan itself allows


async def run(quick: bool) -> Report:
    """Measure all three."""
    certificate = await _run_committee("certificate")
    beats = await _run_committee("heartbeats")
    count = 2 if quick else PLANS
    plans = {held: time_plans(NODES, held, count) for held in HELD}
    many = time_plans(MANY_NODES, 3, count)
    slowest = max(statistics.median(times[1:]) for times in plans.values())
    bars = [
        Bar(
            "finalized request to certificate, n = 4, p50",
            certificate["p50_ms"],
            "ms",
            at_most=60.0,
            beside={"p90, ms": certificate["p90_ms"], "runs": certificate["runs"]},
        ),
        Bar(
            f"plan of {TASKS} tasks over {NODES} nodes",
            round(slowest, 1),
            "ms",
            at_most=150.0,
            beside={
                f"each holds {held}, ms (first call)": [
                    round(statistics.median(times[1:]), 1),
                    round(times[0], 1),
                ]
                for held, times in plans.items()
            },
        ),
        Bar(
            f"plan of {TASKS} tasks over {MANY_NODES} nodes that hold 3 each",
            round(statistics.median(many[1:]), 1),
            "ms",
            at_most=300.0,
            beside={"first call, ms": round(many[0], 1)},
        ),
        Bar(
            f"heartbeats of {NODES} nodes at one member, one a second each: CPU",
            beats["cores"],
            "cores",
            at_most=1.0,
            beside={"floor, signature and parsing, µs per beat": beats["verify_us"]},
        ),
        Bar(
            "… received",
            beats["mbit_per_s"],
            "Mbit/s",
            at_most=20.0,
            beside={"bytes of a heartbeat": beats["bytes_per_beat"]},
        ),
    ]
    return Report(bars, {"certificate": certificate, "heartbeats": beats})


async def _run_committee(mode: str) -> dict[str, Any]:
    say(mode)
    value: dict[str, Any] = json.loads(await run_python("-m", "bench.measure.committee_load", mode))
    return value


def time_plans(nodes: int, held: int, count: int) -> list[float]:
    """Return the CPU milliseconds of plans over one new snapshot, including the first plan."""
    say(f"plans, {nodes} nodes, {held} tasks held")
    resident = {n: [(n * held + i) % TASKS for i in range(held)] for n in range(1, nodes + 1)}
    snapshot = make_snapshot(nodes, TASKS, resident=resident)
    manifest = make_chain_manifest(TASKS)
    request = Request(
        chain_id=31337,
        market="0x" + "22" * 20,
        execution_id="0x" + os.urandom(32).hex(),
        model_id=manifest.model_id,
        client="0x" + "33" * 20,
        client_key="0x" + "44" * 32,
        steps=1,
        max_price_micro_usdc=10**6,
        deadline=2**31,
        snapshot_sequence=1,
        snapshot_root="0x" + "44" * 32,
        block_hash="0x" + "55" * 32,
        verify_bps=800,
    )
    times = []
    for number in range(count + 1):
        begun = time.process_time()
        compute_plan(request, f"0x{number:064x}", snapshot, manifest)
        times.append(1000 * (time.process_time() - begun))
    return times
