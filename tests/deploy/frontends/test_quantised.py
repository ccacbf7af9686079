"""Quantised Hugging Face directories: what they stand for, what they compute, what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.decoder.quantised import dequantise, describe_slow
from splitup_deploy.frontends.huggingface.quantised_layers import QuantisationConfig
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from tinygrad.tensor import Tensor

from splitup.core.errors import InvalidModel
from splitup.decode.step import make_causal_step, make_tree_step
from tests.deploy import moes
from tests.deploy.ggufs import save_gguf
from tests.deploy.llamas import TINY, compute_logits, relative_error
from tests.deploy.quantisations import CASES, compressed, packed, save_quantised, write_tensors
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import feed, run_step
from tests.parameters import some_of

PROJECTIONS = 7
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GGUF_SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1},
    "max_position_embeddings": 64,
}
GGUF_FORMS = {"": "Q8_0", "attn_v": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q4_K"}


@pytest.mark.parametrize("name", some_of(CASES, "fp8", "int4-zeros", "int8", "gptq", "awq"))
def test_blocks_stand_for_what_the_format_s_formula_gives(name: str, tmp_path: Path) -> None:
    _, weights = save_quantised(tmp_path, *CASES[name])
    traced = load_model(str(tmp_path), Sizes(chunk=1)).traced
    quantised = [one for one in traced.weights.values() if one.encoding]
    assert traced.notes == describe_slow(one.encoding for one in quantised)
    for source in quantised:
        names = [weight for weight in weights if _is_part(weight, source.spec.name)]
        wanted = np.concatenate([weights[name] for name in names])
        blocks = np.frombuffer(b"".join(source.read()), np.uint8).reshape(source.spec.shape)
        given = dequantise(Tensor(blocks.copy()), source.encoding).numpy()
        assert relative_error(given, wanted) <= 1e-6, source.spec.name
    assert len(quantised) == PROJECTIONS - 3  # q, k, v are one, and gate and up


def _is_part(name: str, joined: str) -> bool:
    module, _, projection = name.removesuffix(".weight").rpartition(".")
    return joined.startswith(module) and projection.removesuffix("_proj") in {
        "qkv_proj": ["q", "k", "v"],
        "gate_up_proj": ["gate", "up"],
    }.get(joined.split(".")[-2], [joined.split(".")[-2].removesuffix("_proj")])


@pytest.mark.usefixtures("float32_caches")
@pytest.mark.parametrize(
    "name",
    some_of(["fp8", "int4", "gptq", "awq", "gguf"], "int4"),  # blocks of others are above
)
def test_a_model_computes_what_its_dequantised_weights_do(name: str, tmp_path: Path) -> None:
    """Logits within 1e-5 and the same greedy tokens over 64, in chunks, single rows and trees."""
    source = tmp_path / "model.gguf"
    if name == "gguf":
        config, weights = save_gguf(source, GGUF_SHAPE, forms=GGUF_FORMS)
    else:
        config, weights = save_quantised(source, *CASES[name])
    program = load_reference(str(source), Sizes(chunk=8))
    state, tokens, rows = program.new_state(), [5], []
    for place in range(64):
        rows.append(run_step(program, state, make_causal_step(tokens[-1:], place))[0])
        tokens.append(int(rows[-1].argmax()))
    given, wanted = np.array(rows), compute_logits(config, weights, tokens[:64])
    assert relative_error(given, wanted) <= 1e-5
    assert wanted.argmax(1).tolist() == tokens[1:]
    assert feed(program, tokens[:64], rows=8).tobytes() == given.tobytes()
    state, (a, b, c) = program.new_state(), tokens[8:11]
    run_step(program, state, make_causal_step(tokens[:8], 0))
    tree = run_step(program, state, make_tree_step([a, 3, b, 9, c], [-1, 0, 0, 1, 2], 8))
    assert tree[[0, 2, 4]].tobytes() == given[8:11].tobytes()


def test_experts_stay_quantised(tmp_path: Path) -> None:
    """Each has tensors of its own; a table of all is looked up."""
    config = {**moes.QWEN3_MOE, "mlp_only_layers": [], "num_hidden_layers": 1}
    config |= {"hidden_size": 64, "moe_intermediate_size": 32}
    weights = moes.make_weights(config)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        if ".experts." not in name:
            tensors[name] = ("F32", array)
            continue
        stored, weights[name] = packed(4, 32)(array)
        tensors |= {f"{stem}.{part}": numbers for part, numbers in stored.items()}
    moes.save_moe(tmp_path, config, weights=weights)
    table = json.loads((tmp_path / "config.json").read_text())
    table["quantization_config"] = CASES["int4"][0]
    (tmp_path / "config.json").write_text(json.dumps(table))
    write_tensors(tmp_path / "model.safetensors", tensors)
    given = feed(load_graph(str(tmp_path), Sizes(chunk=1)), [5, 7, 1])
    wanted = moes.compute_logits(config, weights, [5, 7, 1])
    assert relative_error(given, wanted) <= 1e-5


_GPTQ, _AWQ, _INT4 = (CASES[name][0] for name in ("gptq", "awq", "int4"))
REFUSED: dict[str, dict[str, Any]] = {
    "quant_method = 'bitsandbytes'": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "desc_act = True; supported: false": {**_GPTQ, "desc_act": True},
    "bits = 3": {**_GPTQ, "bits": 3},
    "checkpoint_format = 'marlin'": {**_GPTQ, "checkpoint_format": "marlin"},
    "dynamic = ": {**_GPTQ, "dynamic": {"-:.*": {}}},
    "version = 'gemv'": {**_AWQ, "version": "gemv"},
    "zero_point = False": {**_AWQ, "zero_point": False},
    "the format 'nvfp4-pack-quantized'": compressed("nvfp4-pack-quantized", type="float"),
    "num_bits = 2": compressed("pack-quantized", num_bits=2),
    "transform_config = ": {**_INT4, "transform_config": {"config_groups": {"R1": {}}}},
    "kv_cache_scheme = ": {**_INT4, "kv_cache_scheme": {"num_bits": 8}},
    "weight_block_size = ": {**CASES["fp8"][0], "weight_block_size": [64, 64]},
    "the field 'outliers'": {**_AWQ, "outliers": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_variation_that_is_not_read_is_refused_by_name(message: str, tmp_path: Path) -> None:
    config = {**TINY, "quantization_config": REFUSED[message]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match=message) as error:
        load_model(str(tmp_path))
    assert len(str(error.value)) <= 220


Q = "model.layers.0.self_attn.q_proj"
TENSORS: dict[str, tuple[str, dict[str, tuple[str, np.ndarray]]]] = {
    "columns in another order": ("int4", {f"{Q}.weight_g_idx": ("I32", np.zeros(128, "i4"))}),
    "which do not fit": ("fp8", {f"{Q}.weight_scale_inv": ("F32", np.ones((2, 3), "f4"))}),
    "zero points": ("int8", {f"{Q}.weight_zero_point": ("I8", np.zeros((128, 1), "i1"))}),
    r"is quantised\[128, 64\]": ("int4", {f"{Q}.weight_shape": ("I64", np.array([128, 64]))}),
    "is .128, 96. in int32": ("int4", {f"{Q}.weight_shape": ("I64", np.array([128, 96]))}),
    "no weight_shape": ("int4", {f"{Q}.weight_shape": ("I64", np.array([128]))}),
    "has scales of int32": ("int4", {f"{Q}.weight_scale": ("I32", np.ones((128, 4), "i4"))}),
    "has inputs in another order": ("gptq", {f"{Q}.g_idx": ("I32", np.zeros(128, "i4"))}),
    "with scales": ("awq", {f"{Q}.scales": ("F16", np.ones((3, 128), "f2"))}),
    "lacks qzeros": ("awq", {f"{Q}.scales": ("F16", np.ones(128, "f2"))}),
}


@pytest.mark.parametrize("message", TENSORS)
def test_tensors_that_do_not_belong_together(message: str, tmp_path: Path) -> None:
    name, changed = TENSORS[message]
    save_quantised(tmp_path, *CASES[name], replaced=changed)
    with pytest.raises(InvalidModel, match=message) as error:
        load_model(str(tmp_path), Sizes(chunk=1))
    assert Q in str(error.value)


def test_a_scale_or_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    config, quantise = CASES["fp8"]
    stored, _ = quantise(np.zeros((128, 128), np.float32))
    for part, bad in (("weight", np.uint8(0xFF)), ("weight_scale_inv", np.float32(np.nan))):
        dtype, array = stored[part]
        array = array.copy()
        array[0, 0] = bad
        save_quantised(tmp_path, config, quantise, replaced={f"{Q}.{part}": (dtype, array)})
        note, slow = load_model(str(tmp_path), Sizes(chunk=1)).traced.notes
        assert slow.startswith("weights of F8_")
        assert f"NaN or infinity in weight '{Q}.weight'" in note


@pytest.mark.parametrize("name", ["fp8", "int4", "gptq", "awq"])
def test_a_preview_without_weights_has_the_sizes_of_the_model(name: str, tmp_path: Path) -> None:
    save_quantised(tmp_path / "whole", *CASES[name])
    whole = load_model(str(tmp_path / "whole"), Sizes(chunk=1)).traced.graph
    shapes = load_model(str(tmp_path / "whole" / "config.json"), Sizes(chunk=1)).traced.graph
    for known, shape in zip(whole.weights, shapes.weights, strict=True):
        assert (known.name, known.dtype) == (shape.name, shape.dtype)
        assert known.shape == shape.shape or name == "int4"  # its scales' dtype is not said


@pytest.mark.parametrize(
    ("name", "is_skipped"),
    [
        ("lm_head", False),
        ("mlp.gate", True),
        ("model.layers.1.mlp.*", True),
        ("re:.*mlp.gate$", False),
        (r"re:.*mlp\.(up|gate)_proj", True),
        (r"re:^model\.layers\.1\..*", True),
        (r"re:mlp\..*", False),
    ],
)
def test_modules_are_left_out_by_names_and_patterns(name: str, is_skipped: bool) -> None:
    config = QuantisationConfig(FP8 | {"modules_to_not_convert": [name]})
    found = config.make_shape("model.layers.1.mlp.gate_proj.weight", 128, 128, "bfloat16")
    assert (found is None) == is_skipped


@pytest.mark.parametrize("name", ["re:(.*)*!", "re:(", "re:" + "(a|b)" * 30, "re:.{1,9}"])
def test_s129_a_pattern_of_modules_takes_no_time(name: str) -> None:
    config = QuantisationConfig(FP8 | {"modules_to_not_convert": [name]})
    with pytest.raises(InvalidModel, match="leaves out modules by 're:"):
        config.make_shape(f"model.layers.{'a' * 64}_proj.weight", 128, 128, "bfloat16")


def test_s133_a_layer_of_which_only_the_shape_is_known_takes_no_memory() -> None:
    tracemalloc.start()
    found = QuantisationConfig(FP8).make_shape("model.layers.0.a_proj.weight", 1, 2**31, "bfloat16")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None and found.spec.shape[:2] == (1, 2**24)
    assert most < 2**20
