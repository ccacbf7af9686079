"""The families with the delta rule: Qwen3.5, dense and with experts, Qwen3-Next, Kimi Linear.

Field names, their defaults and their meaning are those of the Hugging Face model of the same name.
Where a default is not obvious, the field must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig, Recurrent, Router, Shared
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import Read, add_rope, read_activation, read_shape
from splitup_deploy.frontends.families.mixture_of_experts import (
    MIXTRAL,
    add_experts,
    add_shared_experts,
    read_latent,
    read_sigmoid_router,
    read_sparse_step,
)

# Fields about training, or about blocks that only predict tokens further ahead.
_UNUSED: Final = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
# Kimi's names -> the usual names
_KIMI_NAMES: Final = {
    "model_max_length": "max_position_embeddings",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
_KIMI_FIXED: Final = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}

# names of sizes -> the same in linear_attn_config
_KIMI_SIZES: Final = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def read_qwen3_5(
    fields: Fields, context: int | None, inner: str = "intermediate_size"
) -> DecoderConfig:
    """Read a Qwen3_5ForCausalLM configuration: the text model alone, with plain positions."""
    fields.skip(*_UNUSED)
    fields.expect("attn_output_gate", True)
    config = add_rope(
        fields,
        read_shape(fields, context, split=False, inner=inner, bias=False),
        partial=0.25,
        unused=("mrope_section", "mrope_interleaved"),  # how the axes of an image share the angles
    )
    interval = fields.get_integer("full_attention_interval", 4)
    sizes = {
        name: fields.get_integer(f"linear_{key}")
        for name, key in (
            ("key_heads", "num_key_heads"),
            ("value_heads", "num_value_heads"),
            ("key_dim", "key_head_dim"),
            ("value_dim", "value_head_dim"),
            ("taps", "conv_kernel_dim"),
        )
    }
    layers = _read_layers(fields, config.layers, lambda layer: (layer + 1) % interval != 0)
    return replace(
        config,
        recurrent=make_recurrent(layers, **sizes, activation=read_activation(fields)),
        qk_norm=True,
        output_gate=True,
        unit_norms=True,
    )


def read_qwen3_5_moe(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Qwen3_5MoeForCausalLM configuration: all layers have experts, one of them shared."""
    config = read_qwen3_5(fields, context, inner="moe_intermediate_size")
    return _add_qwen_experts(fields, config, Router(renormalised=True), config.intermediate)


def read_qwen3_next(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Qwen3NextForCausalLM configuration: Qwen3.5's layers, with grouped projections."""
    config = read_qwen3_5(fields, context)
    if config.recurrent is not None:
        config = replace(
            config, recurrent=replace(config.recurrent, grouped=True, grouped_rates=True)
        )
    fields.expect("use_sliding_window", False)
    router = Router(renormalised=fields.get_flag("norm_topk_prob", True))
    dense, inner = read_sparse_step(fields, config.layers), "moe_intermediate_size"
    return _add_qwen_experts(fields, config, router, fields.get_integer(inner), dense)


def read_kimi_linear(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a KimiLinearForCausalLM configuration: latent attention without rope."""
    fields.rename(_KIMI_NAMES)
    fields.expect_all(_KIMI_FIXED)
    fields.skip("head_dim", "rope_theta")  # without effect
    config = read_latent(fields, context, turning=False)
    shape = _read_kimi_rule(fields, config.layers)
    return add_shared_experts(
        fields,
        replace(config, recurrent=shape),
        read_sigmoid_router(fields, grouped=True),
        is_listed=True,
        module="block_sparse_moe.shared_experts",
        **MIXTRAL,
    )


ARCHITECTURES: Final[dict[str, Read]] = {
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "KimiLinearForCausalLM": read_kimi_linear,
}


def _add_qwen_experts(
    fields: Fields,
    config: DecoderConfig,
    router: Router,
    inner: int,
    dense: frozenset[int] = frozenset(),
) -> DecoderConfig:
    width = fields.get_integer("shared_expert_intermediate_size")
    shared = Shared(width, "mlp.shared_expert", gated=True)
    return add_experts(
        fields, config, router, inner, count="num_experts", dense_layers=dense, shared=shared
    )


def make_recurrent(layers: frozenset[int], **sizes: Any) -> Recurrent:
    """Return the sizes of recurrent layers; raises InvalidModel if they do not fit together."""
    shape = Recurrent(layers, **sizes)
    if shape.value_heads % shape.key_heads or shape.taps < 2:
        raise InvalidModel(
            f"config.json asks for {shape.value_heads} value heads on {shape.key_heads} key heads "
            f"and a convolution over {shape.taps} tokens, which is not possible"
        )
    return shape


def _read_kimi_rule(fields: Fields, layers: int) -> Recurrent:
    """Read the recurrent layers: in an object of their own, in fields as others, or twice."""
    linear = fields.get_fields("linear_attn_config")
    found: list[tuple[frozenset[int], list[int]]] = []
    if linear is not None:
        sizes = [linear.get_integer(name) for name in _KIMI_SIZES.values()]
        found.append((_read_numbers(linear, layers), sizes))
        linear.check_all_read()
    if linear is None or any(name in fields for name in ("layer_types", *_KIMI_SIZES)):
        sizes = [fields.get_integer(name) for name in _KIMI_SIZES]
        found.append((_read_layers(fields, layers, None), sizes))
    if found[0] != found[-1]:
        raise fields.refuse("layer_types", "with linear_num_heads, … what linear_attn_config says")
    recurrent, (heads, size, taps) = found[0]
    return make_recurrent(
        recurrent,
        key_heads=heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        taps=taps,
        by_channel=True,
        activation=read_activation(fields),
    )


def _read_numbers(linear: Fields, layers: int) -> frozenset[int]:
    """Return Kimi's recurrent layers; its configuration numbers layers from 1."""
    kda, full = linear.get("kda_layers", []), linear.get("full_attn_layers", [])
    if (
        not isinstance(kda, list)
        or not isinstance(full, list)
        or any(type(number) is not int for number in (*kda, *full))
        or sorted((*kda, *full)) != list(range(1, layers + 1))
    ):
        raise linear.refuse("kda_layers", f"with full_attn_layers the numbers 1 to {layers}")
    return frozenset(number - 1 for number in kda)


def _read_layers(
    fields: Fields, layers: int, is_recurrent: Callable[[int], bool] | None
) -> frozenset[int]:
    """Return the recurrent layers by ``layer_types``, or without it by the family's pattern."""
    known, is_needed = ("full_attention", "linear_attention"), is_recurrent is None
    kinds = fields.get_words("layer_types", layers, known, is_needed=is_needed)
    if kinds is None:
        return frozenset(filter(is_recurrent, range(layers)))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
