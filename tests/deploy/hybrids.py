"""Small random checkpoints of families with recurrent layers.

Like ``tests/deploy/checkpoints.py``, whose functions write and name them; ``make_golden.py`` saves
what Hugging Face's own models compute on them.
"""

from __future__ import annotations

from typing import Any

from tests.deploy.checkpoints import Case
from tests.deploy.mixtures import Shapes, iter_latent, iter_model

_QWEN: dict[str, Any] = {
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}


def iter_shapes(case: Case) -> Shapes:
    """Yield every weight's Hugging Face name and shape."""
    c = case.config

    def list_layer(layer: int, prefix: str) -> Shapes:
        if case.model_type == "kimi_linear":
            is_recurrent = layer + 1 in c["linear_attn_config"]["kda_layers"]
            list_mixer = _iter_kda if is_recurrent else _iter_latent
        else:
            is_recurrent = c["layer_types"][layer] == "linear_attention"
            list_mixer = _iter_delta_net if is_recurrent else _iter_gated
        yield from list_mixer(case, prefix)
        if layer < c.get("first_k_dense_replace", 0) or "num_experts" not in c:
            yield from _iter_mlp(prefix + "mlp.", c["intermediate_size"], c["hidden_size"])
        else:
            yield from _iter_experts(case, prefix)

    return iter_model(case, list_layer)


def _iter_mlp(prefix: str, inner: int, hidden: int, names: str = "") -> Shapes:
    gate, up, down = names.split() or ("gate_proj", "up_proj", "down_proj")
    yield f"{prefix}{gate}.weight", (inner, hidden)
    yield f"{prefix}{up}.weight", (inner, hidden)
    yield f"{prefix}{down}.weight", (hidden, inner)


def _iter_experts(case: Case, prefix: str) -> Shapes:
    c, is_kimi = case.config, case.model_type == "kimi_linear"
    hidden, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    prefix += "block_sparse_moe." if is_kimi else "mlp."
    yield prefix + "gate.weight", (count, hidden)
    for expert in range(count):
        yield from _iter_mlp(f"{prefix}experts.{expert}.", inner, hidden, "w1 w3 w2" * is_kimi)
    if is_kimi:
        yield prefix + "gate.e_score_correction_bias", (count,)
        yield from _iter_mlp(prefix + "shared_experts.", inner, hidden)
    else:
        inner = c["shared_expert_intermediate_size"]
        yield from _iter_mlp(prefix + "shared_expert.", inner, hidden)
        yield prefix + "shared_expert_gate.weight", (1, hidden)


def _iter_latent(case: Case, prefix: str) -> Shapes:
    yield from iter_latent(case, prefix + "self_attn.")


def _iter_kda(case: Case, prefix: str) -> Shapes:
    c, prefix = case.config, prefix + "self_attn."
    sizes = c["linear_attn_config"]
    hidden, heads, size = c["hidden_size"], sizes["num_heads"], sizes["head_dim"]
    for part in "qkv":
        yield f"{prefix}{part}_proj.weight", (heads * size, hidden)
        yield f"{prefix}{part}_conv1d.weight", (heads * size, 1, sizes["short_conv_kernel_size"])
    for part in "fg":
        yield f"{prefix}{part}_a_proj.weight", (size, hidden)
        yield f"{prefix}{part}_b_proj.weight", (heads * size, size)
    yield prefix + "b_proj.weight", (heads, hidden)
    yield prefix + "A_log", (1, 1, heads, 1)
    yield prefix + "dt_bias", (heads * size,)
    yield prefix + "o_norm.weight", (size,)
    yield prefix + "o_proj.weight", (hidden, heads * size)


def _iter_delta_net(case: Case, prefix: str) -> Shapes:
    c, prefix = case.config, prefix + "linear_attn."
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    yield prefix + "in_proj_qkv.weight", (channels, hidden)
    yield prefix + "conv1d.weight", (channels, 1, c["linear_conv_kernel_dim"])
    yield prefix + "in_proj_z.weight", (values, hidden)
    yield prefix + "in_proj_a.weight", (heads, hidden)
    yield prefix + "in_proj_b.weight", (heads, hidden)
    yield prefix + "A_log", (heads,)
    yield prefix + "dt_bias", (heads,)
    yield prefix + "norm.weight", (c["linear_value_head_dim"],)
    yield prefix + "out_proj.weight", (hidden, values)


def _iter_gated(case: Case, prefix: str) -> Shapes:
    c, prefix = case.config, prefix + "self_attn."
    hidden, size = c["hidden_size"], c["head_dim"]
    query, cached = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    for name, width in (("q", 2 * query), ("k", cached), ("v", cached)):
        yield f"{prefix}{name}_proj.weight", (width, hidden)
    yield prefix + "o_proj.weight", (hidden, query)
    yield prefix + "q_norm.weight", (size,)
    yield prefix + "k_norm.weight", (size,)


CASES: dict[str, Case] = {
    "qwen3.5": Case("Qwen3_5ForCausalLM", "qwen3_5_text", _QWEN, shapes=iter_shapes),
    "qwen3.5-moe": Case(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        {
            **_QWEN,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
        shapes=iter_shapes,
        without=frozenset({"intermediate_size"}),
    ),
    "kimi-linear": Case(
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "model_max_length": 32,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "mla_use_nope": True,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 8,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 6,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 24,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "topk_group": 1,
            "use_grouped_topk": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
        },
        shapes=iter_shapes,
        without=frozenset({"max_position_embeddings"}),
    ),
}
