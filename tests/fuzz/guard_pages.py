"""Run legal graphs on hostile inputs in guarded memory, and compare with the reference.

    PYTHONPATH=.:node:oracle:deploy python -m tests.fuzz.guard_pages [--seconds N] [--seed N]
    PYTHONPATH=.:node:oracle:deploy python -m tests.fuzz.guard_pages --graph N

A **case** is one step, batch or pass of one graph. Each runs twice, with every buffer right behind
a page that may not be touched and right before one, with other bytes around, in one thread and in
two. Each has to give the same bytes both times, in a batch or pass those that it gives alone, and
with and without native code what the reference allows. A find prints the line that replays its
graph; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import math
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Final
from unittest.mock import patch

from splitup.backend import runtime
from splitup.backend.compiler.schedule import Schedule, compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import State, TaskProgram
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.cpu import native_kernels, vector_codegen
from splitup.graph.arrays import Array, decode_array
from splitup.graph.error_bound import compute_bounds, is_within
from splitup.graph.ir import bind_rows
from splitup.graph.operations.table import PARAMS
from splitup.graph.rules import CheckedGraph, check_graph
from tests.fuzz.guarded_memory import (
    GuardedMemory,
    Surroundings,
    guard_allocations,
    keep_freed_buffers,
    move_values,
    separate_values,
    watch_values,
)
from tests.fuzz.legal_graphs import Case, draw_inputs, draw_rows, make_case

AROUND: Final = (Surroundings("start", 0xFF), Surroundings("end", 0x5A))
STEPS: Final = 10  # of a graph, one after the other
BATCHES: Final = 6
PASSES: Final = 2
CHUNK: Final = 16  # graphs of a process: what it allocates is unmapped when it ends
LIMIT_S: Final = 60  # of a graph, compiling included; a machine with other work stops for seconds


class Find(Exception):
    """What a task did that it must not do."""


# ---- one graph ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Backend:
    """A case's programs of one backend, one in each surroundings, and their states."""

    name: str
    memories: list[GuardedMemory]
    programs: list[TaskProgram]
    states: list[State] = field(init=False)

    def __post_init__(self) -> None:
        self.states = self.make_states()

    def make_states(self) -> list[State]:
        states = []
        for program, memory in zip(self.programs, self.memories, strict=True):
            with guard_allocations(memory):
                states.append(program.new_state())
        return states

    def each(self, run: Callable[[int], tuple[object, ...]], what: str) -> tuple[object, ...]:
        """Return what ``run`` gives in all surroundings."""
        results = []
        for place, memory in enumerate(self.memories):
            with guard_allocations(memory):
                results.append(run(place))
            if not memory.is_intact():
                raise Find(f"{what}, {self.name}: it wrote around a buffer")
        if any(result != results[0] for result in results):
            raise Find(f"{what}, {self.name}: a result depends on what lies around the buffers")
        return results[0]


def try_case(case: Case, chance: random.Random) -> tuple[str, int]:
    """Run one graph; return its kind, or "refused", and the number of cases. Raises Find."""
    with (
        patch.object(native_kernels, "SEQUENCE_WORK", 0),
        patch.object(native_kernels, "THREAD_WORK", 0),
        patch.object(vector_codegen, "THREAD_WORK", 0),
    ):
        return _try_case(case, chance)


def _try_case(case: Case, chance: random.Random) -> tuple[str, int]:
    try:
        backends = _load(case)
    except InvalidModel:
        return "refused", 1
    for step in range(STEPS):
        _try_step(case, backends, chance, f"step {step}")
    batches = sum(_try_batches(case.graph, backend, chance) for backend in backends)
    passes = sum(_try_passes(case.graph, backend, chance) for backend in backends)
    return case.kind, STEPS + batches + passes


def _load(case: Case) -> list[_Backend]:
    with separate_values():
        native = compile_graph(case.graph, "CPU")
        schedules = {"native code": native}
        if native.natives:
            schedules["tinygrad"] = compile_graph(case.graph, "CPU", uses_native_code=False)
    return [_load_backend(case, name, schedule) for name, schedule in schedules.items()]


