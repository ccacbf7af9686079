"""One process: tokens/s against the memory's bandwidth, and decoded tokens computed again.

A random Llama of 124 M parameters is written as GGUF files in float32, float16 and Q8_0 and
run uncut, with tinygrad's kernels alone ("before") and with the matrix products of
``splitup.cpu.matmul_match``. They are compared with the floor, which is the bytes of the weights
over the read bandwidth measured in the same round. Rounds alternate and medians are of ratios
within a round, because other programs may share the machine; for the same reason one thread is
measured by its CPU time. At last CONTEXT decoded tokens are computed again, as validators do it.
``bench.measure.llama_peer`` compares with llama.cpp.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from splitup_deploy.frontends.decoder.step_function import trace_decoder
from splitup_deploy.frontends.gguf.config import read_config
from splitup_deploy.frontends.gguf.family_table import FAMILIES
from splitup_deploy.frontends.gguf.header import read_gguf
from splitup_deploy.frontends.gguf.model_file import GgufWeights

from bench.report import Bar, Report, say
from bench.testbed.models import LLAMA_15M, LLAMA_124M, TIED, shape_llama
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.rules import check_graph
from tests.deploy.ggufs import save_gguf

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "4 M": shape_llama(256, 640, layers=5, heads=8, kv_heads=4, vocab_size=2_048, **TIED),
    "15 M": LLAMA_15M,
    "124 M": LLAMA_124M,
}
CONTEXT, ROWS, TOKENS = 256, 64, 24
FORMS: Final = ("f32", "f16", "q8_0")
ROUNDS: Final = 3
REPLAY_BARS: Final = {"124 M, f32": 0.25, "124 M, f16": 0.3, "124 M, q8_0": 0.5}
SHARES: Final = (8, 20, 50, 100)  # percent of the tasks that are verified

Run = Callable[[], float]  # seconds


def write_model(path: Path, form: str, config: dict[str, Any] = LLAMA_124M) -> int:
    """Write a random Llama; return the bytes that one token reads, all except the embedding."""
    save_gguf(path, config, forms={"": form.upper()})
    tensors = read_gguf(path).tensors
    return sum(one.end - one.start for name, one in tensors.items() if name != "token_embd.weight")


def load_program(path: Path, threads: int, *, uses_native_code: bool) -> TaskProgram:
    """Compile the uncut model."""
    file = read_gguf(path)
    config = read_config(file, "llama", CONTEXT)
    traced = trace_decoder(config, GgufWeights(file, config, FAMILIES["llama"])).read_weights()

    def get_bytes(name: str) -> memoryview:
        return memoryview(b"".join(traced.weights[name].read()))

    return TaskProgram.from_graph(
        check_graph(traced.graph), get_bytes, threads=threads, uses_native_code=uses_native_code
    )


def make_steps(program: TaskProgram, rows: int, count: int) -> list[list[bytes]]:
    """Return the inputs of steps of so many rows."""
    chunk = next(spec.shape[0] for spec in program.inputs if spec.name == "tokens")
    steps = []
    for step in range(count):
        arrays = make_arrays(make_causal_step([7 + step] * rows, step * rows), chunk)
        steps.append([arrays[spec.name].tobytes() for spec in program.inputs])
    return steps


def load(path: Path, rows: int, threads: int, *, uses_native_code: bool) -> Run:
    """Compile the uncut model and return a function that times TOKENS steps, or one of rows."""
    program = load_program(path, threads, uses_native_code=uses_native_code)
    steps = make_steps(program, rows, TOKENS if rows == 1 else 1)
    # with one thread its CPU time, which excludes other load
    clock = time.process_time if threads == 1 else time.perf_counter

    def run() -> float:
        state = program.new_state()
        start_s = clock()
        for inputs in steps:
            program.run(state, inputs)
        return clock() - start_s

    return run


def measure_replay(path: Path, rounds: int) -> dict[str, float]:
    """Return CPU seconds of decoding CONTEXT tokens, of computing them again, and the ratio.

    Raises AssertionError unless both give the same bytes.
    """
    program = load_program(path, 1, uses_native_code=True)
    steps = make_steps(program, 1, CONTEXT)
    rows: list[tuple[float, float]] = []
    for _ in range(rounds):
        states, start_s = (program.new_state(), program.new_state()), time.process_time()
        wanted = [program.run(states[0], inputs) for inputs in steps]
        middle_s, given = time.process_time(), []
        for first in range(0, CONTEXT, ROWS):
            given += program.run_in_order(states[1], steps[first : first + ROWS])
        rows.append((middle_s - start_s, time.process_time() - middle_s))
        digests = {program.compute_state_digest(state) for state in states}
        assert given == wanted and len(digests) == 1
    decoded, again = (round(statistics.median(column), 2) for column in zip(*rows, strict=True))
    ratio = statistics.median(again / decoded for decoded, again in rows)
    return {"decoded, CPU s": decoded, "again, CPU s": again, "again / decoded": round(ratio, 3)}


def measure_bandwidth() -> float:
    """Return the bytes per second at which one thread sums memory larger than the caches."""
    data = np.ones(2**26, np.float32)
    best = math.inf
    for _ in range(3):
        start_s = time.process_time()
        data.max()
        best = min(best, time.process_time() - start_s)
    return data.nbytes / best


def measure(directory: Path, form: str, threads: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one precision: tokens per second, and ratios to the floor."""
    path = directory / f"{form}.gguf"
    read_bytes = write_model(path, form)
    runs = {
        "before": load(path, 1, 1, uses_native_code=False),
        "decode": load(path, 1, threads, uses_native_code=True),
        "prefill": load(path, ROWS, threads, uses_native_code=True),
    }
    rows: list[dict[str, float]] = []
    for number in range(rounds):
        say(f"{form}, {threads} threads: round {number + 1} of {rounds}")
        row = {name: run() for name, run in runs.items()}
        rows.append({**row, "floor": TOKENS * read_bytes / measure_bandwidth()})
    result: dict[str, Any] = {"weights": form, "threads": threads, "rounds": rounds}
    for name in rows[0]:
        tokens = ROWS if name == "prefill" else TOKENS
        result[f"{name} tok/s"] = round(statistics.median(tokens / row[name] for row in rows), 1)
    for slower in ("before", "floor"):
        ratio = statistics.median(row[slower] / row["decode"] for row in rows)
        result[f"decode / {slower}"] = round(ratio, 2)
    return result


def run(quick: bool) -> Report:
    """Measure every precision with one thread and all, and computing tokens again."""
    rounds = 1 if quick else ROUNDS
    figures: dict[str, Any] = {"device": select_device().to_dict(), "results": [], "replay": {}}
    bars = []
    with tempfile.TemporaryDirectory(prefix="splitup-kernels-") as directory:
        for threads in sorted({1, os.cpu_count() or 1}):
            for form in FORMS:
                figures["results"].append(measure(Path(directory), form, threads, rounds))
        for name, size in SHAPES.items():
            for form in FORMS:
                say(f"{name}, {form}: computing {CONTEXT} tokens again")
                write_model(path := Path(directory) / "again.gguf", form, size)
                row = measure_replay(path, rounds)
                ratio = row["again / decoded"]
                row |= {f"verifying {p} %, % of decoding": p * ratio for p in SHARES}
                figures["replay"][size_and_form := f"{name}, {form}"] = row
                if (at_most := REPLAY_BARS.get(size_and_form)) is not None:
                    what = f"CPU of computing {CONTEXT} tokens again against decoding them"
                    bar = Bar(f"{what}, {size_and_form}", ratio, "×", at_most=at_most, beside=row)
                    bars.append(bar)
    return Report(bars, figures)
