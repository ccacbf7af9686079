"""Granite 3 and 4: Llama with factors; with experts, and a shared MLP beside them or alone.

Sources: arXiv 2408.13359 (the factors, muP); the model cards of Granite 4. Field names, defaults
and their meaning are those of the Hugging Face models of the same names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from splitup.core import tuning
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.expert_layers import Experts, MoeConfig, Router, Shared
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import Read, add_rope, read_llama, read_shape
from splitup_deploy.frontends.families.mixture_of_experts import PROJECTIONS, add_experts

OWN_NAMES: Final = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".mlp.down_proj.",
}


def read_granite(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a GraniteForCausalLM configuration."""
    return _add_factors(fields, read_llama(fields, context))


def read_granite_moe(fields: Fields, context: int | None) -> MoeConfig:
    """Read a GraniteMoeForCausalLM configuration."""
    config = _read_attention(fields, context)
    return add_experts(fields, config, _read_experts(fields, config.intermediate, None))


def read_granite_moe_shared(fields: Fields, context: int | None) -> MoeConfig:
    """Read a GraniteMoeSharedForCausalLM configuration."""
    config = _read_attention(fields, context)
    shared = None
    if fields.get_written("shared_intermediate_size") != 0:
        shared = Shared(fields.get_integer("shared_intermediate_size"), "mlp")
    return add_experts(fields, config, _read_experts(fields, config.intermediate, shared))


ARCHITECTURES: Final[dict[str, Read]] = {
    "GraniteForCausalLM": read_granite,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeSharedForCausalLM": read_granite_moe_shared,
}


def _read_attention(fields: Fields, context: int | None) -> DecoderConfig:
    fields.expect("position_embedding_type", "rope")
    bias = fields.get_flag("attention_bias", False)
    config = add_rope(fields, read_shape(fields, context, grouped=False))
    return _add_factors(fields, replace(config, qkv_bias=bias, output_bias=bias))


def _add_factors(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with factors of embedding, scores, branches and logits."""
    return replace(
        config,
        embedding_scale=fields.get_number("embedding_multiplier", 1.0),
        attention_scale=fields.get_number("attention_multiplier", 1.0),
        residual_scale=fields.get_number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.get_number("logits_scaling", 1.0),
    )


def _read_experts(fields: Fields, inner: int, shared: Shared | None) -> Experts:
    return Experts(
        count=fields.get_integer("num_local_experts", most=tuning.MAX_EXPERTS),
        active=fields.get_integer("num_experts_per_tok"),
        intermediate=inner,
        prefix="block_sparse_moe",
        names=PROJECTIONS,
        router=Router(renormalised=True, name="router"),
        shared=shared,
    )
