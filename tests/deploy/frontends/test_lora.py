"""LoRA adapters that are merged into a directory's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from splitup_deploy.cli.commands import app
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.source_model import Sizes
from typer.testing import CliRunner

from splitup.core.errors import InvalidModel
from splitup.graph.arrays import encode_array, round_array
from tests.deploy.checkpoints import Case, make_weights, save_checkpoint
from tests.deploy.llamas import EXAMPLE, compute_logits, relative_error, save_llama
from tests.deploy.quantisations import CASES, save_quantised
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import feed

# As PEFT 0.21 writes it, without most of the fields that are null.
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 8,
    "alpha_pattern": {"down_proj": 3},
    "r": 4,
    "rank_pattern": {"down_proj": 2},
    "modules_to_save": None,
    "target_modules": ["q_proj", "down_proj"],
    "use_dora": False,
    "use_rslora": False,
}
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
PAIRS = {Q: (4, 32, 32, 8 / 4), DOWN: (2, 48, 32, 3 / 2)}  # rank, inputs, outputs, scale
CHUNK = Sizes(chunk=1)


def make_pairs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    tensors = {}
    for module, (rank, inner, out, _) in PAIRS.items():
        for letter, shape in (("A", (rank, inner)), ("B", (out, rank))):
            matrix = random.normal(0, 0.2, shape).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = matrix
    return tensors


def save_adapter(
    directory: Path, change: dict[str, Any] | None = None, extra: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write an adapter; return what it adds to weights by their names."""
    tensors = make_pairs()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **(change or {})}))
    save_file({**tensors, **(extra or {})}, directory / "adapter_model.safetensors")
    added = {}
    for module, (*_, scale) in PAIRS.items():
        low, high = (tensors[f"base_model.model.{module}.lora_{one}.weight"] for one in "AB")
        added[f"{module}.weight"] = (scale * high.astype(np.float64) @ low).astype(np.float32)
    return added


def test_a_model_computes_with_the_merged_weights(tmp_path: Path) -> None:
    weights = save_llama(tmp_path / "base")
    for name, change in save_adapter(tmp_path / "lora").items():
        weights[name] = weights[name] + change
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    sizes = Sizes(chunk=1, adapter=tmp_path / "lora")
    given = feed(load_graph(str(tmp_path / "base"), sizes), [5, 7, 1, 30])
    assert relative_error(given, compute_logits(config, weights, [5, 7, 1, 30])) <= 1e-5
    (note,) = load_model(str(tmp_path / "base"), sizes).traced.notes
    assert f"{tmp_path / 'lora'}" in note and f"{DOWN}' and 1 other" in note


