"""The promise of ADR 1: a cut model gives the same bytes as the whole one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from splitup_deploy.cutting.build import build, parse_size
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.runtime import describe_device
from tests.deploy.execution import CutModel
from tests.deploy.llamas import EXAMPLE, compute_logits, load_example, relative_error
from tests.deploy.steps import as_inputs

TARGET = parse_size("1.3MB")
CHUNK = Sizes(chunk=8)
STEPS = 16


def draw_tokens(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, 2048, count)]


@pytest.fixture(scope="module")
def cut() -> CutModel:
    return CutModel(build(str(EXAMPLE), TARGET, sizes=CHUNK))


def test_the_example_is_cut_into_balanced_tasks(cut: CutModel) -> None:
    tasks = cut.manifest.tasks
    assert 8 <= len(tasks) <= 12
    assert all(task.vram_bytes <= TARGET for task in tasks)
    assert max(t.vram_bytes for t in tasks) <= 1.3 * min(t.vram_bytes for t in tasks)
    assert cut.manifest.edges() == [(i, i + 1) for i in range(len(tasks) - 1)]
    labels = [task.label for task in tasks]
    assert labels[0] == "embed" and labels[3] == "block 1 attention" and labels[-1] == "head"
    assert sum(port.spec.row_bytes for task in tasks for port in task.outputs) < 24 * 1024
    for task, program in zip(tasks, cut.programs, strict=True):
        assert program.allocated_bytes <= program.vram_bytes == task.vram_bytes
        assert program.state_bytes == task.state_bytes


def test_equal_bytes_and_right_numbers(cut: CutModel) -> None:
    whole, tokens = load_reference(str(EXAMPLE), CHUNK), draw_tokens(STEPS)
    states, state = cut.new_states(), whole.new_state()
    logits = []
    for position, token in enumerate(tokens):
        inputs = as_inputs(cut.inputs, token, position)
        (wanted,) = whole.run(state, [inputs[spec.name] for spec in whole.inputs])
        assert cut.step(states, inputs)["logits"] == wanted
        logits.append(np.frombuffer(wanted, np.float32))
    config, weights = load_example()
    expected = compute_logits(config, weights, tokens, cache="float16")
    assert relative_error(np.stack(logits), expected) <= 1e-4


def test_two_executions_on_the_same_programs(cut: CutModel) -> None:
    texts = [draw_tokens(12), draw_tokens(24)[12:]]
    alone = []
    for text in texts:
        states = cut.new_states()
        alone.append([cut.step(states, as_inputs(cut.inputs, t, p)) for p, t in enumerate(text)])
    both = [cut.new_states(), cut.new_states()]
    mixed: list[list[dict[str, bytes]]] = [[], []]
    for position in range(12):
        for which, text in enumerate(texts):
            inputs = as_inputs(cut.inputs, text[position], position)
            mixed[which].append(cut.step(both[which], inputs))
    assert mixed == alone


@pytest.mark.skipif(not shutil.which("clang"), reason="needs clang")
@pytest.mark.skipif("CLANG" in os.environ.get("DEV", ""), reason="this run uses clang already")
def test_equal_bytes_with_clang(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            __file__,
            "-k",
            "equal_bytes_and",
        ],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "DEV": "CPU:CLANG", "CACHEDB": str(tmp_path / "cache.db")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert describe_device().renderer != "CLANG"  # so this test has seen another one
