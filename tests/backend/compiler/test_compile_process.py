"""Tasks that are made to compile slowly, or to take much memory: refused, or given up in time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from splitup.backend import runtime
from splitup.backend.compiler import compile_process, schedule
from splitup.backend.compiler.compile_process import (
    compile_apart,
    compile_to_bytes,
    measure_slowness,
)
from splitup.backend.compiler.launch_sizes import compute_size, read_size
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.backend.tinygrad_types import make_variable
from splitup.core import limits, tuning
from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidModel, SplitUpError, TooSlow
from splitup.graph.cost import compute_vram_bytes
from splitup.graph.ir import Graph, Symbol
from splitup.graph.rules import CheckedGraph, check_graph, load_graph
from tests.graph.graphs import make_legal, make_running_sum
from tests.graph.hostile import (
    make_functions,
    make_moves,
    make_random,
    make_shifts,
    make_swelling,
)
from tests.parameters import some_of

DEVICE = select_device().device
REFUSED_S = 1.0  # of CPU, on the machine for which times are predicted


@contextmanager
def limit_cpu() -> Iterator[None]:
    """Allow the CPU time in which a graph is to be refused, by this machine's speed."""
    start_s = time.process_time()
    yield
    assert time.process_time() - start_s < REFUSED_S * measure_slowness()


@pytest.mark.parametrize("levels", [7, 9, 12, 20])
def test_s04_a_value_read_through_exponentially_many_views_is_refused(levels: int) -> None:
    data = make_shifts(levels).to_bytes()
    with limit_cpu(), pytest.raises(InvalidModel, match="'compiling'"):
        load_graph(data)


@pytest.mark.parametrize(
    "graph",
    [
        make_functions("SIN", "float64", 8),
        make_functions("SIN", "float32", 16),
        make_functions("POW", "float64", 8, 3),
        make_functions("POW", "float16", 4, 64),
        make_moves(15),
        make_moves(40),
        make_moves(4000),
    ],
    ids=lambda graph: f"{len(graph.to_bytes())} bytes",
)
def test_s18_compile_bombs_are_refused(graph: Graph) -> None:
    data = graph.to_bytes()
    with limit_cpu(), pytest.raises(InvalidModel, match=r"'compiling'|no graph"):
        load_graph(data)


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(make_shifts(5), marks=pytest.mark.long),
        make_functions("SIN", "float64", 3),
        pytest.param(make_moves(7), marks=pytest.mark.long),
    ],
    ids=lambda graph: f"{len(graph.to_bytes())} bytes",
)
def test_s18_the_largest_legal_bombs_compile_in_time(graph: Graph) -> None:
    assert compile_apart(lambda: check_graph(graph), DEVICE).launches


@pytest.mark.parametrize("seed", some_of(range(6), 5))
def test_s18_what_a_search_finds_compiles_in_time(seed: int) -> None:
    """``python -m bench.measure.compile_times`` searches further."""
    graph = make_random(seed, most_nodes=20)
    assert compile_apart(lambda: graph, DEVICE).launches


def compile_instead(
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[], object],
    error: type[SplitUpError] = InvalidModel,
    patience: int = 1,
) -> int:
    """Let the process do ``work`` in place of compiling; return by how much we grew."""
    monkeypatch.setattr(compile_process, "compile_graph", lambda *args, **options: work())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(error, match=r"given up|too much memory|longer than this machine"):
        compile_to_bytes(lambda: check_graph(make_legal()), DEVICE, patience=patience)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after_kib - before_kib) * 1024


def spin() -> None:
    while True:
        pass


def get_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_s04_what_the_rules_miss_ends_after_the_time_that_this_machine_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowness, patience, allowed_s = 2.0, 2, 2.0
    monkeypatch.setattr(tuning, "COMPILE_S", allowed_s / slowness / patience)
    monkeypatch.setattr(compile_process, "measure_slowness", lambda: slowness)
    before_s = get_children_s()
    compile_instead(monkeypatch, spin, TooSlow, patience)
    took_s = get_children_s() - before_s
    assert 0.7 * allowed_s < took_s < allowed_s + 1, "which the kernel counts by ticks"


def test_a_machine_that_is_too_busy_is_slow_and_the_task_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "COMPILE_WAIT_S", 0.05)
    monkeypatch.setattr(compile_process, "measure_slowness", lambda: 1.0)
    compile_instead(monkeypatch, spin, TooSlow)


def test_s04_what_the_rules_miss_gets_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_instead(monkeypatch, lambda: bytes(2 * tuning.COMPILE_BYTES)) < 2**20
    compile_instead(monkeypatch, lambda: [bytes(1000) for _ in range(10**6)])


def test_s04_a_process_that_dies_is_a_refused_task(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_instead(monkeypatch, os.abort)


def test_a_large_task_may_take_longer() -> None:
    assert limits.MAX_KERNEL_US * tuning.COMPILE_FACTOR <= 1.5 * tuning.COMPILE_S * 1e6


def test_s04_a_task_that_declares_too_little_memory_is_refused() -> None:
    graph = make_swelling(600)
    data = graph.to_bytes()
    needed = compute_vram_bytes(check_graph(graph))
    declared = 10**6
    assert len(data) < 400 and needed > 1200 * 10**6
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidModel) as refused:
        TaskProgram(data, None, memory_bytes=declared)
    for part in (compute_digest(data)[:12], str(needed), str(declared)):
        assert part in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024


def test_s04_a_task_for_a_larger_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_get_machine_bytes", lambda device: 10**9)
    with pytest.raises(InvalidModel, match="1000000000 are in this machine"):
        TaskProgram(make_swelling(600).to_bytes(), None, memory_bytes=10**12)


def test_s04_a_schedule_that_takes_more_than_was_predicted_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_graph = schedule.compile_graph

    def swell(graph: CheckedGraph, device: str, **options: bool) -> schedule.Schedule:
        made = compile_graph(graph, device, **options)
        return replace(made, values=(*made.values, 10**9))

    monkeypatch.setattr(compile_process, "compile_graph", swell)
    with pytest.raises(InvalidModel, match="predicted from its graph"):
        TaskProgram(make_legal().to_bytes(), None)


def test_launch_sizes_are_plain_data() -> None:
    rows = make_variable(Symbol("T", 64))
    for size in (rows, (rows + 3) // 4, (rows * 3 + 5) % 7, rows.maximum(4), rows.minimum(7)):
        assert compute_size(read_size(size), {"T": 9}) == size.sym_infer({"T": 9})
    assert read_size(12) == 12
    with pytest.raises(InvalidModel, match="launch size"):
        read_size(rows.sin())


def test_what_a_process_compiled_before_changes_no_byte() -> None:
    """A node compiles in forks of a process that has prepared tinygrad, and others need not."""
    data, device = make_running_sum(8).to_bytes(), select_device().device
    alone = f"""
import sys
from splitup.backend.compiler import compile_process
from splitup.backend.devices.device_choice import select_device
from splitup.graph.rules import load_graph
compile_process._prepare = lambda device: None
load = lambda: load_graph({data!r})
sys.stdout.buffer.write(compile_process.compile_to_bytes(load, select_device().device))
"""
    made = subprocess.run([sys.executable, "-c", alone], capture_output=True, check=True).stdout
    assert compile_to_bytes(lambda: load_graph(data), device) == made
