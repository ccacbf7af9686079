"""Routers, shared experts and compressed attention, from Hugging Face directories and GGUF files.

Their logits are those of Hugging Face's own models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.gguf.header import read_gguf
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.decode.step import make_causal_step, make_tree_step
from tests.deploy.checkpoints import (
    GOLDEN,
    TOKENS,
    compute_checkpoint_digest,
    save_checkpoint,
)
from tests.deploy.execution import CutModel, CutReference, CutTasks
from tests.deploy.ggufs import MIXTURES, save_mixture, write_gguf
from tests.deploy.llamas import relative_error
from tests.deploy.mixtures import BLOCKS, CASES
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import Program, feed, run_step, step_inputs
from tests.parameters import some_of

BOUND = 1e-5
CHUNK = Sizes(chunk=8)
V3 = "deepseek-v3"
_WIDTHS = {"attention.value_length": None}  # says once more what kv_lora_rank is


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


@pytest.mark.parametrize("name", some_of(CASES, "olmoe", "deepseek-v2-groups", "glm4-moe-lite"))
def test_logits_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES[name])
    given = feed(load_graph(str(tmp_path), CHUNK), TOKENS)
    assert relative_error(given, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


@pytest.mark.long  # in small: above, by the reference
def test_logits_of_a_file_agree_in_steps_of_any_size(
    program: TaskProgram, golden: dict[str, Any]
) -> None:
    given = feed(program, TOKENS)
    assert relative_error(given, golden[f"{V3}/steps"]) <= BOUND
    assert relative_error(given, golden[f"{V3}/prefill"]) <= BOUND
    np.testing.assert_array_equal(feed(program, TOKENS, rows=7), given)


@pytest.mark.long  # in small: logits of both above
@pytest.mark.parametrize("name", [name for name in CASES if name != "deepseek-v2-groups"])
def test_files_have_the_graphs_of_directories(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", CASES[name])
    save_mixture(tmp_path / "m.gguf", CASES[name], split=False)
    file, directory = (load_model(str(tmp_path / source)).traced for source in ("m.gguf", "m"))
    assert file.graph.to_bytes() == directory.graph.to_bytes()


@pytest.mark.long  # in small: as above, and trees of test_variations.py by the reference
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


@pytest.mark.parametrize(
    ("load_whole", "load_cut"),
    [
        (load_graph, CutReference),
        # compiled, mixtures are cut in test_moe.py, and compressed rows are whole above
        pytest.param(load_reference, CutModel, marks=pytest.mark.long),
    ],
)
def test_cut_equals_whole_and_shared_experts_have_no_gate(
    load_whole: Callable[[str, Sizes], Program[Any]],
    load_cut: Callable[[CompiledModel], CutTasks[Any]],
    path: Path,
) -> None:
    cut, program = load_cut(build(str(path), 45_000, sizes=CHUNK)), load_whole(str(path), CHUNK)
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
        assert load_cut is CutReference or compiled.allocated_bytes <= task.vram_bytes


@pytest.mark.usefixtures("float32_caches")
def test_quantised_experts_and_attention_stay_quantised(tmp_path: Path) -> None:
    weights = save_mixture(tmp_path / "m.gguf", BLOCKS, forms={"": "Q8_0"})
    save_checkpoint(tmp_path / "m", BLOCKS)
    save_file(weights, tmp_path / "m" / "model.safetensors")
    compiled = build(str(tmp_path / "m.gguf"), 10**9, sizes=CHUNK)
    whole = sum(array.nbytes for array in weights.values())
    assert sum(task.weights_bytes for task in compiled.manifest.tasks) < 0.35 * whole
    given, wanted = (
        feed(load_graph(str(tmp_path / name), CHUNK), TOKENS[:8], rows=4)
        for name in ("m.gguf", "m")
    )
    assert relative_error(given, wanted) <= BOUND


def test_blocks_that_predict_further_are_left_out(tmp_path: Path) -> None:
    case = CASES["glm4-moe"]
    save_mixture(tmp_path / "a.gguf", case)
    file = read_gguf(tmp_path / "a.gguf")
    data = (tmp_path / "a.gguf").read_bytes()
    tensors = {
        t.name: (t.format.name, t.shape, data[t.start : t.end]) for t in file.tensors.values()
    }
    further = {
        "blk.2.nextn.enorm.weight": tensors["blk.0.attn_norm.weight"],
        "blk.2.attn_norm.weight": tensors["blk.0.attn_norm.weight"],
    }
    metadata = {**file.metadata, "glm4moe.block_count": 3}
    write_gguf(tmp_path / "b.gguf", metadata, {**tensors, **further})
    with pytest.raises(InvalidModel, match=r"blk\.2"):
        load_model(str(tmp_path / "b.gguf"))
    metadata["glm4moe.nextn_predict_layers"] = 1
    write_gguf(tmp_path / "b.gguf", metadata, {**tensors, **further})
    plain, other = (load_model(str(tmp_path / f"{name}.gguf")).traced.graph for name in "ab")
    assert plain.to_bytes() == other.to_bytes()


@pytest.mark.parametrize(
    ("name", "metadata", "problem"),
    [
        (V3, {"attention.kv_lora_rank": 2**31 - 1}, "its tensor gives 24"),
        (V3, {"attention.kv_lora_rank": "16"}, "its tensor gives 24"),
        (V3, {"attention.kv_lora_rank": None}, "no tensor"),
        (V3, {"attention.q_lora_rank": 2**30}, r"attn_q_a\.weight' .* is \[20, 32\]"),
        (V3, {"attention.q_lora_rank": None}, r"no tensor 'blk\.0\.attn_q\.weight'"),
        (V3, {"attention.key_length_mla": 2**30}, "4 heads of 1073741824"),
        (V3, {"attention.value_length_mla": 11}, r"attn_v_b\.weight' .* is \[4, 10, 16\]"),
        (V3, {"attention.value_length_mla": None}, "v_head_dim"),
        (V3, {"attention.head_count_kv": 4}, "head_count_kv = 4; supported: 1"),
        (V3, {"attention.key_length": 20}, "key_length = 20; supported: 24"),
        (V3, {"attention.temperature_scale": 0.1}, "temperature_scale.*unknown"),
        (
            V3,
            {**_WIDTHS, "rope.dimension_count": 9, "attention.kv_lora_rank": 15},
            "an even number",
        ),
        (V3, {**_WIDTHS, "rope.dimension_count": 24, "attention.kv_lora_rank": 0}, "qk_nope_head"),
        (V3, {"rope.scaling.yarn_log_multiplier": None}, "yarn_log_multiplier"),
        (V3, {"rope.scaling.yarn_log_multiplier": 1e30}, "yarn_log_multiplier"),
        (V3, {"expert_gating_func": 3}, "1 for softmax and 2 for sigmoid"),
        (V3, {"expert_gating_func": None}, "1 for softmax and 2 for sigmoid"),
        (V3, {"expert_gating_func": 1}, "choose differently"),
        (V3, {"expert_group_count": 3}, "from 1 of 3 groups of 8"),
        (V3, {"expert_group_count": 8}, "3 experts from 1 of 8 groups"),
        (V3, {"expert_group_used_count": 3}, "from 3 of 2 groups"),
        (V3, {"expert_used_count": 9}, "9 active experts of 8"),
        (V3, {"expert_count": 2**31 - 1}, "num_experts|n_routed_experts"),
        (V3, {"expert_shared_count": 2**31 - 1}, "has n_shared_experts = 2147483647"),
        (V3, {"expert_shared_count": 0}, "has a tensor 'blk.1.ffn_.*_shexp"),
        (V3, {"expert_weights_scale": -1.0}, "routed_scaling_factor"),
        (V3, {"expert_weights_norm": 1}, "true or false"),
        (V3, {"leading_dense_block_count": 2}, "0 to 1 layers"),
        (V3, {"leading_dense_block_count": "1"}, "0 to 1 layers"),
        (V3, {"nextn_predict_layers": 2}, "2 of 2 blocks"),
        (V3, {"nextn_predict_layers": 2**31}, "blocks that predict further"),
        (V3, {"block_count": "2"}, "num_hidden_layers"),
        (V3, {"block_count": 2**31}, "num_hidden_layers"),
        ("deepseek-v2", {"expert_weights_norm": True}, "norm_topk_prob"),
        ("glm4-moe", {"expert_gating_func": 1}, "supported: 2, sigmoid"),
        ("glm4-moe", {"rope.dimension_count": 3}, "an even number"),
        ("glm4-moe", {"rope.dimension_count": 2**31}, "of a head's 16"),
        ("glm4-moe", {"attention.kv_lora_rank": 16}, "kv_lora_rank.*unknown"),
        ("olmoe", {"expert_gating_func": 2}, "expert_gating_func.*unknown"),
        ("olmoe", {"attention.head_count_kv": 4}, r"attn_k\.weight' .* is \[16, 32\]"),
    ],
)
def test_hostile_metadata_are_refused_by_name(
    name: str, metadata: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    case = CASES[name]
    family = MIXTURES[case.model_type]
    named = {f"{family}.{key}": value for key, value in metadata.items()}
    save_mixture(tmp_path / "m.gguf", case, metadata=named)
    with pytest.raises(InvalidModel, match=problem):
        load_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("glm4-moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("glm4-moe", {"first_k_dense_replace": None}, "first_k_dense_replace"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias"),
        (V3, {"n_group": None}, "n_group"),
        (V3, {"rope_interleave": False}, "rope_interleave"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"attention_bias": True}, "attention_bias"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"qk_rope_head_dim": 7}, "an even number"),
        (V3, {"qk_head_dim": 128}, "qk_head_dim"),
        (V3, {"index_topk": 2048}, "index_topk"),
    ],
)
def test_bad_configurations(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        parse_config({**CASES[name].config, **changes}, None)