def test_a_weight_is_rounded_once_to_its_own_dtype(tmp_path: Path) -> None:
    case = Case("LlamaForCausalLM", "llama", {"rope_theta": 500.0}, "bfloat16")
    save_checkpoint(tmp_path / "base", case)
    added = save_adapter(tmp_path / "lora")[f"{DOWN}.weight"]
    sizes = Sizes(chunk=1, adapter=tmp_path / "lora")
    source = load_model(str(tmp_path / "base"), sizes).traced.weights[f"{DOWN}.weight"]
    own = np.frombuffer(make_weights(case)[f"{DOWN}.weight"], "<u2").reshape(added.shape)
    wanted = (own.astype("<u4") << 16).view("<f4") + added
    given = np.frombuffer(b"".join(source.read()), "<u2").reshape(added.shape)
    rounded = np.frombuffer(encode_array("bfloat16", round_array("bfloat16", wanted)), "<u2")
    assert (given == rounded.reshape(added.shape)).mean() > 0.99  # sums in another order
    assert np.abs((given.astype("<u4") << 16).view("<f4") - wanted).max() <= 2**-8


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_s109_an_adapters_folder_leads_to_no_other_adapter(name: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    for folder in ("lora", "private"):
        save_adapter(tmp_path / folder)
    (tmp_path / "lora" / name).unlink()
    (tmp_path / "lora" / name).symlink_to(f"../private/{name}")
    with pytest.raises(InvalidModel, match="hidden or outside"):
        load_model(str(tmp_path / "base"), Sizes(chunk=1, adapter=tmp_path / "lora"))


def test_the_command_line_takes_it_and_the_id_is_another(tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    save_adapter(tmp_path / "lora")
    ids = []
    for adapter in ([], ["--adapter", str(tmp_path / "lora")]):
        flags = ["--target-vram", "1GB", "--chunk", "1", "--no-reference", "--dry-run", "--json"]
        result = CliRunner().invoke(
            app, ["register", "--model", str(tmp_path / "base"), "--name", "x", *flags, *adapter]
        )
        assert result.exit_code == 0, result.stderr
        ids.append(json.loads(result.stdout)["model_id"])
    assert ids[0] != ids[1]


FIELDS = {
    "use_rslora = True": {"use_rslora": True},
    "use_dora = True": {"use_dora": True},
    "modules_to_save = ": {"modules_to_save": ["lm_head"]},
    "bias = 'all'": {"bias": "all"},
    "peft_type = 'IA3'": {"peft_type": "IA3"},
    "init_lora_weights = 'pissa'": {"init_lora_weights": "pissa"},
    "alpha_pattern = ": {"alpha_pattern": {"(a+)+$": 1}},
    "target_parameters = ": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "the field 'use_new_thing'": {"use_new_thing": 1},
    "lora_alpha = -1": {"lora_alpha": -1},
}


@pytest.mark.parametrize("message", FIELDS)
def test_a_variation_is_refused_by_name(message: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    save_adapter(tmp_path / "lora", FIELDS[message])
    with pytest.raises(InvalidModel, match=message) as error:
        load_model(str(tmp_path / "base"), Sizes(chunk=1, adapter=tmp_path / "lora"))
    assert len(str(error.value)) <= 240


ONE = np.ones((1, 1), np.float32)
TENSORS = {
    "no matrix of a LoRA": {"base_model.model.model.embed_tokens.lora_embedding_A": ONE},
    "one matrix of 'lm_head'": {"base_model.model.lm_head.lora_A.weight": ONE},
    "has no weight 'model.layers.9.x.weight'": {
        f"base_model.model.model.layers.9.x.lora_{one}.weight": ONE for one in "AB"
    },
    "the adapter is for": {f"base_model.model.lm_head.lora_{one}.weight": ONE for one in "AB"},
    "float32.1, 1. and float32.1, 2.": {
        "base_model.model.lm_head.lora_A.weight": ONE,
        "base_model.model.lm_head.lora_B.weight": np.ones((1, 2), np.float32),
    },
}


@pytest.mark.parametrize("message", TENSORS)
def test_tensors_that_do_not_fit(message: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    save_adapter(tmp_path / "lora", extra=TENSORS[message])
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path / "base"), Sizes(chunk=1, adapter=tmp_path / "lora"))


def test_an_adapter_for_encrypted_states_is_sent_to_its_command(tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    with pytest.raises(InvalidModel, match="is for 'splitup adapter-host'"):
        load_model(
            str(tmp_path / "base"), Sizes(adapter=EXAMPLE.with_name("packages-4m-python-docs"))
        )


def test_models_without_weights_that_can_change(tmp_path: Path) -> None:
    save_adapter(tmp_path / "lora")
    sizes = Sizes(chunk=1, adapter=tmp_path / "lora")
    save_quantised(tmp_path / "int4", *CASES["int4"])
    with pytest.raises(InvalidModel, match="is quantised"):
        load_model(str(tmp_path / "int4"), sizes)
    with pytest.raises(InvalidModel, match="no Hugging Face directory with weights"):
        load_model(str(tmp_path / "int4" / "config.json"), sizes)
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    save_llama(tmp_path / "base")
    with pytest.raises(InvalidModel, match=r"has no adapter_model\.safetensors"):
        load_model(str(tmp_path / "base"), sizes)
