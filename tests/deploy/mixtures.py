"""Small random checkpoints of families with routers, shared experts and compressed attention.

Like ``tests/deploy/checkpoints.py``, whose functions write and name them; ``make_golden.py`` saves
what Hugging Face's own models compute on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.deploy.checkpoints import Case

_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-6,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def iter_shapes(case: Case) -> Shapes:
    """Yield every weight's Hugging Face name and shape."""
    list_attention = iter_latent if "kv_lora_rank" in case.config else _iter_attention

    def list_layer(layer: int, prefix: str) -> Shapes:
        yield from list_attention(case, prefix + "self_attn.")
        yield from _iter_mlp(case, layer, prefix + "mlp.")

    return iter_model(case, list_layer)


def iter_model(case: Case, list_layer: Callable[[int, str], Shapes]) -> Shapes:
    """Yield what all have, and what a layer of this number and prefix has besides its norms."""
    hidden, vocab = case.config["hidden_size"], case.config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for layer in range(case.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input", "post_attention"):
            yield f"{prefix}{norm}_layernorm.weight", (hidden,)
        yield from list_layer(layer, prefix)


def _iter_attention(case: Case, prefix: str) -> Shapes:
    c, wide = case.config, case.model_type == "olmoe"
    hidden, heads, kv_heads = (
        c[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    size = c.get("head_dim", hidden // heads)
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{prefix}{name}_proj.weight", (count * size, hidden)
        if c.get("attention_bias"):
            yield f"{prefix}{name}_proj.bias", (count * size,)
    yield f"{prefix}o_proj.weight", (hidden, heads * size)
    if wide or c.get("use_qk_norm"):
        yield f"{prefix}q_norm.weight", (heads * size if wide else size,)
        yield f"{prefix}k_norm.weight", (kv_heads * size if wide else size,)


def iter_latent(case: Case, prefix: str) -> Shapes:
    """Yield the weights of a layer's compressed attention."""
    c = case.config
    hidden, heads, rank, turned, fixed = (
        c[key]
        for key in (
            "hidden_size",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
        )
    )
    size, narrow = heads * (turned + fixed), c["q_lora_rank"]
    if narrow is None:
        yield prefix + "q_proj.weight", (size, hidden)
    else:
        yield prefix + "q_a_proj.weight", (narrow, hidden)
        yield prefix + "q_a_layernorm.weight", (narrow,)
        yield prefix + "q_b_proj.weight", (size, narrow)
    yield prefix + "kv_a_proj_with_mqa.weight", (rank + turned, hidden)
    yield prefix + "kv_a_layernorm.weight", (rank,)
    yield prefix + "kv_b_proj.weight", (heads * (fixed + c["v_head_dim"]), rank)
    yield prefix + "o_proj.weight", (hidden, heads * c["v_head_dim"])


def _iter_mlp(case: Case, layer: int, prefix: str) -> Shapes:
    c = case.config
    hidden, inner = c["hidden_size"], c["intermediate_size"]

    def list_mlp(name: str, size: int) -> Shapes:
        for part in ("gate", "up"):
            yield f"{name}{part}_proj.weight", (size, hidden)
        yield f"{name}down_proj.weight", (hidden, size)

    if layer < c.get("first_k_dense_replace", 0):
        yield from list_mlp(prefix, inner)
        return
    count = c.get("num_experts") or c["n_routed_experts"]
    inner = c.get("moe_intermediate_size", inner)
    yield prefix + "gate.weight", (count, hidden)
    if case.model_type not in ("olmoe", "deepseek_v2"):
        yield prefix + "gate.e_score_correction_bias", (count,)
    for expert in range(count):
        yield from list_mlp(f"{prefix}experts.{expert}.", inner)
    if "n_shared_experts" in c:
        yield from list_mlp(prefix + "shared_experts.", c["n_shared_experts"] * inner)


_SINGLE = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
CASES: dict[str, Case] = {
    "olmoe": Case(
        "OlmoeForCausalLM",
        "olmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
        },
        shapes=iter_shapes,
    ),
    "glm4-moe": Case(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **_EXPERTS,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1000.0,
            "num_nextn_predict_layers": 1,
        },
        shapes=iter_shapes,
    ),
    "deepseek-v2": Case(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **_LATENT,
            **_SINGLE,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "rope_theta": 1000.0,
            "rope_scaling": _YARN,
        },
        shapes=iter_shapes,
    ),
    "deepseek-v2-groups": Case(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **_LATENT,
            **_SINGLE,
            "q_lora_rank": 20,
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_theta": 1000.0,
        },
        shapes=iter_shapes,
    ),
    "deepseek-v3": Case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_group": 2,
            "topk_group": 1,
            "rope_theta": 1000.0,
            "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        shapes=iter_shapes,
    ),
    "glm4-moe-lite": Case(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        {**_LATENT, "q_lora_rank": 20, "n_group": 1, "topk_group": 1, "rope_theta": 1000.0},
        shapes=iter_shapes,
    ),
}
# Every row of its matrices can be stored in blocks of 32, and it has no group.
BLOCKS = Case(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    {
        **_LATENT,
        **_SINGLE,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 500.0,
    },
    shapes=iter_shapes,
)
