"""One process on a device, OpenCL unless DEV names another: its steps, beside tinygrad's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.report import ROOT, Bar, Report, median_ratio, say, spread
from bench.testbed.models import LLAMA_15M, LLAMA_124M
from splitup.core.errors import Unavailable
from tests.deploy.llamas import save_llama

CONTEXT: Final = 256
TOKENS: Final = 16
ROUNDS: Final = 5
STEP_BAR: Final = 1.1
MEMORY_BAR: Final = 5.0
_MODELS: Final = (("15 M", LLAMA_15M), ("124 M", LLAMA_124M))
SESSIONS: Final = 8
_MEMORY: Final = """
import json, sys
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from tinygrad.helpers import GlobalCounters
program = load_reference(sys.argv[1], Sizes(context=int(sys.argv[2]), chunk=1))
state = program.new_state()
allocated = GlobalCounters.mem_used_per_device[program.device]
predicted = program.vram_bytes
print(json.dumps({"predicted": predicted, "allocated": allocated}))
"""
_BATCH: Final = """
import json, statistics, sys, time
from splitup.decode.step import make_arrays, make_causal_step
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
context, sessions, rounds = map(int, sys.argv[2:])
program = load_reference(sys.argv[1], Sizes(context=context, chunk=sessions))
states = [program.new_state() for _ in range(sessions)]
times = {"alone": [], "together": []}
for at in range(2 * rounds):
    arrays = make_arrays(make_causal_step([7], at), sessions)
    inputs = [arrays[spec.name].tobytes() for spec in program.inputs]
    begun = time.perf_counter()
    if at % 2 and program.width >= sessions:
        outputs = program.run_together([(state, inputs) for state in states])
    else:
        outputs = [program.run(state, inputs) for state in states]
    times["together" if at % 2 else "alone"].append(1e3 * (time.perf_counter() - begun))
    assert all(one == outputs[0] for one in outputs)
times = {name: round(statistics.median(each[1:]), 2) for name, each in times.items()}
print(json.dumps({"width": program.width, **times}))
"""


class _Process:
    """A program that answers each number of tokens with the seconds they took, and the tokens."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __enter__(self) -> _Process:
        self._read()
        return self

    def __exit__(self, *rest: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise Unavailable(f"{self._process.args!r:.200} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, count: int) -> dict[str, Any]:
        """Return the seconds and the tokens of so many steps."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return self._read()


def run(quick: bool) -> Report:
    """Measure two models, in turns with tinygrad's jitted model on the same weights."""
    os.environ.setdefault("DEV", "CL")
    bars: list[Bar] = []
    figures: dict[str, Any] = {"device": os.environ["DEV"]}
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        for label, config in _MODELS[: 1 if quick else None]:
            folder = Path(name) / label.replace(" ", "")
            save_llama(folder, {**config, "eos_token_id": 2}, scale=0.05)
            rounds = 2 if quick else ROUNDS
            found = compare(folder, rounds)
            figures[label] = found
            name_of_step = f"step of {label} on {figures['device']} against tinygrad's own"
            beside = {key: found[key] for key in ("ours, ms", "tinygrad, ms", "tokens equal")}
            bars.append(Bar(name_of_step, found["ratio"], "×", at_most=STEP_BAR, beside=beside))
            memory = ask(_MEMORY, folder, CONTEXT)
            figures[label]["8 sessions, ms"] = ask(_BATCH, folder, CONTEXT, SESSIONS, 2 + rounds)
            off = abs(memory["allocated"] - memory["predicted"]) / memory["predicted"]
            what = f"memory of {label}, allocated against predicted"
            bars.append(Bar(what, round(100 * off, 3), "%", at_most=MEMORY_BAR, beside=memory))
    return Report(bars, figures)


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    """Return milliseconds per step of both, and the median of the ratios within a round."""
    times: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        ours = stack.enter_context(
            _Process("bench.testbed.uncut_process", str(folder), "1", str(CONTEXT))
        )
        peer = stack.enter_context(
            _Process("bench.testbed.tinygrad_llama", str(folder), str(CONTEXT))
        )
        tokens: Sequence[Any] = [one.generate(TOKENS)["tokens"] for one in (ours, peer)]  # warm up
        for number in range(rounds):
            order = (0, 1) if number % 2 else (1, 0)
            for side in order:
                taken = (ours, peer)[side].generate(TOKENS)["s"]
                times[side].append(1e3 * taken / TOKENS)
            say(f"{folder.name}: {times[0][-1]:.2f} ms, tinygrad {times[1][-1]:.2f} ms")
    return {
        "ratio": round(median_ratio(*times), 3),
        "ours, ms": spread(times[0]),
        "tinygrad, ms": spread(times[1]),
        "medians": round(median(times[0]) / median(times[1]), 3),
        "tokens equal": tokens[0] == tokens[1],
    }


def ask(program: str, folder: Path, *numbers: int) -> dict[str, Any]:
    """Return what a program says of a model."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), *map(str, numbers)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Unavailable("the model could not be loaded")
    said: dict[str, Any] = json.loads(done.stdout)
    return said
