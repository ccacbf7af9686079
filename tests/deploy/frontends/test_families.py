"""Every family of dense models gives the logits of Hugging Face's own implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.decoder.step_function import trace_decoder
from splitup_deploy.frontends.huggingface.checkpoint import DirectoryWeights
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.core.errors import InvalidModel
from tests.deploy import variations
from tests.deploy.checkpoints import (
    CASES,
    GOLDEN,
    TOKENS,
    compute_checkpoint_digest,
    save_checkpoint,
    save_safetensors,
)
from tests.deploy.execution import CutReference
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph, make_reference
from tests.deploy.steps import as_inputs, feed
from tests.parameters import some_of

BOUND = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


NAMES = ("llama3-bfloat16", "qwen2", "qwen3-yarn", "phi3-longrope", "smollm3", "gemma3")


@pytest.mark.usefixtures("float32_caches")
@pytest.mark.parametrize("name", some_of(CASES, *NAMES))
def test_logits_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    case = CASES[name]
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(case), "run make_golden.py"
    save_checkpoint(tmp_path, case)
    given = feed(load_graph(str(tmp_path), Sizes(context=case.context)), TOKENS)
    assert relative_error(given, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


@pytest.mark.parametrize("name", ["phi3-longrope", "gemma2"])
def test_several_rows_in_one_step_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    case = CASES[name]
    save_checkpoint(tmp_path, case)
    config = parse_config(case.config, case.context)
    traced = trace_decoder(config, DirectoryWeights(tmp_path), 8)
    given = feed(make_reference(traced), TOKENS, rows=8)
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


@pytest.mark.long  # in small: cutting/test_cut_equals_whole.py
def test_a_cut_gemma_with_experts_gives_equal_bytes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variations.CASES["gemma4-moe"])
    whole = load_graph(str(tmp_path), Sizes(chunk=1))
    cut = CutReference(build(str(tmp_path), 40_000, sizes=Sizes(chunk=1)))
    assert len(cut.manifest.tasks) >= 6
    states, state = cut.new_states(), whole.new_state()
    for position, token in enumerate(TOKENS):
        inputs = as_inputs(whole.inputs, token, position)
        (wanted,) = whole.run(state, [inputs[spec.name] for spec in whole.inputs])
        assert cut.step(states, inputs)["logits"] == wanted


def test_narrow_weights_stay_narrow_in_memory(tmp_path: Path) -> None:
    for name in ("llama3-bfloat16", "llama-float16"):
        save_checkpoint(tmp_path, CASES[name])
        weights = load_graph_weights(tmp_path)
        assert all(size == 2 for key, size in weights.items() if not key.endswith(".rope"))


def load_graph_weights(directory: Path) -> dict[str, int]:
    """Return the bytes per item of every weight of a traced model."""
    config = parse_config(json.loads((directory / "config.json").read_text()), None)
    graph = trace_decoder(config, DirectoryWeights(directory)).graph
    return {w.name: w.spec.nbytes // int(np.prod(w.shape)) for w in graph.weights}


def test_a_weight_without_use_is_refused(tmp_path: Path) -> None:
    case = CASES["qwen2"]  # its heads have biases that a Llama would overlook
    save_checkpoint(tmp_path, case)
    config = {**case.config, "architectures": ["LlamaForCausalLM"]}
    for key in ("use_sliding_window", "sliding_window", "max_window_layers"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias'.*no use"):
        load_reference(str(tmp_path))


def test_a_weight_in_two_shards_is_refused(tmp_path: Path) -> None:
    case = CASES["llama"]
    save_checkpoint(tmp_path, case)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_safetensors(tmp_path / "b.safetensors", case, ["model.norm.weight"])
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidModel, match=r"'model\.norm\.weight' is in two files"):
        load_reference(str(tmp_path))
