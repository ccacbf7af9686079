"""GGUF files of families whose converter splits or renames what the library saves.

They are written as ``conversion/*.py`` of llama.cpp write them, from the cases of
``tests/deploy/checkpoints.py`` and ``tests/deploy/variations.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy import checkpoints, hybridggufs, variations
from tests.deploy.checkpoints import Case
from tests.deploy.ggufs import (
    _GEMMA_NAMES,
    BLOCKS,
    MIXTURE_NAMES,
    describe_mixture,
    interleave,
    make_tokens,
    quantise,
    write_gguf,
)

FAMILIES = {
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "granite": "granite",
    "granite-moe": "granitemoe",
    "granite-moe-shared": "granitemoe",
    "granite-4-dense": "granite",
    "granite-hybrid": "granitehybrid",
    "cohere2": "cohere2",
    "gpt-oss": "gpt-oss",
    "gemma4": "gemma4",
    "gemma4-e": "gemma4",
    "gemma4-moe": "gemma4",
    "llama4": "llama4",
    "nemotron-h": "nemotron_h",
    "nemotron-3": "nemotron_h_moe",
    "olmo3": "olmo2",
    "minimax-m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral4": "mistral4",
    "deepseek-v3.2": "deepseek32",
    "glm-5": "glm-dsa",
    "phimoe": "phimoe",
    "qwen3-next": "qwen3next",
}
CASES = {name: (checkpoints.CASES | variations.CASES)[name] for name in FAMILIES}
_INTERLEAVED = ("mistral3", "smollm3", "granite", "granitemoe", "granitehybrid")
_NAMES = {
    **MIXTURE_NAMES,
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.output_linear": "ffn_down_shexp",
    **{f"mamba.{part}_proj": f"ssm_{part}" for part in ("in", "out")},
    **{f"mamba.{part}": f"ssm_{part}" for part in ("conv1d", "norm")},
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_OTHERS = {
    "olmo2": _GEMMA_NAMES,
    "granite": {"shared_mlp.output_linear": "ffn_down"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "gemma4": {
        **_GEMMA_NAMES,
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    },
}
_TURNED = {
    "feed_forward.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "feed_forward.experts.down_proj": ("ffn_down_exps",),
}
_WHOLE = {
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
_EACH = re.compile(r"((?:block_sparse_moe|mlp)\.experts)\.[0-9]+(\.\w+)\.weight")
_HALVES = {"block_sparse_moe.input_linear": "exps", "shared_mlp.input_linear": "shexp"}


def _split(
    c: Mapping[str, Any], family: str, rest: str, array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a block's weight: their names in the block, and values."""
    if family == "mistral4" and rest.startswith("mlp.experts."):
        rest = rest.removeprefix("mlp.")
    stem, _, kind = rest.rpartition(".")
    if stem in _HALVES:  # gate over up
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            suffix = "" if family == "granite" else f"_{_HALVES[stem]}"
            yield f"ffn_{part}{suffix}.weight", half
    elif stem == "self_attn.kv_b_proj":
        both = array.reshape(c["num_attention_heads"], -1, c["kv_lora_rank"])
        key, value = np.split(both, [c["qk_nope_head_dim"]], 1)
        yield from (("attn_k_b.weight", key.transpose(0, 2, 1)), ("attn_v_b.weight", value))
    elif (
        stem == "mlp.experts" and "gate_proj" not in rest
    ):  # gate and up in turn, and matrices the other way round
        kind = "bias" if rest.endswith("_bias") else "weight"
        values = array if kind == "bias" else array.swapaxes(1, 2)
        if "gate_up" in rest:
            yield f"ffn_gate_exps.{kind}", values[:, ::2]
            yield f"ffn_up_exps.{kind}", values[:, 1::2]
        else:
            yield f"ffn_down_exps.{kind}", values
    elif rest in ("mamba.A_log", "mamba.D"):  # as columns
        values = -np.exp(array) if rest == "mamba.A_log" else array
        yield f"ssm_{rest.removeprefix('mamba.')[0].lower()}", values[:, None]
    elif rest == "mamba.dt_bias":
        yield "ssm_dt.bias", array
    elif rest == "mamba.conv1d.weight":
        yield "ssm_conv1d.weight", array[:, 0]
    elif rest in _TURNED:
        parts = np.split(array.swapaxes(1, 2), len(_TURNED[rest]), axis=1)
        for found, part in zip(_TURNED[rest], parts, strict=True):
            yield f"{found}.weight", part
    elif rest in _WHOLE:
        yield _WHOLE[rest], array
    else:
        yield f"{(_NAMES | _OTHERS.get(family, {}))[stem]}.{kind}", array


