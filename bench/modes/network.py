"""Executions on a network of twenty processes, compared with the uncut model."""

from __future__ import annotations

from typing import Final

from bench.report import Bar, Report, say, spread, summarise_ms
from bench.testbed.network import run_example
from splitup.client.outcome import compute_transitions
from splitup.demo.models import find_example
from splitup.demo.report import Generation, ResultComparison
from splitup.demo.run import EXAMPLE, NODES, compare, generate

RUNS: Final = 8


async def run(quick: bool) -> Report:
    """Run generations one after the other, and compare each with the uncut model."""
    measured = []
    async with run_example(NODES, EXAMPLE.node_vram_bytes) as (devnet, net):
        for number in range(2 if quick else RUNS):
            say(f"execution {number + 1}")
            generation = await generate(net)
            measured.append(
                (generation, await compare(devnet.directory, find_example(), generation))
            )
            await net.receipt(generation.session.execution_id)
    return make_report(measured)


def make_report(measured: list[tuple[Generation, ResultComparison]]) -> Report:
    """Return the figures of all runs."""
    transitions = [
        transition
        for generation, _ in measured
        for transition in compute_transitions(generation.session.manifest, generation.trace)
    ]
    elapsed = spread([generation.elapsed_s for generation, _ in measured])
    summary = summarise_ms(transitions)
    figures = {
        "transition_ms": summary,
        "submit_to_result_s": elapsed,
        "plan_s": spread([generation.plan_s for generation, _ in measured]),
    }
    equal = sum(comparison.equal for _, comparison in measured)
    bars = [
        Bar("transition on a whole network, p50", summary["p50"], "ms", at_most=5.0),
        Bar("submission to the last result", elapsed["median"], "s", at_most=3.0),
        Bar("runs equal to the uncut model, of all", equal / len(measured), "×", at_least=1.0),
    ]
    return Report(bars, figures)
