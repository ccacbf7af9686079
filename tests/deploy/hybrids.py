"""Small random checkpoints of families with recurrent layers.

Like ``tests/deploy/checkpoints.py``, whose functions write and name them; ``make_golden.py`` saves
what Hugging Face's own models compute on them.
"""

from __future__ import annotations

from typing import Any

from tests.deploy.checkpoints import Case
from tests.deploy.mixtures import Shapes, iter_latent, iter_mlp

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
    hidden = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input", "post_attention"):
            yield f"{prefix}{norm}_layernorm.weight", (hidden,)
        is_recurrent = c["layer_types"][layer] == "linear_attention"
        yield from (_iter_delta_net if is_recurrent else _iter_gated)(case, prefix)
        yield from iter_mlp(case, layer, prefix + "mlp.")


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
}
