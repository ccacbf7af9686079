"""What each family with experts is, as a choice of the decoder's variations and of routers.

Field names, their defaults and their meaning are those of the Hugging Face model of the same name.
Where a default is not plain, the field must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as list_fields
from dataclasses import replace
from typing import Final

from splitup import limits
from splitup.errors import InvalidModel
from splitup_deploy.frontends.decoder import DecoderConfig
from splitup_deploy.frontends.families import add_qwen_window, add_rope, add_window, read_shape
from splitup_deploy.frontends.fields import Fields
from splitup_deploy.frontends.moe import Experts, MoeConfig, Router, Shared

PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


def read_mixtral(fields: Fields, context: int | None) -> MoeConfig:
    """Read a MixtralForCausalLM configuration."""
    config = _add_rope(fields, read_shape(fields, context, epsilon=1e-5))
    if fields.get("sliding_window") is not None:
        config = add_window(fields, config, range(config.layers))
    experts = Experts(
        count=fields.get_integer("num_local_experts", most=limits.MAX_EXPERTS),
        active=fields.get_integer("num_experts_per_tok"),
        intermediate=config.intermediate,
        prefix="block_sparse_moe",
        names=("w1", "w3", "w2"),
        router=Router(renormalised=True),
    )
    return add_experts(fields, config, experts)


def read_qwen3_moe(fields: Fields, context: int | None) -> MoeConfig:
    """Read a Qwen3MoeForCausalLM configuration; some layers may have a dense MLP."""
    bias = fields.get_flag("attention_bias", False)
    config = add_qwen_window(fields, _add_rope(fields, read_shape(fields, context)))
    config = replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
    period = fields.get_integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.refuse("mlp_only_layers", "a list of layers")
    experts = Experts(
        count=fields.get_integer("num_experts", most=limits.MAX_EXPERTS),
        active=fields.get_integer("num_experts_per_tok"),
        intermediate=fields.get_integer("moe_intermediate_size"),
        prefix="mlp",
        names=PROJECTIONS,
        router=Router(renormalised=fields.get_flag("norm_topk_prob", False)),
        dense_layers=frozenset(
            layer for layer in range(config.layers) if layer in dense or (layer + 1) % period
        ),
    )
    return add_experts(fields, config, experts)


def read_olmoe(fields: Fields, context: int | None) -> MoeConfig:
    """Read an OlmoeForCausalLM configuration: all layers have experts, of the intermediate size."""
    if "clip_qkv" in fields:
        raise fields.refuse("clip_qkv", "null")
    bias = fields.get_flag("attention_bias", False)
    config = add_rope(fields, read_shape(fields, context, grouped=False, epsilon=1e-5))
    config = replace(config, qkv_bias=bias, output_bias=bias, wide_qk_norm=True)
    experts = Experts(
        count=fields.get_integer("num_experts", most=limits.MAX_EXPERTS),
        active=fields.get_integer("num_experts_per_tok"),
        intermediate=config.intermediate,
        prefix="mlp",
        names=PROJECTIONS,
        router=Router(renormalised=fields.get_flag("norm_topk_prob", False)),
    )
    return add_experts(fields, config, experts)


def read_glm4_moe(fields: Fields, context: int | None) -> MoeConfig:
    """Read a Glm4MoeForCausalLM configuration; the layers that predict further are left out."""
    config = read_shape(fields, context, epsilon=1e-5)
    config = _add_rope(fields, config, partial=0.5)
    config = replace(
        config,
        qkv_bias=fields.get_flag("attention_bias", False),
        qk_norm=fields.get_flag("use_qk_norm", False),
    )
    router = read_sigmoid_router(fields)
    return add_experts(fields, config, read_experts(fields, config.layers, router))


ARCHITECTURES: Final[dict[str, Callable[[Fields, int | None], MoeConfig]]] = {
    "MixtralForCausalLM": read_mixtral,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "OlmoeForCausalLM": read_olmoe,
    "Glm4MoeForCausalLM": read_glm4_moe,
}


def read_sigmoid_router(fields: Fields) -> Router:
    """Read the router of DeepSeek-V3 and those after it; each group counts by its best two."""
    return Router(
        scoring="sigmoid",
        renormalised=fields.get_flag("norm_topk_prob", True),
        scale=fields.get_number("routed_scaling_factor"),
        biased=True,
        groups=fields.get_integer("n_group", 1),
        groups_taken=fields.get_integer("topk_group", 1),
        group_best=2,
    )


def read_experts(fields: Fields, layers: int, router: Router) -> Experts:
    """Read the experts of DeepSeek and those after it: behind dense layers, some of them shared."""
    inner = fields.get_integer("moe_intermediate_size")
    shared = fields.get("n_shared_experts")
    if shared is not None:
        shared = Shared(inner * fields.get_integer("n_shared_experts"), "shared_experts")
    first = fields.get("first_k_dense_replace", 0)
    if type(first) is not int or not 0 <= first < layers:
        raise fields.refuse("first_k_dense_replace", f"0 to {layers - 1} layers")
    return Experts(
        count=fields.get_integer("n_routed_experts", most=limits.MAX_EXPERTS),
        active=fields.get_integer("num_experts_per_tok"),
        intermediate=inner,
        prefix="mlp",
        names=PROJECTIONS,
        router=router,
        dense_layers=frozenset(range(first)),
        shared=shared,
    )


def add_experts(fields: Fields, config: DecoderConfig, experts: Experts) -> MoeConfig:
    """Return the configuration with experts; raises InvalidModel when they cannot be chosen so."""
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        fields.get(key)  # matter in training only
    if experts.active > experts.count:
        raise InvalidModel(
            f"config.json asks for {experts.active} active experts of {experts.count}"
        )
    groups, taken = experts.router.groups, experts.router.groups_taken
    size = experts.count // groups
    if experts.count % groups or taken > groups or experts.active > taken * size:
        raise InvalidModel(
            f"config.json asks for {experts.active} experts from {taken} of {groups} groups of "
            f"{experts.count}, which is not possible"
        )
    values = {field.name: getattr(config, field.name) for field in list_fields(DecoderConfig)}
    return MoeConfig(**values, experts=experts)


def _add_rope(fields: Fields, config: DecoderConfig, partial: float | None = None) -> DecoderConfig:
    if "rope_parameters" not in fields:
        fields.get_number("rope_theta")  # the families' own default is not the plain one
    return add_rope(fields, config, partial)
