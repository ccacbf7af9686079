"""The families with experts, each as a choice of the decoder's variations and of a router.

Field names, their defaults and their meaning are those of the Hugging Face model of the same name.
Where a default is not obvious, the field must be there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import (
    Clamped,
    DecoderConfig,
    Experts,
    Indexer,
    Latent,
    Router,
    Shared,
)
from splitup_deploy.frontends.decoder.rotary import compute_yarn_scale
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import (
    Read,
    add_rope,
    add_window,
    add_windows,
    read_local_layers,
    read_shape,
)
from splitup_deploy.frontends.families.rope_fields import (
    LONG_SCALINGS,
    find_rope_parameters,
    read_growth,
)

# Fields about training, or the number of blocks that only predict tokens further ahead.
_TRAINING: Final = (
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "mtp_transformer_layers",
    "use_mtp",
)
# Fields of MiniMax's own code that no published model uses.
_MINIMAX_FIXED: Final = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}
# Where Mixtral and later families have their experts.
MIXTRAL: Final[dict[str, Any]] = {"prefix": "block_sparse_moe", "names": ("w1", "w3", "w2")}


def read_mixtral(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a MixtralForCausalLM configuration."""
    config = add_rope(fields, read_shape(fields, context, epsilon=1e-5), needs_theta=True)
    config = add_windows(fields, config)
    return add_experts(fields, config, Router(renormalised=True), **MIXTRAL)