def _load_backend(case: Case, name: str, schedule: Schedule) -> _Backend:
    memories, programs = [], []
    for threads, around in enumerate(AROUND, 1):
        memory, moved = GuardedMemory(around), move_values(schedule, around)

        def get_schedule(*args: object, moved: Schedule = moved, **options: object) -> Schedule:
            return moved

        with (
            guard_allocations(memory),
            patch.object(runtime, "compile_once", get_schedule),
            # values with guard pages between them take more memory than predicted
            patch.object(runtime, "_check_schedule", lambda *arguments: None),
        ):
            program = TaskProgram.from_graph(
                case.graph,
                lambda weight: memoryview(case.weights[weight]),
                uses_native_code=name == "native code",
                threads=threads,
            )
        watch_values(memory, program, moved)
        memories.append(memory)
        programs.append(program)
    return _Backend(name, memories, programs)


def _try_step(case: Case, backends: Sequence[_Backend], chance: random.Random, what: str) -> None:
    rows = draw_rows(case.graph, chance)
    inputs = draw_inputs(case.graph, rows, chance)
    for backend in backends:
        before = _read_state(backend.states[0])

        def run(place: int, backend: _Backend = backend) -> tuple[object, ...]:
            outputs = backend.programs[place].run(backend.states[place], inputs)
            return (*outputs, *_read_state(backend.states[place]))

        given = backend.each(run, what)
        names = [output.name for output in case.graph.outputs]
        names += [state.name for state in case.graph.states]
        wanted = _compute_reference(case, rows, [*inputs, *before])
        for name, data, (value, bound, dtype) in zip(names, given, wanted, strict=True):
            claimed = decode_array(TensorSpec(name, dtype, value.shape), data)
            if not is_within(claimed, value, bound):
                raise Find(f"{what}, {backend.name}, rows {rows}: {name} is not the reference's")


def _compute_reference(
    case: Case, rows: dict[str, int], data: Sequence[bytes]
) -> list[tuple[Array, Array, str]]:
    """Return value, bound and dtype of every output and update."""
    graph = check_graph(bind_rows(case.graph, rows))
    given = {("INPUT", place): spec for place, spec in enumerate(graph.inputs)}
    given |= {("STATE", place): spec for place, spec in enumerate(graph.states)}
    params = {
        key: decode_array(spec, part) for (key, spec), part in zip(given.items(), data, strict=True)
    }
    for place, weight in enumerate(graph.weights):
        params["WEIGHT", place] = decode_array(weight.spec, case.weights[weight.name])
    values = {i: params[n.op, n.arg] for i, n in enumerate(graph.nodes) if n.op in PARAMS}
    bounds = compute_bounds(graph, [i for i in range(len(graph.nodes)) if i not in values], values)
    roots = [output.node for output in graph.outputs] + [update.node for update in graph.updates]
    return [(values[root], bounds[root], graph.nodes[root].dtype) for root in roots]


def _read_state(state: State) -> tuple[bytes, ...]:
    return tuple(bytes(buffer.as_memoryview()) for buffer in state._buffers[state._parity])


def _try_batches(graph: CheckedGraph, backend: _Backend, chance: random.Random) -> int:
    """Run batches, which have to give what their steps give alone; return their number."""
    width = min(backend.programs[0].width, 3)
    if width < 2:
        return 0
    alone = [backend.make_states() for _ in range(width)]
    together = [backend.make_states() for _ in range(width)]
    for batch in range(BATCHES):
        rows = [draw_rows(graph, chance, width) for _ in range(width)]
        if chance.random() < 0.5:
            rows = [rows[0]] * width
        while not backend.programs[0].fits(rows):
            rows.pop()
        order = chance.sample(range(width), len(rows))
        inputs = [draw_inputs(graph, one, chance) for one in rows]

        def run(
            place: int, order: Sequence[int] = order, inputs: Sequence[list[bytes]] = inputs
        ) -> tuple[object, ...]:
            program = backend.programs[place]
            steps = [
                (together[slot][place], data) for slot, data in zip(order, inputs, strict=True)
            ]
            given = program.run_together(steps)
            wanted = [
                program.run(alone[slot][place], data)
                for slot, data in zip(order, inputs, strict=True)
            ]
            states = [_read_state(row[place]) for row in (*together, *alone)]
            if given != wanted or states[:width] != states[width:]:
                raise Find(f"{backend.name}: a batch differs from its single steps")
            return (*map(tuple, given), *states)

        backend.each(run, f"batch {batch}")
    return BATCHES


