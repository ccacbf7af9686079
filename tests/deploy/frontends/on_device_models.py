"""One small model of every kind on this process's device, against the reference interpreter.

``tests/backend/devices/test_stand_ins.py`` runs this on several devices; on one it runs with
``DEV=CL pytest tests/deploy/frontends/on_device_models.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.runtime import TaskProgram
from splitup.decode.step import StepInput, make_causal_step, make_tree_step
from splitup.graph.gates import compute_zero_step
from tests.deploy import checkpoints, hybrids, mixtures, moes
from tests.deploy.execution import CutModel
from tests.deploy.ggufs import save_gguf
from tests.deploy.llamas import relative_error
from tests.deploy.onnxes import save_vision
from tests.deploy.reference_program import ReferenceProgram, load_graph
from tests.deploy.steps import as_inputs, check_together, run_step

CHUNK, BOUND = 4, 1e-4
TOKENS = checkpoints.TOKENS
STEPS = (
    make_causal_step(TOKENS[:3], 0),
    make_tree_step(TOKENS[3:6], [-1, 0, 0], 3),
    make_tree_step(TOKENS[6:7], [-1], 5, kept=(0, 2)),
)


def save_case(path: Path, case: checkpoints.Case, **change: object) -> Path:
    """Write a checkpoint of one layer."""
    change = {"num_hidden_layers": 1, **change}
    checkpoints.save_checkpoint(path, replace(case, change={**case.change, **change}))
    return path


def save_quantised(path: Path) -> Path:
    config = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    forms = {"": "Q8_0", "ffn_gate": "Q4_0", "ffn_up": "Q6_K", "token_embd": "Q4_K"}
    save_gguf(path.with_suffix(".gguf"), config, forms={**forms, "attn_q": "F16"})
    return path.with_suffix(".gguf")


LATENT = mixtures.CASES["deepseek-v3"]
MODELS: dict[str, Callable[[Path], Path]] = {
    "bfloat16": lambda path: save_case(path, checkpoints.CASES["llama3-bfloat16"]),
    "windows and soft caps": lambda path: save_case(path, checkpoints.CASES["gemma2"]),
    "experts": lambda path: save_case(path, LATENT, first_k_dense_replace=0),
    "recurrent": lambda path: save_case(
        path, hybrids.CASES["qwen3.5"], layer_types=["linear_attention"]
    ),
    "quantised": save_quantised,
}


def load(model: Path, sizes: Sizes | None) -> tuple[TaskProgram, ReferenceProgram]:
    return load_reference(str(model), sizes), load_graph(str(model), sizes)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_trees_and_kept_rows_agree(name: str, tmp_path: Path) -> None:
    program, reference = load(MODELS[name](tmp_path / "m"), Sizes(chunk=CHUNK))
    state, states = program.new_state(), reference.new_state()
    for step in STEPS:
        given, wanted = run_step(program, state, step), run_step(reference, states, step)
        assert relative_error(given, wanted) <= BOUND
    if name == "bfloat16" and program.device == "CL":
        check_batches(program)


def check_batches(program: TaskProgram) -> None:
    """Sessions share one pass, rows of theirs begin anywhere."""
    assert program.width > 2
    plans: list[list[StepInput]] = [
        [make_causal_step(TOKENS[:1], 0), make_causal_step(TOKENS[1:2], 1)],
        [make_causal_step(TOKENS[5:7], 0), make_causal_step(TOKENS[7:8], 2)],
        [make_tree_step(TOKENS[2:3], [-1], 0), make_tree_step(TOKENS[3:5], [-1, 0], 1)],
    ]
    check_together(program, plans)


def test_pictures_agree(tmp_path: Path) -> None:
    source, _ = save_vision(tmp_path / "m.onnx")
    program, reference = load(Path(source), None)
    picture = np.random.default_rng(1).normal(0, 1, (1, 3, 8, 8)).astype(np.float32)
    [given] = program.run(program.new_state(), [picture.tobytes()])
    [wanted] = reference.run(reference.new_state(), [picture.tobytes()])
    assert relative_error(*(np.frombuffer(data, np.float32) for data in (given, wanted))) <= BOUND


@pytest.mark.parametrize("private", [None, 0])
def test_a_cut_model_with_gates_gives_the_bytes_of_the_whole(
    private: int | None, tmp_path: Path
) -> None:
    moes.save_moe(tmp_path / "m", {**moes.MIXTRAL, "num_hidden_layers": 1})
    sizes = Sizes(chunk=2)
    compiled = build(str(tmp_path / "m"), 40_000, sizes=sizes, private=private)
    gated = [task for task in compiled.manifest.tasks if task.gate is not None]
    assert len(gated) == 4  # each expert
    cut = CutModel(compiled)
    for task, program in zip(compiled.manifest.tasks, cut.programs, strict=True):
        if task.gate is not None:
            taken, made = ([p.spec for p in ports] for ports in (task.inputs, task.outputs))
            shut, zeros = compute_zero_step(taken, made, task.gate, taken[task.gate].nbytes)
            assert program.run(program.new_state(), shut) == zeros
    if private is not None:
        return  # the ends are the client's: only what nodes compute runs here
    whole = load_reference(str(tmp_path / "m"), sizes)
    states, state = cut.new_states(), whole.new_state()
    for position, token in enumerate(TOKENS[:3]):
        inputs = as_inputs(whole.inputs, token, position)
        [wanted] = whole.run(state, [inputs[spec.name] for spec in whole.inputs])
        assert cut.step(states, inputs)["logits"] == wanted
