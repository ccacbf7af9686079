"""Compare predicted and real memory and time of a cut model's tasks, and the cost of cutting.

In each round the tasks and the uncut model run one after another, with all rows of the chunk, in
one process on its device. ``python -m bench compile`` does so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.cutting.partition import find_regions
from splitup_deploy.cutting.timing import Clock
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from bench.report import say
from splitup.backend.runtime import State, TaskProgram, describe_device
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import get_task_key, get_weights_key
from splitup.graph.operations.table import MOVEMENT
from splitup.graph.rules import CheckedGraph, load_graph

CLOCK_READINGS: Final = 101
# One core with AVX2, measured (docs/kernels.md, docs/memory.md): products in vectors, all else in
# tinygrad's scalar code, and an additional time of each value.
_BYTES_PER_NS: Final = 30
_PRODUCTS_PER_NS: Final = 90
_REST_PER_NS: Final = 5
LAUNCH_PS: Final = 1_000_000
# Operations that one of these is in scalar code, a polynomial: 85 ms for 18.9 million (kernels.md).
_SERIES: Final = frozenset({"EXP2", "LOG2", "SIN"})
_SERIES_FLOPS: Final = 20


class ProcessorClock(Clock):
    """Predicts times on a processor, where sums of products have special code."""

    def __init__(self, graph: CheckedGraph) -> None:
        super().__init__(graph)
        self._nodes = graph.nodes

    def predict_ps(self, root: int, nodes: Iterable[int]) -> int:
        """Return the time of the value at ``root``; ``nodes`` are computed on the way to it."""
        nbytes, flops_of = self.count(root, nodes)
        products = sum(flops_of[index] for index in self._find_products(flops_of))
        series = sum(n for index, n in flops_of.items() if self._nodes[index].op in _SERIES)
        rest = sum(flops_of.values()) - products + series * (_SERIES_FLOPS - 1)
        busy = max(nbytes * 1000 // _BYTES_PER_NS, products * 1000 // _PRODUCTS_PER_NS)
        return LAUNCH_PS + busy + rest * 1000 // _REST_PER_NS

    def _find_products(self, nodes: Collection[int]) -> set[int]:
        """Return the sums of products, with what widens or looks up operands; ``nodes`` fall."""
        found: set[int] = set()
        for index in nodes:
            node = self._nodes[index]
            if index in found or (node.op == "REDUCE" and self._multiplies(node.srcs[0])):
                found.add(index)
                found.update(src for src in node.srcs if src in nodes)
        return found

    def _multiplies(self, index: int) -> bool:
        while self._nodes[index].op in MOVEMENT:
            index = self._nodes[index].srcs[0]
        return self._nodes[index].op == "MUL"


@dataclass(frozen=True, slots=True)
class Measured:
    """One task, or the uncut model: predicted and real memory, and seconds per step."""

    label: str
    predicted_bytes: int
    allocated_bytes: int
    predicted_ps: int
    seconds: tuple[float, ...]

    @property
    def excess(self) -> float:
        """Return how much more memory was predicted than is allocated: 0.1 is 10 %."""
        return self.predicted_bytes / self.allocated_bytes - 1


def load_tasks(compiled: CompiledModel) -> tuple[list[TaskProgram], list[int]]:
    """Compile every task of a cut model; returns the programs and their predicted picoseconds.

    On a CPU the prediction is for a CPU, and not for the card for which the compiler balances.
    """
    is_processor = describe_device().device.startswith("CPU")
    blobs = {blob.key: blob for blob in compiled.blobs}

    def read(key: str) -> bytes:
        return b"".join(blobs[key].open())

    programs, times_ps = [], []
    for task in compiled.manifest.tasks:
        data = read(get_task_key(task.task_id))
        weights = read(get_weights_key(task.weights_digest)) if task.weights_digest else None
        programs.append(TaskProgram(data, weights))
        graph = load_graph(data)
        clock = ProcessorClock(graph) if is_processor else Clock(graph)
        times_ps.append(sum(clock.predict_ps(r.root, r.nodes) for r in find_regions(graph, {})))
    return programs, times_ps


def make_inputs(specs: Sequence[TensorSpec]) -> list[bytes]:
    """Return a step's inputs: small numbers, which are valid tokens, positions and gates."""
    return [np.ones(spec.shape, np.uint8).astype(_get_dtype(spec)).tobytes() for spec in specs]