def read_qwen3_moe(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Qwen3MoeForCausalLM configuration; some layers may have a dense MLP."""
    fields.rename({"num_local_experts": "num_experts"})
    config = add_rope(fields, read_shape(fields, context, bias=False), needs_theta=True)
    return add_experts(
        fields,
        replace(_add_qwen_moe_window(fields, config), qk_norm=True),
        Router(renormalised=fields.get_flag("norm_topk_prob", False)),
        fields.get_integer("moe_intermediate_size"),
        count="num_experts",
        dense_layers=read_sparse_step(fields, config.layers),
    )


def read_olmoe(fields: Fields, context: int | None) -> DecoderConfig:
    """Read an OlmoeForCausalLM configuration: all layers have experts, of the intermediate size."""
    if "clip_qkv" in fields:
        raise fields.refuse("clip_qkv", "null")
    config = add_rope(fields, read_shape(fields, context, grouped=False, epsilon=1e-5, bias=False))
    router = Router(renormalised=fields.get_flag("norm_topk_prob", False))
    return add_experts(fields, replace(config, wide_qk_norm=True), router, count="num_experts")


def read_minimax_m2(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a MiniMaxM2ForCausalLM configuration: a Mixtral with DeepSeek-V3's router."""
    fields.expect_all(_MINIMAX_FIXED)
    config = read_shape(fields, context, split=False)
    if fields.get("attn_type_list", [1] * config.layers) != [1] * config.layers:
        raise fields.refuse("attn_type_list", "1 for all layers")
    if "shared_intermediate_size" in fields:
        fields.expect("shared_intermediate_size", 0)
    turned = fields.get("rotary_dim")
    share = 1.0 if turned is None else fields.get_integer("rotary_dim") / config.head_dim
    config = replace(add_rope(fields, config, share, needs_theta=True), wide_qk_norm=True)
    router = Router(scoring="sigmoid", renormalised=True, biased=True)
    return add_experts(fields, config, router, **MIXTRAL)


def read_phimoe(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a PhimoeForCausalLM configuration: layer norms, and a sparse mixer as router."""
    fields.skip("input_jitter_noise")  # of training
    config = add_rope(
        fields,
        read_shape(fields, context, epsilon=1e-5, bias=False),
        theta=1_000_000.0,
        kinds=LONG_SCALINGS,
        original=(
            fields.get_integer("original_max_position_embeddings")
            if "original_max_position_embeddings" in fields
            else None
        ),
        mscales=True,
    )
    config = replace(
        config,
        head_bias=fields.get_flag("lm_head_bias", False),
        layer_norms=True,
        norm_bias=True,
    )
    fields.expect("num_experts_per_tok", 2)
    router = Router(scoring="mixer", jitter=fields.get_number("router_jitter_noise", 0.01))
    return add_experts(fields, add_windows(fields, config), router, usual=2, **MIXTRAL)


def read_gpt_oss(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a GptOssForCausalLM configuration: sinks, biases, and a bounded activation.

    Source: the model card of gpt-oss, arXiv 2508.10925, section 2.
    """
    fields.skip("initial_context_length")  # says once more where YaRN begins
    fields.rename({"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"})
    fields.expect("hidden_act", "silu")
    if "rope_parameters" not in fields:
        fields.get_number("rope_theta"), fields.get_written("rope_scaling")
    config = read_shape(fields, context, split=False, epsilon=1e-5, bias=True)
    alpha, limit = fields.get_number("swiglu_alpha", 1.702), fields.get_number("swiglu_limit", 7.0)
    config = replace(add_rope(fields, config), sinks=True, activation=Clamped(alpha, limit))
    layers = read_local_layers(fields, config.layers, lambda layer: layer % 2 == 0)
    return add_experts(
        fields,
        add_window(fields, config, layers),
        Router(renormalised=True, name="router", linear_bias=True),
        names=("gate_up_proj", "down_proj"),
        biased=True,
    )


def read_mistral4(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Mistral4ForCausalLM configuration: a DeepSeek-V3 with a softmax router."""
    growth = read_growth(fields)
    share = fields.take("rope_parameters", "partial_rotary_factor")  # says it once more
    config = read_latent(fields, context)
    if config.latent is not None and share not in (None, config.latent.turned / config.head_dim):
        raise fields.refuse("rope_parameters", "the partial_rotary_factor of qk_rope_head_dim")
    config = replace(config, growth=growth)
    fields.expect("rope_interleave", True)
    router = replace(read_sigmoid_router(fields, grouped=False), scoring="softmax", biased=False)
    return add_shared_experts(fields, config, router)


def read_glm4_moe(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Glm4MoeForCausalLM configuration, without the layers that predict further ahead."""
    config = read_shape(fields, context, epsilon=1e-5)
    config = add_rope(fields, config, partial=0.5, needs_theta=True)
    config = replace(
        config,
        qkv_bias=fields.get_flag("attention_bias", False),
        qk_norm=fields.get_flag("use_qk_norm", False),
    )
    return add_shared_experts(fields, config, read_sigmoid_router(fields, grouped=False))


def read_deepseek_v2(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a DeepseekV2ForCausalLM configuration; the original's own code has more variations."""
    config = read_latent(fields, context)
    fields.expect_all({"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False})
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse("topk_method", "greedy, group_limited_greedy")
    router = Router(scale=fields.get_number("routed_scaling_factor", 1.0))
    if method == "greedy":
        fields.skip("n_group", "topk_group")  # without effect then
    else:
        groups = fields.get_integer("n_group")
        router = replace(router, groups=groups, groups_taken=fields.get_integer("topk_group"))
    return add_shared_experts(fields, config, router)


def read_deepseek_v3(
    fields: Fields, context: int | None, *, is_listed: bool = False
) -> DecoderConfig:
    """Read a DeepseekV3ForCausalLM configuration, without the layers that predict further ahead.

    ``is_listed`` is that of ``add_shared_experts``.
    """
    config = read_latent(fields, context)
    fields.expect_all(
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
    )
    router = read_sigmoid_router(fields, grouped=True)
    return add_shared_experts(fields, config, router, is_listed=is_listed)


def read_deepseek_v32(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a DeepseekV32ForCausalLM configuration: a DeepSeek-V3 with an indexer."""
    return _add_indexer(fields, _read_listed(fields, context), neighbours=False)


def read_glm_moe_dsa(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a GlmMoeDsaForCausalLM configuration (GLM-5): every block has an indexer of its own."""
    fields.expect("indexer_rope_interleave", True)
    config = _read_listed(fields, context)
    fields.expect_all({"indexer_types": ["full"] * config.layers, "index_topk_freq": 1})
    fields.expect("index_topk_pattern", "F" * config.layers)
    fields.skip("index_skip_topk_offset")  # without effect then
    return _add_indexer(fields, config, neighbours=True)


def _read_listed(fields: Fields, context: int | None) -> DecoderConfig:
    fields.expect("mlp_bias", False)
    config = read_deepseek_v3(fields, context, is_listed=True)
    fields.expect("layer_types", ["indexed_attention"] * config.layers)
    return config


def _add_indexer(fields: Fields, config: DecoderConfig, *, neighbours: bool) -> DecoderConfig:
    """Return the configuration with an indexer, where the context has more than it chooses."""
    indexer = Indexer(
        fields.get_integer("index_n_heads"),
        fields.get_integer("index_head_dim"),
        fields.get_integer("index_topk"),
        neighbours,
    )
    latent = config.latent
    assert latent is not None  # for the type checker
    if latent.query_rank is None or indexer.size < latent.turned:
        raise fields.refuse("index_head_dim", "qk_rope_head_dim at least, with a q_lora_rank")
    if config.context <= indexer.count:  # it would choose all
        return config
    return replace(config, latent=replace(latent, indexer=indexer))


def read_glm4_moe_lite(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Glm4MoeLiteForCausalLM configuration: a DeepSeek-V3 that lists its dense blocks."""
    fields.expect("partial_rotary_factor", 1.0)
    return read_deepseek_v3(fields, context, is_listed=True)


ARCHITECTURES: Final[dict[str, Read]] = {
    "MixtralForCausalLM": read_mixtral,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "OlmoeForCausalLM": read_olmoe,
    "MiniMaxM2ForCausalLM": read_minimax_m2,
    "PhimoeForCausalLM": read_phimoe,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "Mistral4ForCausalLM": read_mistral4,
    "GptOssForCausalLM": read_gpt_oss,
    "DeepseekV32ForCausalLM": read_deepseek_v32,
    "GlmMoeDsaForCausalLM": read_glm_moe_dsa,
    "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
}
OWN_NAMES: Final = {
    "MiniMaxM2ForCausalLM": {"moe.e_score_correction_bias": "moe.gate.e_score_correction_bias"}
}


def read_sigmoid_router(fields: Fields, *, grouped: bool) -> Router:
    """Read the router of DeepSeek-V3 and later families; a group ranks by its best two experts.

    ``grouped``: the numbers of groups must be given; otherwise there is one group.
    """
    plain = None if grouped else 1
    return Router(
        scoring="sigmoid",
        renormalised=fields.get_flag("norm_topk_prob", True),
        scale=fields.get_number("routed_scaling_factor"),
        biased=True,
        groups=fields.get_integer("n_group", plain),
        groups_taken=fields.get_integer("topk_group", plain),
        group_best=2,
    )


def add_shared_experts(
    fields: Fields,
    config: DecoderConfig,
    router: Router,
    *,
    is_listed: bool = False,
    module: str = "mlp.shared_experts",
    **others: Any,
) -> DecoderConfig:
    """Add the experts of DeepSeek and later families, some of which are shared.

    The first layers are dense, or those that a list names if the family has one (``is_listed``).
    """
    inner = fields.get_integer("moe_intermediate_size")
    shared = fields.get_written("n_shared_experts")
    if shared is not None:
        most = limits.MAX_DIMENSION // inner
        shared = Shared(inner * fields.get_integer("n_shared_experts", most=most), module)
    fields.expect("moe_layer_freq", 1)
    return add_experts(
        fields,
        config,
        router,
        inner,
        count="n_routed_experts",
        dense_layers=_read_dense_layers(fields, config.layers, is_listed),
        shared=shared,
        **others,
    )


def read_sparse_step(fields: Fields, layers: int) -> frozenset[int]:
    """Read which layers of a Qwen have no experts."""
    period = fields.get_integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.refuse("mlp_only_layers", "a list of layers")
    return frozenset(layer for layer in range(layers) if layer in dense or (layer + 1) % period)


def _read_dense_layers(fields: Fields, layers: int, is_listed: bool) -> frozenset[int]:
    """Read which layers have no experts, by ``mlp_layer_types`` or the number of the first ones."""
    kinds = fields.get_words("mlp_layer_types", layers, ("dense", "sparse")) if is_listed else None
    if kinds is None:
        first = fields.get_written("first_k_dense_replace")
        if type(first) is not int or not 0 <= first < layers:
            raise fields.refuse("first_k_dense_replace", f"0 to {layers - 1} layers")
        return frozenset(range(first))
    fields.expect("first_k_dense_replace", [*kinds, "sparse"].index("sparse"))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def add_experts(
    fields: Fields,
    config: DecoderConfig,
    router: Router,
    inner: int | None = None,
    *,
    count: str = "num_local_experts",
    active: str = "num_experts_per_tok",
    usual: int | None = None,
    **others: Any,
) -> DecoderConfig:
    """Return the configuration with experts; raises InvalidModel when the router cannot work so.

    ``count`` and ``active`` are names of fields, ``usual`` the default of the latter. ``inner`` is
    the experts' width, if not that of the configuration.
    """
    fields.skip(*_TRAINING)
    experts = Experts(
        count=fields.get_integer(count, most=tuning.MAX_EXPERTS),
        active=fields.get_integer(active, usual),
        intermediate=config.intermediate if inner is None else inner,
        router=router,
        **others,
    )
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
    return replace(config, experts=experts)


def _add_qwen_moe_window(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with sliding windows in all layers, if that is switched on.

    Unlike Qwen2 and Qwen3 without experts the model asks neither for ``max_window_layers`` nor for
    ``layer_types``; kinds of layers that say otherwise are refused.
    """
    fields.skip("max_window_layers")
    is_local = fields.get_flag("use_sliding_window", False)
    layers = frozenset(range(config.layers)) if is_local else frozenset()
    if read_local_layers(fields, config.layers, lambda layer: is_local) != layers:
        raise fields.refuse("layer_types", "what use_sliding_window says, for all layers")
    return add_window(fields, config, layers)


def read_latent(fields: Fields, context: int | None, *, turning: bool = True) -> DecoderConfig:
    """Read the latent attention of DeepSeek-V2 and later families, with rope if ``turning``.

    The inner norms' epsilon is no field; it is the default of the original's class. YaRN's
    temperature correction scales the scores, not only the rotated part.
    """
    fields.expect("attention_bias", False)
    config = read_shape(fields, context, grouped=False)
    turned, fixed = (fields.get_integer(f"qk_{part}_head_dim") for part in ("rope", "nope"))
    fields.expect("qk_head_dim", turned + fixed)
    if turned % 2:
        raise fields.refuse("qk_rope_head_dim", "an even number")
    latent = Latent(
        rank=fields.get_integer("kv_lora_rank"),
        turned=turned,
        value_dim=fields.get_integer("v_head_dim"),
        query_rank=(
            None if fields.get_written("q_lora_rank") is None else fields.get_integer("q_lora_rank")
        ),
        norm_epsilon=1e-6,
    )
    scale, parameters = 1.0, find_rope_parameters(fields)
    if parameters is not None and "mscale_all_dim" in parameters:
        weight = parameters.get_number("mscale_all_dim")
        scale = compute_yarn_scale(parameters.get_number("factor"), weight)
    if turning:
        config = add_rope(fields, replace(config, head_dim=turned), needs_theta=True)
    return replace(
        config,
        head_dim=turned + fixed,
        latent=latent,
        attention_scale=scale * scale / math.sqrt(turned + fixed),
    )
