"""``make bench``: transitions and whole executions on one machine, with and without distribution.

    python -m splitup.bench [RUNS]
    python -m splitup.bench kernels [ROUNDS]    one process alone: splitup_deploy.kernelbench

Talk goes to stderr, a JSON object to stdout. Exit code 1 when a bar is missed: transition p50 of at
most 5 ms, submission to result of at most 3 s with blocks of 1 s, output equal to the reference.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from splitup.client.connection import SplitUp
from splitup.client.outcome import Transition, compute_transitions
from splitup.config import NETWORK_FILE
from splitup.demo.report import Comparison, summarise
from splitup.demo.run import (
    MAX_TOKENS,
    MODEL,
    NODE_VRAM_BYTES,
    NODES,
    PROMPT,
    Generation,
    compare,
    find_example,
    generate,
    register,
    until_interrupted,
    wait_for_holders,
)
from splitup.devnet.network import Devnet, DevnetOptions
from splitup.errors import SplitUpError

RUNS: Final = 10
TRANSITION_BAR_MS: Final = 5.0
RESULT_BAR_S: Final = 3.0


def say(text: str) -> None:
    print(text, file=sys.stderr)


async def run_bench(directory: Path, runs: int) -> dict[str, Any]:
    """Start a network, run ``runs`` generations one after the other, and compare each."""
    example = find_example()
    devnet = Devnet(DevnetOptions(directory, NODES, NODE_VRAM_BYTES), say)
    try:
        await devnet.start()
        await register(directory, example)
        async with SplitUp.connect(directory / NETWORK_FILE) as net:
            await wait_for_holders(net, directory, say)
            await net.deposit(100)
            measured = []
            for number in range(runs):
                say(f"execution {number + 1} of {runs}")
                generation = await generate(net, PROMPT, max_tokens=MAX_TOKENS)
                measured.append((generation, await compare(directory, example, generation)))
                await net.receipt(generation.session.execution_id)
        return summarise_runs(measured)
    finally:
        await devnet.stop()


def summarise_runs(measured: list[tuple[Generation, Comparison]]) -> dict[str, Any]:
    """Return the figures of all runs."""
    transitions: list[Transition] = []
    for generation, _ in measured:
        transitions += compute_transitions(generation.session.manifest, generation.trace)
    # the pipeline is empty but for one step once the prompt is through: a token's own latency
    streaming = [g.elapsed_s - g.plan_s for g, _ in measured]
    return {
        "model": MODEL,
        "tasks": len(measured[0][0].session.manifest.tasks),
        "runs": len(measured),
        "equal_to_reference": all(comparison.equal for _, comparison in measured),
        "transition_ms": summarise(transitions),
        "transition_remote_ms": summarise([t for t in transitions if not t.is_local]),
        "transition_local_ms": summarise([t for t in transitions if t.is_local]),
        "submit_to_result_s": _spread([g.elapsed_s for g, _ in measured]),
        "plan_s": _spread([g.plan_s for g, _ in measured]),
        "steps_s": _spread(streaming),
        "distributed_ms_per_step": _spread(
            [1000 * s / g.session.steps for s, (g, _) in zip(streaming, measured, strict=True)]
        ),
        "one_process_ms_per_step": _spread(
            [1000 * c.reference_s / g.session.steps for g, c in measured]
        ),
    }


def is_within_bars(report: dict[str, Any]) -> bool:
    """Return whether the project's own promises hold."""
    return bool(
        report["equal_to_reference"]
        and report["transition_ms"]["p50"] <= TRANSITION_BAR_MS
        and report["submit_to_result_s"]["median"] <= RESULT_BAR_S
    )


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def main() -> None:
    """Run the benchmark."""
    if sys.argv[1:2] == ["kernels"]:
        argv = [sys.executable, "-m", "splitup_deploy.kernelbench", *sys.argv[2:]]
        raise SystemExit(subprocess.run(argv, check=False).returncode)
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    directory = Path(tempfile.mkdtemp(prefix="splitup-bench-"))
    try:
        report = asyncio.run(until_interrupted(run_bench(directory, runs)))
    except SplitUpError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(report, indent=2))
    if not is_within_bars(report):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