def _get_dtype(spec: TensorSpec) -> str:
    if spec.dtype == "bfloat16":  # the upper half of a float32; the lower one is a small number
        return "uint16"
    return spec.dtype


def measure(
    programs: Sequence[TaskProgram], labels: Sequence[str], times_ps: Sequence[int], rounds: int
) -> list[Measured]:
    """Run the programs in turn, ``rounds`` times after one for warming up.

    On a CPU the time is this process's CPU time, which excludes other load. Reading that clock is a
    system call, whose time is subtracted.
    """
    is_processor = describe_device().device.startswith("CPU")
    clock = time.process_time if is_processor else time.perf_counter
    jobs: list[tuple[TaskProgram, State, list[bytes]]] = [
        (program, program.new_state(), make_inputs(program.inputs)) for program in programs
    ]
    clock_s = statistics.median(-(clock() - clock()) for _ in range(CLOCK_READINGS))
    seconds: list[list[float]] = [[] for _ in programs]
    for number in range(rounds + 1):
        for (program, state, inputs), row in zip(jobs, seconds, strict=True):
            begun = clock()
            program.run(state, inputs)
            if number:
                row.append(clock() - begun - clock_s)
    return [
        Measured(label, program.vram_bytes, program.allocated_bytes, predicted, tuple(row))
        for program, label, predicted, row in zip(programs, labels, times_ps, seconds, strict=True)
    ]


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's rank correlation, 1.0 where all predictions are equal.

    Tasks of equal prediction, such as equal blocks, count as one, with their median time.
    """
    groups: dict[float, list[float]] = {}
    for expected, seconds in zip(predicted, measured, strict=True):
        groups.setdefault(expected, []).append(seconds)
    if len(groups) == 1:
        return 1.0
    ranks = _rank(list(groups)), _rank([statistics.median(group) for group in groups.values()])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _rank(numbers: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    means = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(means[places], np.float64)


def compute_overhead(tasks: Sequence[Measured], whole: Measured) -> float:
    """Return how much longer all tasks take than the uncut model: the median over rounds."""
    sums = [sum(row) for row in zip(*(task.seconds for task in tasks), strict=True)]
    ratios = [a / b for a, b in zip(sums, whole.seconds, strict=True)]
    return float(statistics.median(ratios) - 1)


def run_bench(model: str, target_bytes: int, chunk: int, rounds: int) -> dict[str, Any]:
    """Compile, run, compare."""
    sizes = Sizes(chunk=chunk)
    compiled = build(model, target_bytes, sizes=sizes)
    manifest = compiled.manifest
    say(f"{len(manifest.tasks)} tasks of {model} at {target_bytes} bytes")
    programs, times_ps = load_tasks(compiled)
    labels = [*(task.label for task in manifest.tasks), "uncut"]
    *tasks, whole = measure(
        [*programs, load_reference(model, sizes)], labels, [*times_ps, sum(times_ps)], rounds
    )
    for row in (*tasks, whole):
        say(_describe(row))
    shortest = [min(task.seconds) for task in tasks]  # other load only makes it longer
    return {
        "tasks": len(tasks),
        "memory_excess": {
            "min": round(min(row.excess for row in (*tasks, whole)), 4),
            "max": round(max(row.excess for row in (*tasks, whole)), 4),
        },
        "time_rank_correlation": round(rank_correlation(times_ps, shortest), 3),
        "cutting_overhead": round(compute_overhead(tasks, whole), 4),
    }


def _describe(row: Measured) -> str:
    return (
        f"{row.label:40.40} predicted {row.predicted_bytes:12,} allocated {row.allocated_bytes:12,}"
        f" {100 * row.excess:+6.2f} %  predicted {row.predicted_ps / 1e6:10.1f} us"
        f" measured {1e6 * min(row.seconds):10.1f} us"
    )
