"""Gemma 4: local layers with a rope and heads of their own, and experts beside the dense MLP.

Layers that see all positions have wider heads, of which a quarter is rotated, and may have no
projection of values. Values are normalised, scores are not scaled, and every layer's result is
multiplied by a number. In the models with experts every row passes the dense MLP as well. Field
names, defaults and their meaning are those of the Hugging Face model.

In E2B and E4B every layer adds a vector of its own for each token, and the upper layers attend to
the keys and values of a lower one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import (
    Borrowed,
    DecoderConfig,
    Global,
    Router,
    TokenVectors,
)
from splitup_deploy.frontends.decoder.rotary import Rope, make_rope, scale_linear
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import add_window, read_gemma_shape, read_local_layers
from splitup_deploy.frontends.families.mixture_of_experts import add_experts

_PERIOD: Final = 6  # every sixth layer sees all positions
OWN_NAMES: Final = {".experts.": ".mlp.experts.", ".router.": ".mlp.router."}


def read_gemma4(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Gemma4ForCausalLM configuration."""
    if fields.get("use_bidirectional_attention") not in (None, False, "vision"):  # text is causal
        raise fields.refuse("use_bidirectional_attention", "'vision', null")
    config = read_gemma_shape(fields, context)
    local = read_local_layers(fields, config.layers, lambda layer: (layer + 1) % _PERIOD != 0)
    if config.layers - 1 in local:
        raise fields.refuse("layer_types", "full_attention for the last layer")
    wide = _read_wide(fields, config, local)
    ropes = fields.get_fields("rope_parameters") or Fields({})
    near = _read_rope(ropes, "sliding_attention", config.head_dim, 10_000.0)
    config = replace(
        config,
        rope=_read_rope(ropes, "full_attention", wide.head_dim, 1_000_000.0, is_proportional=True),
        wide=wide,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scales=True,
        attention_scale=1.0,
        logit_cap=fields.get_cap("final_logit_softcapping"),
        embedding_scale=math.sqrt(config.hidden),
        borrowed=_read_borrowed(fields, config.layers, local),
        token_vectors=_read_token_vectors(fields),
    )
    ropes.check_all_read()
    config = add_window(fields, config, local, near)
    if not fields.get_flag("enable_moe_block", False):
        # without effect then
        fields.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return config
    return add_experts(
        fields,
        config,
        Router(renormalised=True, name="router.proj", scaled=True),
        fields.get_integer("moe_intermediate_size"),
        count="num_experts",
        active="top_k_experts",
        beside_dense=True,
    )


def _read_borrowed(fields: Fields, layers: int, local: frozenset[int]) -> Borrowed | None:
    """Read which upper layers attend to the keys and values of lower ones."""
    is_double = fields.get_flag("use_double_wide_mlp", False)
    count = fields.get_integer("num_kv_shared_layers", 0, least=0)
    if not count:
        return None
    first = layers - count
    kinds = [layer in local for layer in range(layers)]
    lenders = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not set(kinds) <= lenders.keys():
        raise fields.refuse("num_kv_shared_layers", "fewer: each kind of layer needs one before")
    upper = frozenset(range(first, layers))
    return Borrowed(upper, frozenset(lenders[kind] for kind in set(kinds[first:])), is_double)


def _read_token_vectors(fields: Fields) -> TokenVectors | None:
    """Read the size of the vectors that layers add, 256 by default, and of their table."""
    vocab = fields.get_integer("vocab_size_per_layer_input", 262_144)
    size = fields.get_integer("hidden_size_per_layer_input", 256, least=0)
    return TokenVectors(size, vocab) if size else None


def _read_wide(fields: Fields, config: DecoderConfig, local: frozenset[int]) -> Global:
    """Read the heads of layers without a window, by the old fields or by those of each layer."""
    is_shared = fields.get_flag("attention_k_eq_v", False)
    kv_heads = fields.get_integer("num_global_key_value_heads", config.kv_heads)
    wide = Global(
        kv_heads if is_shared else config.kv_heads,
        fields.get_integer("global_head_dim", 512),
        is_shared,
    )
    table: Any = fields.get("per_layer_config")  # by layer, since transformers 5.23
    if table is not None:
        others = {layer for layer in range(config.layers) if layer not in local}
        found = table if isinstance(table, dict) else {}
        layers = {int(layer) for layer in found if layer.isdecimal()}  # "5", "05", or both
        rows = list(found.values())
        is_whole = layers == others and all(layer.isdecimal() for layer in found)
        if not rows or not is_whole or any(row != rows[0] for row in rows):
            raise fields.refuse("per_layer_config", "one row for all layers of full_attention")
        row = Fields(rows[0], "config.json's per_layer_config")
        heads = row.get_integer("num_key_value_heads", config.kv_heads)
        wide = Global(heads, row.get_integer("head_dim", config.head_dim), is_shared)
        row.check_all_read()
    if config.heads % wide.kv_heads or wide.head_dim % 2:
        raise InvalidModel(
            f"config.json asks for {config.heads} heads of {wide.head_dim} on {wide.kv_heads} "
            "key-value heads in layers of full_attention, which do not divide"
        )
    return wide


def _read_rope(
    ropes: Fields, kind: str, size: int, theta: float, *, is_proportional: bool = False
) -> Rope:
    """Read the rope of one kind of layers.

    A proportional one pairs all elements of a head of ``size``, and rotates a part of the pairs, by
    the frequencies that they have in a whole head, divided by a factor.
    """
    wanted = "proportional" if is_proportional else "default"
    parameters = ropes.get_fields(kind)
    if parameters is None:
        parameters = Fields({"partial_rotary_factor": 0.25} if is_proportional else {})
    if parameters.get("rope_type", wanted) != wanted:
        raise parameters.refuse("rope_type", wanted)
    rope = make_rope(parameters.get_number("rope_theta", theta), size)
    share = parameters.get_number("partial_rotary_factor", 1.0)
    if share > 1 or (share != 1 and not is_proportional):
        raise parameters.refuse("partial_rotary_factor", "at most 1, and 1 with a window")
    if is_proportional:
        rope = scale_linear(rope, parameters.get_number("factor", 1.0))
    parameters.check_all_read()
    turned = int(share * size // 2)
    still = (Decimal(0),) * (rope.pairs - turned)
    return Rope(rope.frequencies[:turned] + still, rope.scale)


ARCHITECTURES: Final = {"Gemma4ForCausalLM": read_gemma4}
