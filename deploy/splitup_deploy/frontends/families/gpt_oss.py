"""gpt-oss: attention with sinks, and experts with biases and a bounded activation.

Every second layer sees a window. Rope is scaled by YaRN. All experts of a layer are one tensor, in
bfloat16 or MXFP4. Source: the model card of gpt-oss, arXiv 2508.10925, section 2; field names,
defaults and their meaning are those of the Hugging Face model.
"""

from __future__ import annotations

from dataclasses import replace

from splitup_deploy.frontends.decoder.decoder_config import Clamped
from splitup_deploy.frontends.decoder.expert_layers import MoeConfig, Router
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import (
    add_rope,
    add_window,
    read_local_layers,
    read_shape,
)
from splitup_deploy.frontends.families.mixture_of_experts import add_experts


def read_gpt_oss(fields: Fields, context: int | None) -> MoeConfig:
    """Read a GptOssForCausalLM configuration."""
    fields.skip("initial_context_length")  # says once more where YaRN begins
    fields.rename({"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"})
    fields.expect("hidden_act", "silu")
    if "rope_parameters" not in fields:
        fields.get_number("rope_theta"), fields.get_written("rope_scaling")
    config = read_shape(fields, context, split=False, epsilon=1e-5, bias=True)
    alpha, limit = (fields.get_number(f"swiglu_{key}", x) for key, x in _SWIGLU.items())
    config = replace(add_rope(fields, config), sinks=True, activation=Clamped(alpha, limit))
    layers = read_local_layers(fields, config.layers, lambda layer: layer % 2 == 0)
    return add_experts(
        fields,
        add_window(fields, config, layers),
        Router(renormalised=True, name="router", linear_bias=True),
        names=("gate_up_proj", "down_proj"),
        biased=True,
    )


_SWIGLU = {"alpha": 1.702, "limit": 7.0}
ARCHITECTURES = {"GptOssForCausalLM": read_gpt_oss}
