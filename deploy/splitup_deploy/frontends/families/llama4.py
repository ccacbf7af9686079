"""Llama 4: layers with rope see chunks of the text, every fourth layer has no rope and sees all.

Experts read what their gate multiplied. Source: Meta's model card of Llama 4; field names, defaults
and their meaning are those of the Hugging Face model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from splitup_deploy.frontends.decoder.decoder_config import (
    DecoderConfig,
    Growth,
    Local,
    Router,
    Shared,
)
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import add_rope, read_shape, read_unturned
from splitup_deploy.frontends.families.mixture_of_experts import add_experts

OWN_NAMES: Final = {".feed_forward.": ".mlp."}


def read_llama4(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Llama4ForCausalLM configuration."""
    fields.skip("for_llm_compressor", "attn_implementation")
    config = read_shape(fields, context, epsilon=1e-5, bias=False)
    config = add_rope(fields, config, needs_theta=True)
    config = replace(
        config,
        unturned=read_unturned(fields, config.layers),
        neighbours=True,
        late_qk_norm=fields.get_flag("use_qk_norm", True),
    )
    inner = config.intermediate
    config = replace(config, intermediate=fields.get_integer("intermediate_size_mlp"))
    return add_experts(
        fields,
        _add_growth(fields, _add_chunks(fields, config)),
        Router(scoring="sigmoid", name="router"),
        inner,
        usual=1,
        dense_layers=_read_dense_layers(fields, config.layers),
        shared=Shared(inner, "mlp.shared_expert"),
        gated_input=True,
    )


ARCHITECTURES: Final = {"Llama4ForCausalLM": read_llama4}


def _add_chunks(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration in which layers with rope see the chunk that a position is in."""
    layers = frozenset(range(config.layers)) - config.unturned
    kinds = ["chunked_attention" if n in layers else "full_attention" for n in range(config.layers)]
    fields.expect("layer_types", kinds)
    if fields.get_written("attention_chunk_size") is None:
        return config
    window = fields.get_integer("attention_chunk_size")
    return replace(config, local=Local(layers, window, config.rope, aligned=True))


def _add_growth(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration in which queries of layers without rope grow with the position."""
    scale, floor = fields.get_number("attn_scale", 0.1), fields.get_integer("floor_scale", 8192)
    tuned = fields.get("attn_temperature_tuning", True)
    if tuned not in (True, False):  # in published configurations also a number, 4
        tuned = fields.get_integer("attn_temperature_tuning") > 0
    growth = Growth(scale, floor, offset=1, unturned_only=True)
    return replace(config, growth=growth) if tuned else config


def _read_dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    period = fields.get_integer("interleave_moe_layer_step", 1)
    found: Any = fields.get("moe_layers", list(range(period - 1, layers, period)))
    if not isinstance(found, list) or any(
        type(n) is not int or n not in range(layers) for n in found
    ):
        raise fields.refuse("moe_layers", f"a list of layers, 0 to {layers - 1}")
    return frozenset(range(layers)) - frozenset(found)
