"""Search for graphs that take longer to compile than the rules predict.

    python -m bench.measure.compile_times --seeds 400
    python -m bench.measure.compile_times task.json…

Random legal graphs, each of one kernel, made as expensive as the rules allow; or the task graphs in
files. The slowest ones are printed, with the CPU time and memory of compiling, and what was
predicted. ``splitup.graph.compile_cost`` holds the numbers that this checks.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.core import tuning
from splitup.graph.rules import CheckedGraph, load_graph
from tests.graph.hostile import make_random

_SHOWN: Final = 10
_LIMIT_S: Final = 120


class Measured(NamedTuple):
    """The CPU time of one graph, the memory that it took, and the prediction."""

    took_s: float
    grown_bytes: int
    predicted_s: float
    nodes: int
    name: str

    def __str__(self) -> str:
        return (
            f"{self.took_s:6.2f} s, {self.predicted_s:6.2f} predicted, "
            f"{self.grown_bytes / 1e6:4.0f} MB, {self.nodes:5} nodes: {self.name}"
        )


def measure(name: str, graph: CheckedGraph) -> Measured:
    """Compile a graph in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT_S, _LIMIT_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with suppress(Exception):  # tinygrad raises anything; the time until then counts as well
            compile_graph(graph, select_device().device)
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(writer, str((after_kib - before_kib) * 1024).encode())
        os._exit(0)
    os.close(writer)
    grown = int(os.read(reader, 64) or b"0")
    os.close(reader)
    _, _, usage = os.wait4(child, 0)
    took_s = usage.ru_utime + usage.ru_stime
    return Measured(took_s, grown, graph.compile_us / 1e6, len(graph.nodes), name)


def find_graphs(paths: list[Path], seeds: int, first: int) -> Iterator[tuple[str, CheckedGraph]]:
    """Yield the graphs in files, or random ones."""
    for path in paths:
        yield path.name, load_graph(path.read_bytes())
    for seed in [] if paths else range(first, first + seeds):
        yield f"seed {seed}", make_random(seed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.measure.compile_times")
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    select_device()
    rows = []
    for name, graph in find_graphs(options.paths, options.seeds, options.first):
        rows.append(measure(name, graph))
        print(rows[-1], file=sys.stderr, flush=True)
    rows.sort(reverse=True)
    print(f"{len(rows)} graphs; the slowest:", *map(str, rows[:_SHOWN]), sep="\n")
    print("longest against the prediction:", max(rows, key=lambda row: row[0] / row[2]))
    late = sum(row.took_s > tuning.COMPILE_S for row in rows)
    print(f"{late} took more than {tuning.COMPILE_S:.0f} s")


if __name__ == "__main__":
    main()