def _try_passes(graph: CheckedGraph, backend: _Backend, chance: random.Random) -> int:
    """Run consecutive steps in one pass, which have to give what they give one after the other."""
    if not backend.programs[0].merges:
        return 0
    alone, merged = backend.make_states(), backend.make_states()
    for number in range(PASSES):
        rows = [draw_rows(graph, chance, 3) for _ in range(3)]
        while any(sum(one[s.name] for one in rows) > s.maximum for s in graph.symbols):
            rows.pop()
        inputs = [draw_inputs(graph, one, chance) for one in rows]

        def run(place: int, inputs: Sequence[list[bytes]] = inputs) -> tuple[object, ...]:
            program = backend.programs[place]
            given = program.run_in_order(merged[place], inputs)
            wanted = [program.run(alone[place], data) for data in inputs]
            states = _read_state(merged[place]), _read_state(alone[place])
            if given != wanted or states[0] != states[1]:
                raise Find(f"{backend.name}: a pass differs from its single steps")
            return (*map(tuple, given), states[0])

        backend.each(run, f"pass {number}")
    return PASSES


# ---- many graphs, in processes that may die ----------------------------------------------------


@dataclass(slots=True)
class Report:
    """What was run and what was found, by graph."""

    cases: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    finds: dict[int, str] = field(default_factory=dict)


def _work(numbers: Sequence[int], pipe: Connection) -> None:
    """Try graphs; before each, say which, and afterwards what came out."""
    faulthandler.disable()  # the parent says which graph it was
    select_device(0)
    keep_freed_buffers()
    for number in numbers:
        pipe.send(number)
        signal.alarm(LIMIT_S)
        try:
            pipe.send(try_case(make_case(number), random.Random(number)))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # without what a parent such as pytest would do at its end


@dataclass(slots=True)
class _Worker:
    process: ForkProcess
    pipe: Connection
    left: list[int]
    number: int = -1  # of the graph that it tries


def search(
    numbers: Iterable[int], *, cases: float, seconds: float = 1e9, workers: int = 2
) -> Report:
    """Try graphs until so many cases have run, or the time is over."""
    fork, report, ends = multiprocessing.get_context("fork"), Report(), time.monotonic() + seconds
    chunks: Iterator[list[int]] = _cut(numbers)
    running: dict[Connection, _Worker] = {}

    def start(chunk: list[int]) -> None:
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_work, args=(chunk, theirs))
        process.start()
        theirs.close()
        running[ours] = _Worker(process, ours, list(chunk))

    for chunk in itertools.islice(chunks, workers):
        start(chunk)
    while running:
        for pipe in wait(list(running)):
            worker = running[pipe]
            try:
                _note(report, worker, worker.pipe.recv())
                continue
            except EOFError:
                del running[pipe]
                worker.process.join()
            if worker.process.exitcode != 0:
                code = -(worker.process.exitcode or 0)
                report.finds[worker.number] = f"ended by {signal.Signals(code).name}"
            if report.cases < cases and time.monotonic() < ends:
                chunk = worker.left or next(chunks, [])
                if chunk:
                    start(chunk)
    return report


def _cut(numbers: Iterable[int]) -> Iterator[list[int]]:
    source = iter(numbers)
    while chunk := list(itertools.islice(source, CHUNK)):
        yield chunk


def _note(report: Report, worker: _Worker, message: int | str | tuple[str, int]) -> None:
    if isinstance(message, int):
        worker.number = message
        worker.left.remove(message)
    elif isinstance(message, str):
        report.finds[worker.number] = message
    else:
        report.kinds[message[0]] += 1
        report.cases += message[1]


def describe_find(number: int, find: str) -> str:
    """Return what happened and the line that replays it."""
    path = "PYTHONPATH=.:node:oracle:deploy"
    return f"{find}: {path} python -m tests.fuzz.guard_pages --graph {number}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guard_pages")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first graph")
    parser.add_argument("--graph", type=int, help="try this graph only, in this process")
    options = parser.parse_args()
    if options.graph is not None:
        select_device(0)
        keep_freed_buffers()
        print(*try_case(make_case(options.graph), random.Random(options.graph)))
        return
    print(f"--seed {options.seed}", flush=True)
    report = search(
        itertools.count(options.seed),
        cases=math.inf,
        seconds=options.seconds,
        workers=os.cpu_count() or 1,
    )
    for number, find in report.finds.items():
        print(describe_find(number, find))
    print(f"{report.cases} cases, {len(report.finds)} finds: {dict(report.kinds)}")
    raise SystemExit(1 if report.finds else 0)


if __name__ == "__main__":
    main()
