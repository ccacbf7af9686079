"""Granite 3 and 4: Llama with factors; with experts, a shared MLP beside them or alone, Mamba-2.

Sources: arXiv 2408.13359 (the factors); the model cards of Granite 4. Field names, defaults and
their meaning are those of the Hugging Face models of the same names.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig, Recurrent, Router, Shared
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import (
    Read,
    add_rope,
    read_activation,
    read_llama,
    read_shape,
)
from splitup_deploy.frontends.families.mixture_of_experts import add_experts

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


def read_granite_moe(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a GraniteMoeForCausalLM configuration."""
    return _add_experts(fields, _read_attention(fields, context))


def read_granite_moe_shared(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a GraniteMoeSharedForCausalLM configuration."""
    config = _read_attention(fields, context)
    shared = None
    if fields.get_written("shared_intermediate_size") != 0:
        shared = Shared(fields.get_integer("shared_intermediate_size"), "mlp")
    return _add_experts(fields, config, shared=shared)


def read_granite_hybrid(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a GraniteMoeHybridForCausalLM configuration: Granite 4, with and without Mamba-2.

    Without ``position_embedding_type`` "rope" attention knows no positions. Without experts the
    shared MLP is the only one.
    """
    fields.rename({"layers_block_type": "layer_types"})
    position = fields.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise fields.refuse("position_embedding_type", "rope, nope, null")
    inner = "shared_intermediate_size"
    config = add_rope(fields, read_shape(fields, context, grouped=False, inner=inner, bias=False))
    if position != "rope":
        config = replace(config, unturned=frozenset(range(config.layers)))
    config = _add_factors(fields, config)
    config = replace(config, recurrent=_read_mamba(fields, config.layers, config.hidden))
    experts = fields.get_integer("intermediate_size")
    if fields.get("num_local_experts", 8) == 0:
        # without effect then
        fields.skip("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
        return config
    return _add_experts(fields, config, experts, Shared(config.intermediate, "mlp"))


ARCHITECTURES: Final[dict[str, Read]] = {
    "GraniteForCausalLM": read_granite,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeSharedForCausalLM": read_granite_moe_shared,
    "GraniteMoeHybridForCausalLM": read_granite_hybrid,
}
_INFINITIES: Final[tuple[Any, ...]] = (math.inf, {"__float__": "Infinity"})  # as they are saved
_KINDS: Final = {
    "mamba": True,
    "linear_attention": True,
    "attention": False,
    "full_attention": False,
}


def _read_mamba(fields: Fields, layers: int, hidden: int) -> Recurrent | None:
    """Read the layers with Mamba-2, None if there are none."""
    kinds = fields.get_words("layer_types", layers, _KINDS, is_needed=True) or []
    fields.skip("mamba_chunk_size")  # how the original divides its work
    fields.expect("mamba_n_groups", 1)  # versions of the original differ for several
    check_time_steps(fields)
    width = fields.get_integer("mamba_expand", 2) * hidden
    heads = fields.get_integer("mamba_n_heads", 128)
    size = width // heads
    if fields.get("mamba_d_head", "auto") != "auto":
        size = fields.get_integer("mamba_d_head")
    states = fields.get_integer("mamba_d_state", 256)
    taps = fields.get_integer("mamba_d_conv", 4)
    conv_bias = fields.get_flag("mamba_conv_bias", True)
    bias = fields.get_flag("mamba_proj_bias", False)
    found = frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind])
    if heads * size != width or taps < 2:
        raise InvalidModel(
            f"config.json asks for {heads} Mamba heads of {size} in a width of {width}, and a "
            f"convolution over {taps} tokens, which is not possible"
        )
    if not found:
        return None
    return Recurrent(
        found,
        key_heads=1,
        value_heads=heads,
        key_dim=states,
        value_dim=size,
        taps=taps,
        selective=True,
        conv_bias=conv_bias,
        bias=bias,
        activation=read_activation(fields),
    )


def check_time_steps(fields: Fields) -> None:
    """Raise InvalidModel for state spaces whose time steps are bounded."""
    if fields.get("time_step_limit") not in (None, *([0.0, most] for most in _INFINITIES)):
        raise fields.refuse("time_step_limit", "0 to infinity")


def _read_attention(fields: Fields, context: int | None) -> DecoderConfig:
    fields.expect("position_embedding_type", "rope")
    config = add_rope(fields, read_shape(fields, context, grouped=False, bias=False))
    return _add_factors(fields, config)


def _add_factors(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with factors of embedding, scores, branches and logits."""
    return replace(
        config,
        embedding_scale=fields.get_number("embedding_multiplier", 1.0),
        attention_scale=fields.get_number("attention_multiplier", 1.0),
        residual_scale=fields.get_number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.get_number("logits_scaling", 1.0),
    )


def _add_experts(
    fields: Fields, config: DecoderConfig, inner: int | None = None, shared: Shared | None = None
) -> DecoderConfig:
    router = Router(renormalised=True, name="router")
    return add_experts(fields, config, router, inner, prefix="block_sparse_moe", shared=shared)
