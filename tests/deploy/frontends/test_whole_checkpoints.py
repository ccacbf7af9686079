"""What a reader leaves out of a checkpoint is redundant, or it is said; so is what looks broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from splitup_deploy.cli.commands import app
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.decoder.quantised import dequantise
from splitup_deploy.frontends.finite_check import FiniteCheck
from splitup_deploy.frontends.gguf.header import FORMATS, read_gguf
from splitup_deploy.frontends.source_model import Sizes
from tinygrad.tensor import Tensor
from typer.testing import CliRunner

from splitup.core.errors import InvalidModel
from tests.deploy import mixtures, moes
from tests.deploy.checkpoints import Case, save_checkpoint
from tests.deploy.ggufs import save_gguf
from tests.deploy.llamas import TINY, make_weights, save_llama
from tests.parameters import some_of

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
SIZES = Sizes(chunk=1)
Weights = dict[str, np.ndarray]


def save(directory: Path, weights: Weights, **change: Any) -> str:
    directory.mkdir(exist_ok=True)
    save_llama(directory)
    (directory / "config.json").write_text(json.dumps({**TINY, **change}))
    save_file(weights, directory / "model.safetensors")
    return str(directory)


def read_graph(source: str) -> bytes:
    return load_model(source, SIZES).traced.graph.to_bytes()


def test_a_tied_model_uses_the_head_that_its_file_has(tmp_path: Path) -> None:
    weights = make_weights(TINY)
    assert not np.array_equal(weights[HEAD], weights[TABLE])
    apart = read_graph(save(tmp_path / "apart", weights))
    assert read_graph(save(tmp_path / "own", weights, tie_word_embeddings=True)) == apart
    plain = {name: array for name, array in weights.items() if name != HEAD}
    tied = read_graph(save(tmp_path / "tied", plain, tie_word_embeddings=True))
    copied = {**plain, HEAD: weights[TABLE]}
    assert read_graph(save(tmp_path / "copied", copied, tie_word_embeddings=True)) == tied != apart
    head = {**plain, HEAD: weights[TABLE]}
    del head[TABLE]
    assert read_graph(save(tmp_path / "head", head, tie_word_embeddings=True)) == tied
    other = {**plain, HEAD: weights[TABLE].astype(np.float16)}
    untied = read_graph(save(tmp_path / "untied", other))
    assert read_graph(save(tmp_path / "other", other, tie_word_embeddings=True)) == untied != tied
    with pytest.raises(InvalidModel, match=r"no weight 'lm_head\.weight'"):
        load_model(save(tmp_path / "none", plain), SIZES)


def test_what_is_left_out_is_said_or_refused(tmp_path: Path) -> None:
    weights = make_weights(TINY)
    frequencies = np.ones(4, np.float32)
    named = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in (0, 1)]
    source = save(tmp_path, {**weights, **dict.fromkeys(named, frequencies)})
    (note,) = load_model(source, SIZES).traced.notes
    assert note == f"left out: '{named[0]}' and 1 other, computed from config.json"
    for name in ("model.layers.0.self_attn.masked_bias", "transformer.h.0.attn.bias", "extra"):
        with pytest.raises(InvalidModel, match=f"weight '{name}' for which"):
            load_model(save(tmp_path, {**weights, name: frequencies}), SIZES)


def test_an_adapter_beside_the_model_is_not_overlooked(tmp_path: Path) -> None:
    source = save(tmp_path, make_weights(TINY))
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InvalidModel, match=r"adapter_model\.safetensors: move it"):
        load_model(source, SIZES)


@pytest.mark.parametrize("marker", ["enorm", "input_layernorm"])
def test_only_blocks_that_predict_further_are_left_out(marker: str, tmp_path: Path) -> None:
    """A usual block behind the last one is a wrong number of blocks."""
    case = mixtures.CASES["glm4-moe"]
    assert case.config["num_nextn_predict_layers"] == 1
    save_checkpoint(tmp_path, case)
    wanted = read_graph(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    further = {f"model.layers.2.{name}.weight": np.ones(32, np.float32) for name in (marker, "x")}
    save_file({**weights, **further}, tmp_path / "model.safetensors")
    if marker != "enorm":
        with pytest.raises(InvalidModel, match=r"weight 'model\.layers\.2\..*and 1 other"):
            load_model(str(tmp_path))
        return
    assert read_graph(str(tmp_path)) == wanted
    (note,) = load_model(str(tmp_path), SIZES).traced.notes
    assert re.fullmatch(r"left out: 'model\.layers\.2\..*' and 1 other, of blocks .* ahead", note)


BROKEN = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(("number", "dtype"), [(np.nan, "float32"), (-np.inf, "float16")])
def test_a_weight_that_is_not_finite_is_named(number: float, dtype: str, tmp_path: Path) -> None:
    weights = {name: array.astype(dtype) for name, array in make_weights(TINY).items()}
    source = save(tmp_path, weights)
    assert load_model(source, SIZES).traced.notes == ()
    weights[BROKEN][-1, -1] = number  # of a weight that is read together with others
    compiled = build(save(tmp_path, weights), 20_000, sizes=SIZES)
    assert len(compiled.manifest.tasks) > 1
    (note,) = compiled.notes
    assert note.startswith(f"NaN or infinity in weight '{BROKEN}':")


def test_the_note_is_printed_beside_the_data(tmp_path: Path) -> None:
    weights = make_weights(TINY)
    weights[BROKEN][0, 0] = weights[TABLE][3, 3] = np.nan
    command = ["inspect", save(tmp_path, weights), "--target-vram", "1MB", "--format", "dot"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and result.stdout.startswith("digraph ")
    assert f"note: NaN or infinity in weight '{TABLE}' and 1 other:" in result.stderr


def test_numbers_of_two_bytes_and_of_experts_are_looked_at(tmp_path: Path) -> None:
    case = Case("LlamaForCausalLM", "llama", {"rope_theta": 500.0}, "bfloat16")
    save_checkpoint(tmp_path / "halves", case)
    path = tmp_path / "halves" / "model.safetensors"
    assert load_model(str(path.parent), SIZES).traced.notes == ()
    data = bytearray(path.read_bytes())
    data[-2:] = b"\x80\xff"  # minus infinity
    path.write_bytes(data)
    last = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = max(last, key=lambda name: last[name]["data_offsets"][1])
    (note,) = load_model(str(path.parent), SIZES).traced.notes
    assert f"'{name}'" in note
    weights = moes.make_weights(moes.MIXTRAL)
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    weights[name][0, 0] = np.inf
    moes.save_moe(tmp_path / "experts", moes.MIXTRAL, weights=weights)
    (note,) = load_model(str(tmp_path / "experts"), SIZES).traced.notes
    assert f"'{name}'" in note


HALVES = {f.name: f for f in FORMATS.values() if f.elements > 1 and f.name != "MXFP4"}


@pytest.mark.parametrize("name", some_of(HALVES, "Q4_1", "Q6_K"))  # scales before and behind
def test_scales_of_quantised_blocks_are_looked_at(name: str) -> None:
    """An infinite float16 at every place of a block: at most scales make values infinite."""
    form = HALVES[name]
    blocks = np.ones((form.nbytes - 1, form.nbytes), np.uint8)
    for place, block in enumerate(blocks):
        block[place : place + 2] = 0, 0x7C
    values = dequantise(Tensor(blocks), form.name).numpy().reshape(len(blocks), -1)
    wanted = np.isfinite(values).all(1)
    assert 1 <= (~wanted).sum() <= 2
    for block, is_finite in zip(blocks, wanted, strict=True):
        check = FiniteCheck(form.name, form.nbytes)
        data = 2 * np.ones_like(block).tobytes() + block.tobytes()
        assert b"".join(check.watch([data[:7], data[7:-3], data[-3:]])) == data
        assert check.is_finite == is_finite


def test_a_power_of_two_that_is_none() -> None:
    for power, is_finite in ((254, True), (255, False)):
        check = FiniteCheck("MXFP4", 17)
        assert list(check.watch([bytes(17), bytes([power]) + bytes(16)]))
        assert check.is_finite == is_finite


def test_a_file_of_quantised_blocks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(path, {"intermediate_size": 64}, forms={"": "Q8_0"})
    assert load_model(str(path), SIZES).traced.notes == ()
    tensor = read_gguf(path).tensors["blk.1.attn_k.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.end - 33] = 0x7C  # of the last block's scale
    path.write_bytes(data)
    (note,) = load_model(str(path), SIZES).traced.notes
    assert "'model.layers.1.self_attn.k_proj.weight'" in note
