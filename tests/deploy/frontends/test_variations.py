"""Families that vary what others have give the logits of Hugging Face's own implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.core.errors import InvalidModel
from splitup.decode.step import make_causal_step, make_tree_step
from splitup.graph.manifest import InputSource
from tests.deploy.checkpoints import GOLDEN, TOKENS, compute_checkpoint_digest, save_checkpoint
from tests.deploy.execution import CutReference
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import Program, S, as_inputs, feed, run_step
from tests.deploy.variations import CASES, save_mxfp4
from tests.parameters import some_of

BOUND = 1e-5
CHUNK = 4
# of each kind of kernel that no other test compiles: sinks, chosen positions, state spaces
COMPILED = ("gpt-oss", "glm-5", "nemotron-h")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "variation_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


SOME = some_of(CASES, "gpt-oss", "qwen3-next", "deepseek-v3.2", "llama4")


@pytest.mark.parametrize("name", SOME)
def test_rows_chunks_and_trees_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(CASES[name]), "run make_golden.py"
    save_checkpoint(tmp_path, CASES[name])
    check_rows(load_graph(str(tmp_path), Sizes(chunk=CHUNK)), golden, name)


@pytest.mark.long  # in small: above, by the reference; operations alone in tests/backend
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES[name])
    check_rows(load_reference(str(tmp_path), Sizes(chunk=CHUNK)), golden, name)


def check_rows(program: Program[S], golden: dict[str, Any], name: str) -> None:
    wanted = feed(program, TOKENS)
    assert relative_error(wanted, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(wanted, golden[f"{name}/prefill"]) <= BOUND
    np.testing.assert_array_equal(feed(program, TOKENS, rows=CHUNK), wanted)
    state, start = program.new_state(), 11
    for place in range(0, start, 3):
        run_step(program, state, make_causal_step(TOKENS[place : min(place + 3, start)], place))
    tree = [TOKENS[start], 3, TOKENS[start + 1], TOKENS[start + 2]]
    given = run_step(program, state, make_tree_step(tree, [-1, 0, 0, 2], start))
    np.testing.assert_array_equal(given[[0, 2, 3]], wanted[start : start + 3])
    step = make_tree_step([TOKENS[start + 3]], [-1], start + 3, kept=(0, 2, 3))
    np.testing.assert_array_equal(run_step(program, state, step)[0], wanted[start + 3])


def test_experts_in_mxfp4_stay_so(golden: dict[str, Any], tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    program = load_graph(str(tmp_path), Sizes(chunk=1))
    assert relative_error(feed(program, TOKENS), golden["gpt-oss-mxfp4"]) <= BOUND


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt-oss", {"hidden_act": "gelu_new"}, "hidden_act"),
        ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gpt-oss", {"experts_per_token": 3}, "another experts_per_token than num_experts_per_tok"),
        ("olmo3", {"rope_theta": 1000}, "rope_theta = 1000; supported: 500000"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
        ("mistral4", {"rope_interleave": False}, "rope_interleave"),
        ("granite-moe", {"position_embedding_type": "nope"}, "position_embedding_type"),
        ("granite-hybrid", {"mamba_n_groups": 2}, "mamba_n_groups"),
        ("granite-hybrid", {"mamba_d_head": 15}, "4 Mamba heads of 15 in a width of 64"),
        ("granite-hybrid", {"layer_types": ["mamba"]}, "layer_types"),
        ("granite-hybrid", {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron-h", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern"),
        ("nemotron-h", {"hybrid_override_pattern": "M-"}, "num_hidden_layers"),
        ("nemotron-h", {"layers_block_type": ["moe", "mlp", "attention"]}, "hybrid_override_pat"),
        ("nemotron-h", {"layers_block_type": ["mamba", []]}, "layers_block_type"),
        ("nemotron-h", {"n_groups": 3}, "4 value heads on 3 key heads"),
        ("nemotron-h", {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ("nemotron-h", {"sliding_window": 4}, "sliding_window"),
        ("nemotron-h", {"attention_bias": True}, "attention_bias"),
        ("nemotron-3", {"n_shared_experts": 2}, "n_shared_experts"),
        ("nemotron-3", {"moe_latent_size": 0}, "moe_latent_size"),
        ("qwen3-next", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama4", {"moe_layers": [7]}, "moe_layers"),
        ("llama4", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma4", {"hidden_size_per_layer_input": -1}, "0 or a positive integer is wanted"),
        ("gemma4", {"num_kv_shared_layers": 1}, "each kind of layer needs one before"),
        ("gemma4-e", {"num_kv_shared_layers": 7}, "each kind of layer needs one before"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"layer_types": ["sliding_attention"] * 3}, "full_attention for the last layer"),
        ("gemma4", {"global_head_dim": 15}, "4 heads of 15 on 1 key-value heads in layers of full"),
        ("gemma4", {"num_global_key_value_heads": 3}, "4 heads of 16 on 3 key-value heads"),
        ("gemma4", {"rope_parameters": {"linear": {}}}, "'linear'"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_type = 'default'; supported: proportional",
        ),
        (
            "gemma4",
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor",
        ),
        ("gemma4-moe", {"per_layer_config": {"1": {"head_dim": 24}}}, "per_layer_config"),
        ("gemma4-moe", {"per_layer_config": {"0": {}, "2": {"head_dim": 24}}}, "per_layer_config"),
        ("gemma4-moe", {"top_k_experts": 9}, "9 active experts of 8"),
        ("deepseek-v3.2", {"index_head_dim": 4}, "index_head_dim"),
        ("glm-5", {"indexer_types": ["shared"]}, "indexer_types"),
        ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        *((name, {"unknown_field": 1}, "unknown_field") for name in CASES),
    ],
)
def test_what_is_refused_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message) as caught:
        parse_config({**CASES[name].config, **changes}, None)
    assert len(str(caught.value)) <= 200


def test_layers_of_gemma_4_may_be_numbered_with_zeros_before() -> None:
    plain = parse_config(CASES["gemma4-moe"].config, None)
    rows = {name: {"head_dim": 24} for name in ("00", "0", "02")}
    assert parse_config({**CASES["gemma4-moe"].config, "per_layer_config": rows}, None) == plain
    rows["00"] = {"head_dim": 16}
    with pytest.raises(InvalidModel, match="per_layer_config"):
        parse_config({**CASES["gemma4-moe"].config, "per_layer_config": rows}, None)


def test_an_indexer_that_would_choose_all_is_left_out(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES["glm-5"])
    traced = load_model(str(tmp_path), Sizes(context=5, chunk=1)).traced
    assert len(traced.notes) == 1 and traced.notes[0].endswith("would choose all positions")
    assert traced.graph.states[0].shape == (5, 16 + 8)


@pytest.mark.long  # in small: test_converted.py, without a cut
def test_layers_of_gemma_4_e_borrow_keys_from_tasks_before(
    golden: dict[str, Any], tmp_path: Path
) -> None:
    """And each looks up its own columns of the table, so that no task holds all of it."""
    save_checkpoint(tmp_path, CASES["gemma4-e"])
    compiled = build(str(tmp_path), 200_000, sizes=Sizes(chunk=CHUNK))
    cut = CutReference(compiled)
    for task in cut.manifest.tasks:
        sources = [port.source for port in task.inputs]
        assert InputSource(input="tokens") in sources
    last = cut.manifest.tasks[-1]
    assert cut.manifest.edges() == [(0, 1), (0, 2), (1, 2)] and last.label == "block 5 MLP ... head"
    lent = [port.spec for port in cut.manifest.tasks[1].inputs if len(port.spec.shape) == 4]
    assert [spec.shape[1:] for spec in lent] == [(2, 2, 16), (2, 2, 8)]  # of two kinds of layers
    states, rows = cut.new_states(), []
    for place, token in enumerate(TOKENS):
        inputs = as_inputs(cut.inputs, token, place)
        rows.append(np.frombuffer(cut.step(states, inputs)["logits"], "<f4"))
    assert relative_error(np.stack(rows), golden["gemma4-e/steps"]) <= BOUND
    with pytest.raises(InvalidModel, match="--private would show them to nodes"):
        build(str(tmp_path), 200_000, sizes=Sizes(chunk=CHUNK), private=1)


def test_published_gemma_4_e_have_keys_that_no_layer_reads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES["gemma4-e"])
    path, name = tmp_path / "model.safetensors", "model.layers.4.self_attn.k_proj.weight"
    save_file({**load_file(path), name: np.ones((16, 32), "f4")}, path)
    (note,) = load_model(str(tmp_path), Sizes(chunk=1)).traced.notes
    assert note == f"left out: '{name}', the layers attend to another one's keys"


def test_layers_of_nemotron_h_have_older_names() -> None:
    config = {**CASES["nemotron-h"].config, "layers_block_type": ["mamba", "mlp", "attention"]}
    wanted = parse_config(CASES["nemotron-h"].config, None)
    assert parse_config(config, None) == wanted
    del config["hybrid_override_pattern"], config["num_hidden_layers"]
    assert parse_config(config, None) == wanted


def test_layers_of_nemotron_h_that_predict_further_ahead_are_left_out(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES["nemotron-3"])
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "mtp.layers.0.norm.weight": np.ones(32, "f4")}, path)
    with pytest.raises(InvalidModel, match="mtp"):
        load_model(str(tmp_path), Sizes(chunk=1))
    config = {**CASES["nemotron-3"].config, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (note,) = load_model(str(tmp_path), Sizes(chunk=1)).traced.notes
    assert note.endswith("of blocks that only predict tokens further ahead")
