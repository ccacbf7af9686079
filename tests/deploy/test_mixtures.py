"""Routers, shared experts and compressed attention, from Hugging Face directories and GGUF files.

Their logits are those of Hugging Face's own models.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from splitup_deploy.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.model import Sizes
from splitup_deploy.reference import load_reference

from splitup.decode.step import make_causal_step, make_tree_step
from splitup.graph.runtime import TaskProgram
from tests.deploy.checkpoints import (
    GOLDEN,
    TOKENS,
    compute_checkpoint_digest,
    save_checkpoint,
)
from tests.deploy.execution import CutModel
from tests.deploy.ggufs import save_mixture
from tests.deploy.llamas import relative_error
from tests.deploy.mixtures import BLOCKS, CASES
from tests.deploy.steps import feed, run_step, step_inputs

BOUND = 1e-5
CHUNK = Sizes(chunk=8)
V3 = "deepseek-v3"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "mixture_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 as a file: compressed queries, YaRN, groups, a dense block, split expansions."""
    found = tmp_path_factory.mktemp("v3") / "m.gguf"
    save_mixture(found, CASES[V3])
    return found


@pytest.fixture(scope="module")
def program(path: Path) -> TaskProgram:
    return load_reference(str(path), CHUNK)


def test_golden_logits_are_of_these_checkpoints(golden: dict[str, Any]) -> None:
    for name, case in CASES.items():
        assert golden[f"{name}/digest"] == compute_checkpoint_digest(case), "run make_golden.py"


@pytest.mark.parametrize("name", [name for name in CASES if name != V3])
def test_logits_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES[name])
    given = feed(load_reference(str(tmp_path), CHUNK), TOKENS)
    assert relative_error(given, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


def test_logits_of_a_file_agree_in_steps_of_any_size(
    program: TaskProgram, golden: dict[str, Any]
) -> None:
    given = feed(program, TOKENS)
    assert relative_error(given, golden[f"{V3}/steps"]) <= BOUND
    assert relative_error(given, golden[f"{V3}/prefill"]) <= BOUND
    np.testing.assert_array_equal(feed(program, TOKENS, rows=7), given)


@pytest.mark.parametrize("name", [name for name in CASES if name != "deepseek-v2-groups"])
def test_files_have_the_graphs_of_directories(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", CASES[name])
    save_mixture(tmp_path / "m.gguf", CASES[name], split=False)
    file, directory = (load_model(str(tmp_path / source)).traced for source in ("m.gguf", "m"))
    assert file.graph.to_bytes() == directory.graph.to_bytes()


def test_a_tree_and_then_keep_equal_the_sequence(program: TaskProgram) -> None:
    wanted, start = feed(program, TOKENS), 7
    a, b, c, d = TOKENS[start : start + 4]
    tree, parents, path = [a, 3, b, 3, 3, c, 3, d], [-1, 0, 0, 1, 2, 2, -1, 5], (0, 2, 5, 7)
    state = program.new_state()
    run_step(program, state, make_causal_step(TOKENS[:start], 0))
    given = run_step(program, state, make_tree_step(tree, parents, start))
    np.testing.assert_array_equal(given[list(path)], wanted[start : start + 4])
    for place in range(start + 4, len(TOKENS)):
        kept = path if place == start + 4 else ()
        row = run_step(program, state, make_tree_step([TOKENS[place]], [-1], place, kept=kept))
        np.testing.assert_array_equal(row[0], wanted[place])


def test_a_position_keeps_one_compressed_row(path: Path) -> None:
    states = load_model(str(path)).traced.graph.states
    assert [state.shape for state in states] == [(32, 16 + 8)] * 2


def test_cut_equals_whole_and_shared_experts_have_no_gate(path: Path, program: TaskProgram) -> None:
    cut = CutModel(build(str(path), 45_000, sizes=CHUNK))
    tasks = cut.manifest.tasks
    gated = {task.label for task in tasks if task.gate is not None}
    assert gated and all(re.fullmatch(r"block 1 experts \d of \d", label) for label in gated)
    states, state = cut.new_states(), program.new_state()
    steps = [
        make_causal_step(TOKENS[:5], 0),
        make_tree_step(TOKENS[5:9], [-1, 0, 0, 2], 5),
        make_tree_step([TOKENS[7]], [-1], 8, kept=(0, 2, 3)),
    ]
    for step in steps:
        inputs = step_inputs(cut.inputs, step)
        (wanted,) = program.run(state, [inputs[spec.name] for spec in program.inputs])
        assert cut.step(states, inputs)["logits"] == wanted
    for task, compiled in zip(tasks, cut.programs, strict=True):
        assert compiled.allocated_bytes <= task.vram_bytes


def test_quantised_experts_and_attention_stay_quantised(tmp_path: Path) -> None:
    weights = save_mixture(tmp_path / "m.gguf", BLOCKS, forms={"": "Q8_0"})
    save_checkpoint(tmp_path / "m", BLOCKS)
    save_file(weights, tmp_path / "m" / "model.safetensors")
    compiled = build(str(tmp_path / "m.gguf"), 10**9, sizes=CHUNK)
    whole = sum(array.nbytes for array in weights.values())
    assert sum(task.weights_bytes for task in compiled.manifest.tasks) < 0.35 * whole
    given, wanted = (
        feed(load_reference(str(tmp_path / name), CHUNK), TOKENS[:8], rows=4)
        for name in ("m.gguf", "m")
    )
    assert relative_error(given, wanted) <= BOUND
