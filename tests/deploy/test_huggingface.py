from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.huggingface import parse_config

from splitup.errors import InvalidModel
from tests.deploy.llamas import TINY, save_llama


def test_text_and_context(tmp_path: Path) -> None:
    save_llama(tmp_path)
    model = load_model(str(tmp_path))
    assert model.kind == "text-generation" and model.text is not None
    assert (model.text.eos_ids, model.text.vocab, model.text.context) == ((1, 3), 40, 16)
    short = load_model(str(tmp_path), context=8)
    assert short.traced.graph.states[0].shape == (8, 2, 2, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    changed = load_model(str(tmp_path))
    assert changed.text is not None and changed.text.eos_ids == (7,)


def test_old_and_new_spellings() -> None:
    old = parse_config(TINY, None)
    new = {k: v for k, v in TINY.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    assert parse_config(new, None) == old
    assert parse_config({**TINY, "rope_scaling": None}, None) == old
    assert parse_config({**TINY, "head_dim": None}, None).head_dim == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architecture"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": "linear"}, "linear"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"vocab_size": 41}, "embed_tokens"),
        ({"intermediate_size": 47}, "gate_proj"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_a_config_that_cannot_be_used(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **change}))
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path))


def test_the_context_is_bounded(tmp_path: Path) -> None:
    save_llama(tmp_path)
    for context in (0, -1, 17):
        with pytest.raises(InvalidModel, match="1 to 16 positions"):
            load_model(str(tmp_path), context=context)


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="does not exist"):
        load_model(str(tmp_path / "absent"))
    with pytest.raises(InvalidModel, match=r"config\.json"):
        load_model(str(tmp_path))
    save_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    for bad in (data[:-1], data + b"\0", b"", b"\0" * 100):
        weights.write_bytes(bad)
        with pytest.raises(InvalidModel, match=r"model\.safetensors"):
            load_model(str(tmp_path))
    weights.unlink()
    with pytest.raises(InvalidModel, match=r"no model\.safetensors"):
        load_model(str(tmp_path))
    weights.write_bytes(data)
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).rename(tmp_path / "aside")
        with pytest.raises(InvalidModel, match=file):
            load_model(str(tmp_path))
        (tmp_path / "aside").rename(tmp_path / file)
    for text in ("", "[]", "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidModel, match=r"config\.json"):
            load_model(str(tmp_path))


def test_a_missing_or_integer_weight_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, path)
    with pytest.raises(InvalidModel, match=name):
        load_model(str(tmp_path))
    save_file({**weights, name: weights[name].astype("int32")}, path)
    with pytest.raises(InvalidModel, match="int32"):
        load_model(str(tmp_path))


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(InvalidModel, match="outside"):
        load_model(str(tmp_path))
    index.write_text(json.dumps({"weight_map": ["a"]}))
    with pytest.raises(InvalidModel, match="weight_map"):
        load_model(str(tmp_path))