def save_converted(
    path: Path,
    name: str,
    case: Case,
    metadata: Mapping[str, Any] | None = None,
    *,
    form: str = "F32",
    widened: bool = False,
) -> None:
    """Write a case of one of ``FAMILIES``.

    Matrices are in ``form`` or, ``widened``, the float32 that this stands for.
    """
    c, family = case.config, FAMILIES[name]
    if family.startswith("nemotron"):
        save_nemotron(path, name, case, metadata)
        return
    if family == "qwen3next":
        hybridggufs.save_hybrid(path, case, metadata, form=form, widened=widened)
        return
    shapes = dict(checkpoints.iter_shapes(case))
    size = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    experts: dict[str, np.ndarray] = {}
    for weight, raw in checkpoints.make_weights(case).items():
        array = np.frombuffer(raw, "<f4").reshape(shapes[weight])
        stem, _, kind = weight.rpartition(".")
        if stem in _NAMES:
            found = [(f"{_NAMES[stem]}.{kind}", array)]
        else:
            layer, _, rest = weight.removeprefix("model.layers.").partition(".")
            if family == "llama4" and "experts" not in rest:
                rest = rest.replace("feed_forward.", "mlp.")
            if (match := _EACH.fullmatch(rest)) is not None:  # all of a layer's in one tensor
                rest = f"{match[1]}{match[2]}.weight"
                before = [experts[place]] if (place := f"{layer}.{rest}") in experts else []
                array = experts[place] = np.concatenate([*before, array[None]])
            found = [(f"blk.{layer}.{one}", part) for one, part in _split(c, family, rest, array)]
        for place, part in found:
            is_plain = part.ndim < 2 or part.shape[-1] % BLOCKS.get(form, (1, 0))[0]
            kind = "F32" if is_plain else form
            data, values = quantise(np.ascontiguousarray(part), kind)
            if widened:
                kind, data = "F32", values.astype("<f4").tobytes()
            if family in _INTERLEAVED and place.split(".")[-2] in ("attn_q", "attn_k"):
                data = interleave(data, len(part), size)
            tensors[place] = (kind, part.shape, data)
    if family == "gemma4":
        pairs, turned = _count_pairs(case)
        factors = np.array([1.0] * turned + [1e30] * (pairs - turned), "<f4")
        tensors["rope_freqs.weight"] = ("F32", (pairs,), factors.tobytes())
    for kind in ("long", "short") if "long_factor" in (c.get("rope_scaling") or {}) else ():
        data = np.array(c["rope_scaling"][f"{kind}_factor"], "<f4").tobytes()
        tensors[f"rope_factors_{kind}.weight"] = ("F32", (size // 2,), data)
    head: dict[str, Any] = {"general.architecture": family}
    head |= {f"{family}.{key}": value for key, value in _describe(case, family, name).items()}
    head |= make_tokens(c["vocab_size"]) | dict(metadata or {})
    write_gguf(path, {k: v for k, v in head.items() if v is not None}, tensors)


def _describe(case: Case, family: str, name: str) -> dict[str, Any]:
    c = case.config
    filled = Case("", "", {"num_experts_per_tok": None, **c})
    values = describe_mixture(filled, split="kv_lora_rank" in c)
    values["expert_count"] = c.get("num_local_experts", c.get("n_routed_experts"))
    if family.startswith("granite"):
        del values["attention.key_length"], values["attention.value_length"]
        values |= {
            "attention.scale": c["attention_multiplier"],
            "embedding_scale": c["embedding_multiplier"],
            "logit_scale": c["logits_scaling"],
            "residual_scale": c["residual_multiplier"],
            "expert_shared_feed_forward_length": c.get("shared_intermediate_size"),
        }
    if "mamba_d_state" in c:
        values |= {
            "attention.head_count_kv": [
                c["num_key_value_heads"] * (kind == "attention") for kind in c["layer_types"]
            ],
            "rope.scaling.finetuned": c["position_embedding_type"] == "rope",
            "ssm.conv_kernel": c["mamba_d_conv"],
            "ssm.group_count": c["mamba_n_groups"],
            "ssm.inner_size": c["mamba_n_heads"] * c["mamba_d_head"],
            "ssm.state_size": c["mamba_d_state"],
            "ssm.time_step_rank": c["mamba_n_heads"],
        }
    if family == "gemma4":
        values |= _describe_gemma4(case)
    if family.startswith("nemotron"):
        values = _describe_nemotron(case, values)
    if name == "olmo3":
        values |= _describe_yarn(c["rope_scaling"]) | {
            "attention.sliding_window": c["sliding_window"],
            "attention.sliding_window_pattern": [
                kind == "sliding_attention" for kind in c["layer_types"]
            ],
        }
    if family in ("mistral3", "mistral4"):
        scaling = c["rope_parameters"]
        values |= _describe_yarn(scaling)
        values["rope.scaling.yarn_log_multiplier"] = scaling["mscale_all_dim"]
        values["attention.temperature_scale"] = scaling["llama_4_scaling_beta"]
    if family == "mistral4":  # the converter does not say how queries grow
        values["rope.scaling.yarn_log_multiplier"] *= 0.1
        values |= {"attention.temperature_scale": None, "expert_gating_func": None}
    if "index_topk" in c:
        values |= {
            "attention.indexer.head_count": c["index_n_heads"],
            "attention.indexer.key_length": c["index_head_dim"],
            "attention.indexer.top_k": c["index_topk"],
        }
    if family == "phimoe":
        values |= {
            "attention.sliding_window": c.get("sliding_window") or 0,
            "rope.scaling.original_context_length": c.get(
                "original_max_position_embeddings", c["max_position_embeddings"]
            ),
        }
    if family == "minimax-m2":
        values |= {
            "expert_feed_forward_length": c["intermediate_size"],
            "expert_gating_func": 2,
            "rope.dimension_count": c["rotary_dim"],
        }
    if family == "llama4":
        values |= {
            "feed_forward_length": c["intermediate_size_mlp"],
            "expert_feed_forward_length": c["intermediate_size"],
            "interleave_moe_layer_step": c["interleave_moe_layer_step"],
        }
    if family == "cohere2":
        del values["attention.layer_norm_rms_epsilon"]
        values |= {
            "attention.layer_norm_epsilon": c["layer_norm_eps"],
            "attention.sliding_window": c["sliding_window"],
            "logit_scale": c["logit_scale"],
            "rope.scaling.type": "none",
        }
    if family == "gpt-oss":
        values |= _describe_yarn(c["rope_scaling"]) | {
            "attention.sliding_window": c["sliding_window"],
            "expert_feed_forward_length": c["intermediate_size"],
        }
    return values


def _describe_yarn(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.yarn_attn_factor": scaling.get("attention_factor"),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": scaling["beta_fast"],
        "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
    }


def _get_global(c: Mapping[str, Any]) -> tuple[int, int]:
    """Return key heads and head size of Gemma 4's layers without a window."""
    row: Mapping[str, int] = next(iter(c.get("per_layer_config", {}).values()), {})
    heads = row.get("num_key_value_heads", c["num_key_value_heads"])
    size = row.get("head_dim", c.get("global_head_dim"))
    return c.get("num_global_key_value_heads", heads), size


def _count_pairs(case: Case) -> tuple[int, int]:
    """Return how many pairs a head has where all positions are seen, and how many are turned."""
    size = _get_global(case.config)[1]
    full = case.config.get("rope_parameters", {}).get("full_attention", {})
    return size // 2, int(size * full.get("partial_rotary_factor", 0.25) / 2)


def _describe_gemma4(case: Case) -> dict[str, Any]:
    c = case.config
    heads, size = _get_global(c)
    near = [kind == "sliding_attention" for kind in c["layer_types"]]
    full, local = (
        c.get("rope_parameters", {}).get(f"{kind}_attention", {}) for kind in ("full", "sliding")
    )
    values = {
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.key_length_swa": c["head_dim"],
        "attention.value_length_swa": c["head_dim"],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": near,
        "attention.shared_kv_layers": c.get("num_kv_shared_layers", 0),
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "final_logit_softcapping": c["final_logit_softcapping"],
        "rope.freq_base": full.get("rope_theta", 1_000_000.0),
        "rope.freq_base_swa": local.get("rope_theta", 10_000.0),
        "rope.dimension_count": size,
        "rope.dimension_count_swa": c["head_dim"],
        "expert_count": c.get("num_experts"),
        "expert_used_count": c.get("top_k_experts"),
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
        "vocab_size": None,
    }
    if "num_global_key_value_heads" in c:
        counts = [c["num_key_value_heads"] if one else heads for one in near]
        values["attention.head_count_kv"] = counts
    if c.get("use_double_wide_mlp"):
        inner, own = c["intermediate_size"], len(near) - c["num_kv_shared_layers"]
        values["feed_forward_length"] = [inner] * own + [2 * inner] * (len(near) - own)
    return values


_NEMOTRON_NAMES = {
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "norm": "attn_norm",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    "mixer.o_proj": "attn_output",
    **{f"mixer.{part}_proj": f"ssm_{part}" for part in ("in", "out")},
    **{f"mixer.{part}": f"ssm_{part}" for part in ("conv1d", "norm")},
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_EXPERT = re.compile(r"mixer\.experts\.([0-9]+)\.(up|down)_proj\.weight")


def save_nemotron(
    path: Path, name: str, case: Case, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write a Nemotron, whose weights have names of their own."""
    c, family = case.config, FAMILIES[name]
    shapes, tensors = dict(checkpoints.iter_shapes(case)), dict[str, np.ndarray]()
    for weight, raw in checkpoints.make_weights(case).items():
        array = np.frombuffer(raw, "<f4").reshape(shapes[weight])
        stem, _, kind = weight.rpartition(".")
        layer, _, rest = weight.removeprefix("backbone.layers.").partition(".")
        prefix = f"blk.{layer}."
        if (match := _EXPERT.fullmatch(rest)) is not None:
            place = f"{prefix}ffn_{match[2]}_exps.weight"
            others = [tensors[place]] if place in tensors else []
            tensors[place] = np.concatenate([*others, array[None]])
        elif rest in ("mixer.A_log", "mixer.D"):  # as columns
            values = -np.exp(array) if rest == "mixer.A_log" else array
            tensors[f"{prefix}ssm_{rest.removeprefix('mixer.')[0].lower()}"] = values[:, None]
        elif rest == "mixer.dt_bias":
            tensors[f"{prefix}ssm_dt.bias"] = array
        elif kind == "e_score_correction_bias":
            tensors[f"{prefix}exp_probs_b.bias"] = array
        elif rest == "mixer.conv1d.weight":
            tensors[f"{prefix}ssm_conv1d.weight"] = array[:, 0]
        elif rest == "mixer.norm.weight":
            tensors[f"{prefix}ssm_norm.weight"] = array.reshape(c["n_groups"], -1)
        else:
            found = (_NAMES | _NEMOTRON_NAMES).get(stem)
            found = found or prefix + _NEMOTRON_NAMES[rest.rpartition(".")[0]]
            tensors[f"{found}.{kind}"] = array
    head: dict[str, Any] = {"general.architecture": family}
    head |= {f"{family}.{key}": value for key, value in _describe(case, family, name).items()}
    head |= make_tokens(c["vocab_size"]) | dict(metadata or {})
    rows = {n: ("F32", a.shape, np.ascontiguousarray(a).tobytes()) for n, a in tensors.items()}
    write_gguf(path, {k: v for k, v in head.items() if v is not None}, rows)


def _describe_nemotron(case: Case, values: dict[str, Any]) -> dict[str, Any]:
    c, pattern = case.config, case.config["hybrid_override_pattern"]
    is_moe = "n_routed_experts" in c
    width = c["moe_intermediate_size"] if is_moe else c["intermediate_size"]
    return values | {
        "context_length": 2**20,
        "feed_forward_length": [width * (kind in "-E") for kind in pattern],
        "attention.head_count_kv": [c["num_key_value_heads"] * (k == "*") for k in pattern],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
        "rope.dimension_count": c["hidden_size"] // c["num_attention_heads"],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.group_count": c["n_groups"],
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
        "ssm.state_size": c["ssm_state_size"],
        "ssm.time_step_rank": c["mamba_num_heads"],
        "leading_dense_block_count": None,
        "expert_gating_func": None,
        "expert_shared_feed_forward_length": c.get("moe_shared_expert_intermediate_size"),
        "expert_count": c.get("n_routed_experts"),
        "moe_latent_size": c.get("moe_latent_size"),
    }
