"""The cases of ``tests/deploy/hybrids.py`` as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy.checkpoints import Case, iter_shapes, make_weights
from tests.deploy.ggufs import BLOCKS, MIXTURE_NAMES, make_tokens, quantise, write_gguf

FAMILIES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "kimi_linear": "kimi-linear"}
FAMILIES |= {"qwen3_next": "qwen3next"}
NAMES = {
    **MIXTURE_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
KIMI_NAMES = {
    **MIXTURE_NAMES,
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part[0]}_{part[2]}" for part in ("f_a", "f_b")},
    **{f"self_attn.{part}_proj": f"ssm_{part[0]}_{part[2]}" for part in ("g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "block_sparse_moe.shared_experts.gate_proj": "ffn_gate_shexp",
    "block_sparse_moe.shared_experts.up_proj": "ffn_up_shexp",
    "block_sparse_moe.shared_experts.down_proj": "ffn_down_shexp",
}


def save_hybrid(
    path: Path,
    case: Case,
    metadata: Mapping[str, Any] | None = None,
    *,
    form: str = "F32",
    widened: bool = False,
    grouped: bool = False,
) -> None:
    """Write a case, matrices in ``form`` or, ``widened``, as the float32 that this stands for.

    A metadata key of None is left out. ``grouped``: as Qwen3-Next's first converter did.
    """
    shapes, family = dict(iter_shapes(case)), FAMILIES[case.model_type]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, raw in make_weights(case).items():
        array = np.frombuffer(raw, "<f4").reshape(shapes[name])
        for found, values in convert(case, name, array, grouped).items():
            block = BLOCKS.get(form, (1, 0))[0]
            is_plain = values.ndim < 2 or "conv1d" in found or values.shape[-1] % block
            kind = "F32" if is_plain else form
            shape: tuple[int, ...] = values.shape
            data, values = quantise(np.ascontiguousarray(values, "<f4"), kind)
            if widened:
                kind, data = "F32", values.astype("<f4").tobytes()
            if "_exps." in found:  # all of a layer's in one tensor
                _, (count, *_), before = tensors.get(found, (kind, (0,), b""))
                shape, data = (count + 1, *shape), before + data
            tensors[found] = (kind, shape, data)
    head: dict[str, Any] = {"general.architecture": family}
    head |= {f"{family}.{key}": value for key, value in describe(case).items()}
    head |= make_tokens(case.config["vocab_size"]) | dict(metadata or {})
    write_gguf(path, {k: v for k, v in head.items() if v is not None}, tensors)


def convert(
    case: Case, name: str, array: np.ndarray, grouped: bool = False
) -> dict[str, np.ndarray]:
    """Return what a weight becomes in the file."""
    c, is_kimi = case.config, case.model_type == "kimi_linear"
    stem, _, kind = name.rpartition(".")
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    prefix = f"blk.{layer}."
    if kind == "A_log":
        return {prefix + "ssm_a": -np.exp(tile(case, "A_log", array)).reshape(-1, *[1] * is_kimi)}
    if kind == "dt_bias":
        return {prefix + "ssm_dt.bias": tile(case, "dt_bias", array)}
    if kind == "e_score_correction_bias":
        return {prefix + "exp_probs_b.bias": array}
    if rest == "self_attn.kv_b_proj":
        both = array.reshape(c["num_attention_heads"], -1, c["kv_lora_rank"])
        key, value = np.split(both, [c["qk_nope_head_dim"]], 1)
        return {
            prefix + "attn_k_b.weight": key.transpose(0, 2, 1),
            prefix + "attn_v_b.weight": value,
        }
    if rest == "linear_attn.in_proj_qkvz" and not grouped:
        heads, size = c["linear_num_key_heads"], c["linear_key_head_dim"]
        rows = array.reshape(heads, -1, array.shape[-1])
        wide = (rows.shape[1] - 2 * size) // 2
        parts = np.split(rows, [size, 2 * size, 2 * size + wide], axis=1)
        *qkv, gate = (part.reshape(-1, array.shape[-1]) for part in parts)
        return {
            prefix + "attn_qkv.weight": np.concatenate(qkv),
            prefix + "attn_gate.weight": gate,
        }
    if not is_kimi:
        array = tile(case, rest.removeprefix("linear_attn."), array)
        if "norm" in name and "linear_attn" not in name:
            array = array + np.float32(1)
    rest = re.sub(r"experts\.[0-9]+", "experts", rest)
    names = KIMI_NAMES if is_kimi else NAMES
    if "conv1d" in rest:
        array = array.reshape(1, len(array), 1, -1) if is_kimi else array.squeeze(1)
    if rest == "mlp.shared_expert_gate":
        array = array.squeeze(0)
    return {f"{names.get(stem) or prefix + names[rest]}.{kind}": array}


def tile(case: Case, name: str, array: np.ndarray) -> np.ndarray:
    """Return a weight of Qwen3.5's recurrent layers with a key head's value heads spread out."""
    c = case.config
    if "linear_num_key_heads" not in c or case.model_type == "qwen3_next":
        return array
    heads, size = c["linear_num_key_heads"], c["linear_value_head_dim"]

    def move(values: np.ndarray, width: int) -> np.ndarray:
        rows = values.reshape(heads, -1, width, *values.shape[1:])
        return rows.swapaxes(0, 1).reshape(values.shape)

    if name in ("in_proj_qkv", "conv1d"):
        split = 2 * heads * c["linear_key_head_dim"]
        return np.concatenate([array[:split], move(array[split:], size)])
    if name == "out_proj":
        return move(array.T, size).T
    if name == "in_proj_z":
        return move(array, size)
    return move(array, 1) if name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else array


def describe(case: Case) -> dict[str, Any]:
    """Return the family's metadata; None where there is nothing."""
    c = case.config
    parameters = c.get("rope_parameters", {})
    values: dict[str, Any] = {
        "block_count": c["num_hidden_layers"],
        "context_length": c.get("max_position_embeddings", c.get("model_max_length")),
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c.get("intermediate_size"),
        "attention.head_count": c["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": float(parameters.get("rope_theta", c.get("rope_theta", 10_000.0))),
        "expert_count": c.get("num_experts"),
        "expert_used_count": c.get("num_experts_per_tok", c.get("num_experts_per_token")),
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
    }
    if case.model_type == "kimi_linear":
        sizes, turned = c["linear_attn_config"], c["qk_rope_head_dim"]
        full, layers = sizes["full_attn_layers"], range(1, c["num_hidden_layers"] + 1)
        return values | {
            "vocab_size": c["vocab_size"],
            "attention.head_count_kv": [int(layer in full) for layer in layers],
            "attention.kv_lora_rank": c["kv_lora_rank"],
            "attention.key_length": c["kv_lora_rank"] + turned,
            "attention.key_length_mla": c["qk_nope_head_dim"] + turned,
            "attention.value_length_mla": c["v_head_dim"],
            "rope.dimension_count": turned,
            "ssm.conv_kernel": sizes["short_conv_kernel_size"],
            "kda.head_dim": sizes["head_dim"],
            "expert_shared_count": c["num_shared_experts"],
            "leading_dense_block_count": c["first_k_dense_replace"],
            "expert_weights_scale": c["routed_scaling_factor"],
            "expert_gating_func": 2,
        }
    heads, size = c["linear_num_value_heads"], c["head_dim"]
    partial = parameters.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    kinds = c.get("layer_types")
    return values | {
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * partial),
        "rope.dimension_sections": (
            [*parameters["mrope_section"], 0] if "mrope_section" in parameters else None
        ),
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * c["linear_value_head_dim"],
        "full_attention_interval": (
            1 + kinds.index("full_attention") if kinds else c["full_attention_interval"]
        ),
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
    }
