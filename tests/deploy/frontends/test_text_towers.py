"""The towers of models for images and text.

Those for text have the graphs of the same models alone; Gemma 3's for images gives what Hugging
Face's does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from splitup_deploy.cli.commands import app
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.families.architectures import ARCHITECTURES
from splitup_deploy.frontends.families.encoders import ENCODERS
from splitup_deploy.frontends.families.text_towers import TOWERS
from splitup_deploy.frontends.gguf.family_table import FAMILIES
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes
from typer.testing import CliRunner

from splitup.core.errors import InvalidModel
from tests.deploy import moes
from tests.deploy.checkpoints import GOLDEN
from tests.deploy.llamas import relative_error
from tests.deploy.saved import save_case
from tests.deploy.towers import CASES, IMAGE, NEW, OLD, fuse_experts, save_tower, save_vision
from tests.parameters import some_of

SIZES = Sizes(chunk=1)
_LOGITS = ("logits.npz", "mixture_logits.npz", "variation_logits.npz")


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_in_one_tensor(is_turned: bool, tmp_path: Path) -> None:
    """Transposed, as Qwen3-VL has them, or not, as Qwen3.5."""
    config = moes.QWEN3_MOE
    moes.save_moe(tmp_path / "alone", config)
    wanted = load_model(str(tmp_path / "alone"), SIZES).traced.graph.to_bytes()
    weights = fuse_experts(moes.make_weights(config), is_turned)
    moes.save_moe(tmp_path / "fused", config, weights=weights)
    assert load_model(str(tmp_path / "fused"), SIZES).traced.graph.to_bytes() == wanted
    bank = "model.layers.0.mlp.experts.gate_up_proj"
    weights[bank][3, 0, 0] = np.nan
    moes.save_moe(tmp_path / "fused", config, weights=weights)
    (note,) = load_model(str(tmp_path / "fused"), SIZES).traced.notes
    assert note.startswith(f"NaN or infinity in weight '{bank}'")
    whole = np.nan_to_num(weights[bank])
    for bad in (np.float32(1), whole[0, 0], whole[0], whole.astype(np.int32)):
        table = {**weights, bank: np.asarray(bad)}
        save_file(table, tmp_path / "fused" / "model.safetensors")
        with pytest.raises(InvalidModel, match=r"gate_up_proj'"):
            load_model(str(tmp_path / "fused"), SIZES)
    for change in ({"moe_intermediate_size": 20}, {"num_experts": 7}, {"hidden_size": 48}):
        (tmp_path / "fused" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(InvalidModel):
            load_model(str(tmp_path / "fused"), SIZES)


def test_experts_whose_order_cannot_be_told_are_refused(tmp_path: Path) -> None:
    """A square matrix may be transposed or not."""
    config = {**moes.QWEN3_MOE, "moe_intermediate_size": 16}
    weights = fuse_experts(moes.make_weights(config), True)
    moes.save_moe(tmp_path, config, weights=weights)
    with pytest.raises(InvalidModel, match=r"experts\.gate_up_proj' .*which differ"):
        load_model(str(tmp_path), SIZES)


SOME = some_of(TOWERS, "Gemma3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration")


@pytest.mark.parametrize("names", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize("name", SOME)
def test_a_tower_is_the_text_model_alone(name: str, names: dict[str, str], tmp_path: Path) -> None:
    save_case(CASES[name], tmp_path / "alone")
    alone = load_model(str(tmp_path / "alone"), SIZES)
    source = save_tower(tmp_path / "whole", name, names)
    whole = load_model(source, SIZES)
    assert whole.traced.graph.to_bytes() == alone.traced.graph.to_bytes()
    assert whole.text is not None and alone.text is not None
    assert replace(whole.text, tokenizer=alone.text.tokenizer) == alone.text
    (note,) = whole.traced.notes
    assert note.endswith("of the towers for images: it takes text only")


def test_hugging_face_computes_what_it_computes_of_the_text_model_alone() -> None:
    """Of these text models other tests compare the logits."""
    alone: dict[str, np.ndarray] = {}
    for file in (*_LOGITS, "hybrid_logits.npz", "moe_logits.npz"):
        with np.load(GOLDEN / file, allow_pickle=False) as arrays:
            alone |= {name: arrays[name] for name in arrays.files if "digest" not in name}
    with np.load(GOLDEN / "tower_logits.npz", allow_pickle=False) as towers:
        saved = set(towers.files)
        assert CASES.keys() - saved == {"KimiK25ForConditionalGeneration"}
        assert saved - CASES.keys() == {"vision"}  # of an image
        for tower in saved & CASES.keys():
            name = CASES[tower]
            wanted = alone.get(f"{name}/prefill", alone.get(f"{name}/logits"))
            assert wanted is not None and relative_error(towers[tower], wanted) <= 1e-5, tower


def test_what_predicts_further_is_left_out_of_a_tower(tmp_path: Path) -> None:
    name = "Qwen3_5ForConditionalGeneration"
    source = save_tower(tmp_path, name, NEW, {"mtp_num_hidden_layers": 1})
    path = tmp_path / "model.safetensors"
    further = {"mtp.fc.weight": np.ones(3, np.float32)}
    save_file({**load_file(path), **further}, path)
    first, second = load_model(source, SIZES).traced.notes
    assert first == "left out: 'mtp.fc.weight', of blocks that only predict tokens further ahead"
    assert "towers for images" in second
    save_tower(tmp_path, name, NEW)
    save_file({**load_file(path), **further}, path)
    with pytest.raises(InvalidModel, match=r"'mtp\.fc\.weight' for which"):
        load_model(source, SIZES)


def test_defaults_and_ties_are_those_of_the_class(tmp_path: Path) -> None:
    """What the configuration of Gemma 3 with 4 billion parameters leaves out."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    name = "Gemma3ForConditionalGeneration"
    path = tmp_path / "config.json"
    whole = {"architectures": [name], "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}
    path.write_text(json.dumps({**whole, "text_config": {**text, "num_hidden_layers": 1}}))
    compiled = build(str(path), 10**10, sizes=Sizes(context=256, chunk=1))
    (task,) = compiled.manifest.tasks
    block = 2560 * (2 * 8 + 2 * 4) * 256 + 3 * 2560 * 10240
    assert task.weights_bytes == pytest.approx(2 * (262_208 * 2560 + block), rel=1e-3)


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        ({"model_type": "llama"}, {}, "text_config.*an object of the type mistral, ministral3"),
        ({}, {"text_config": None}, "text_config"),
        ({}, {"quantization_config": {"bits": 4}}, "quantization_config"),
        ({}, {"video_config": {}}, "'video_config', which means nothing"),
        ({"num_experts": 2}, {}, "'num_experts', which means nothing"),
        ({}, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_a_tower_cannot_have(
    inner: dict[str, Any], outer: dict[str, Any], message: str, tmp_path: Path
) -> None:
    name = "Mistral3ForConditionalGeneration"
    source = save_tower(tmp_path, name, NEW, inner, **outer)
    with pytest.raises(InvalidModel, match=message):
        load_model(source, SIZES)


def test_what_only_the_text_model_alone_reads_is_refused(tmp_path: Path) -> None:
    """The class for images ignores these fields, so a model that sets them says two things."""
    for name, field in (
        ("Gemma3ForConditionalGeneration", {"final_logit_softcapping": 5.0}),
        ("Qwen3VLMoeForConditionalGeneration", {"norm_topk_prob": False}),
    ):
        with pytest.raises(InvalidModel, match=next(iter(field))):
            load_model(save_tower(tmp_path, name, NEW, field), SIZES)


def test_a_text_model_has_no_other_tower(tmp_path: Path) -> None:
    save_tower(tmp_path, "Mistral3ForConditionalGeneration", NEW)
    save_case("mistral", tmp_path / "alone")
    (tmp_path / "alone" / "config.json").replace(tmp_path / "config.json")
    with pytest.raises(InvalidModel, match="no weight 'model"):
        load_model(str(tmp_path), SIZES)
    with pytest.raises(InvalidModel, match="LlavaForConditionalGeneration"):
        parse_config({"architectures": ["LlavaForConditionalGeneration"]}, None)


def test_the_command_lists_every_family() -> None:
    result = CliRunner().invoke(app, ["families", "--json"])
    rows = {row.pop("architecture"): row for row in json.loads(result.stdout)["families"]}
    assert list(rows) == [*ARCHITECTURES, *TOWERS, *ENCODERS]
    use = {"use": "text-generation", "text_tower": None, "images": False, "decoder": None}
    use["tested_with"] = "random weights"
    assert rows["MixtralForCausalLM"] == {"gguf": ["llama"], **use}
    assert rows["XLMRobertaForSequenceClassification"]["use"] == "text-ranking"
    files = {name for row in rows.values() for name in row["gguf"]}
    assert files == FAMILIES.keys() | {"bert", "modern-bert"}
    head, *text = CliRunner().invoke(app, ["families"], env={"COLUMNS": "40"}).stdout.splitlines()
    assert head.split() == ["architecture", "tested", "with"]
    assert [line.split()[0] for line in text] == list(rows)
    assert any(line.endswith("; text only, as Qwen3_5MoeForCausalLM") for line in text)
    (gemma,) = (line for line in text if line.startswith("Gemma3ForConditionalGeneration"))
    assert gemma.endswith("; text as Gemma3ForCausalLM; images with --vision and --images")
    assert rows["Gemma3ForConditionalGeneration"]["images"]
    tested = "random weights; reranking, with one label; GGUF: modern-bert"
    assert text[-1].split(maxsplit=1)[1] == tested


def test_a_tower_for_images_has_one_graph_in_both_spellings(tmp_path: Path) -> None:
    """``test_images`` runs it."""
    sizes, graphs = Sizes(vision=True), []
    for number, names in enumerate((OLD, NEW)):
        source = save_vision(tmp_path / str(number), names)
        traced = load_model(source, sizes).traced
        (note,) = traced.notes
        assert note.endswith("of the text tower: register it without --vision")
        graphs.append(traced.graph.to_bytes())
    assert graphs[0] == graphs[1]
    (tmp_path / "1" / "model.safetensors").unlink()
    (port,) = load_model(str(tmp_path / "1"), sizes).traced.graph.inputs
    assert (port.name, port.shape) == ("pixels", IMAGE.shape)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"image_size": 42}, r"mm_tokens_per_image = 4; supported: a square that divides 3 \* 3"),
        ({"num_attention_heads": 5}, "do not divide"),
        ({"num_channels": 1}, "num_channels"),
        ({"model_type": "clip_vision_model"}, "model_type"),
        ({"window": 3}, "'window', which means nothing"),
        ({"num_hidden_layers": 3}, "no weight 'encoder.layers.2"),
        ({"num_hidden_layers": 1}, "'encoder.layers.1"),
        ({"patch_size": 28, "image_size": 112}, "patch_embedding.weight"),
        ({"patch_size": 57}, "context 0 is not possible"),
    ],
)
def test_towers_for_images_that_are_refused(
    vision: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = save_vision(tmp_path, NEW, **vision)
    with pytest.raises(InvalidModel, match=message):
        load_model(source, Sizes(vision=True))


def test_only_directories_with_such_a_tower_have_one(tmp_path: Path) -> None:
    source = save_tower(tmp_path / "a", "Mistral3ForConditionalGeneration", NEW)
    with pytest.raises(InvalidModel, match="has no vision tower that is supported"):
        load_model(source, Sizes(vision=True))
    source = save_vision(tmp_path / "b", NEW)
    with pytest.raises(InvalidModel, match="leave out --context, --chunk and --adapter"):
        load_model(source, Sizes(chunk=1, vision=True))
    with pytest.raises(InvalidModel, match="is no Hugging Face directory: leave out --vision"):
        load_model("tests.deploy.frontends.on_device_models:model", Sizes(vision=True))
