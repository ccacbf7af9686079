"""The families of dense models, each as a choice of the decoder's variations.

Field names, their defaults and their meaning are those of the Hugging Face model of the same name.
Where a default is not obvious, the field must be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig, Local
from splitup_deploy.frontends.decoder.rotary import Rope
from splitup_deploy.frontends.decoder.row_operations import Activation
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.rope_fields import (
    LONG_SCALINGS,
    RopeDefaults,
    find_rope_parameters,
    read_growth,
    read_rope,
    read_two_ropes,
)

Read = Callable[[Fields, int | None], DecoderConfig]

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
}
# Fields of Phi-3's own code that no published model uses.
_PHI3_FIXED: Final = {
    "attention_bias": False,
    "mlp_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}

_OLMO3_THETA: Final = 500_000.0
# Fields of Cohere's own code that no published model uses.
_COHERE2_FIXED: Final = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}


def read_llama(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a LlamaForCausalLM configuration."""
    config = add_rope(fields, read_shape(fields, context, grouped=False, bias=False))
    return replace(config, mlp_bias=fields.get_flag("mlp_bias", False))


def read_mistral(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a MistralForCausalLM configuration: with a sliding window, all layers are local."""
    fields.get_written("sliding_window")
    return add_windows(fields, add_rope(fields, read_shape(fields, context)))


def read_qwen2(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Qwen2ForCausalLM configuration."""
    config = add_rope(fields, read_shape(fields, context))
    return replace(add_qwen_window(fields, config), qkv_bias=True)


def read_qwen3(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Qwen3ForCausalLM configuration."""
    config = add_rope(fields, read_shape(fields, context, split=False, bias=False))
    return replace(add_qwen_window(fields, config), qk_norm=True)


def read_phi3(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Phi3ForCausalLM configuration."""
    fields.expect_all(_PHI3_FIXED)
    config = add_rope(
        fields,
        read_shape(fields, context, grouped=False, epsilon=1e-5),
        partial=1.0,
        kinds=LONG_SCALINGS,
        original=fields.get_integer("original_max_position_embeddings", 4096),
    )
    return add_windows(fields, replace(config, fused=True))


def read_smollm3(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a SmolLM3ForCausalLM configuration: a Llama of which every fourth layer has no rope."""
    config = add_rope(fields, read_shape(fields, context, bias=False), needs_theta=True)
    unturned = read_unturned(fields, config.layers)
    config = replace(
        config,
        tied=fields.get_flag("tie_word_embeddings", True),
        unturned=unturned,
        mlp_bias=fields.get_flag("mlp_bias", False),
    )
    if not fields.get_flag("use_sliding_window", False):
        fields.skip("sliding_window")  # without effect then
        if fields.get("layer_types") not in (None, ["full_attention"] * config.layers):
            raise fields.refuse("layer_types", "full_attention alone without use_sliding_window")
        return config
    layers = read_local_layers(fields, config.layers, lambda layer: layer in unturned)
    return add_window(fields, config, layers)


def read_olmo2(fields: Fields, context: int | None) -> DecoderConfig:
    """Read an Olmo2ForCausalLM configuration: only the outputs of attention and MLP are normed."""
    return add_rope(fields, _read_olmo(fields, context))


def read_olmo3(fields: Fields, context: int | None) -> DecoderConfig:
    """Read an Olmo3ForCausalLM configuration: OLMo 2, and three layers with a window to one.

    Rope is scaled only in layers without a window. Versions of the original differ in what an outer
    ``rope_theta`` changes, so it may only be the default.
    """
    if fields.get_number("rope_theta", _OLMO3_THETA) != _OLMO3_THETA:
        raise fields.refuse("rope_theta", f"{_OLMO3_THETA:g}; write others in rope_parameters")
    config = _read_olmo(fields, context)
    defaults = _make_rope_defaults(fields, config, _OLMO3_THETA)
    rope, local = read_two_ropes(fields, defaults, defaults)
    layers = read_local_layers(fields, config.layers, lambda layer: (layer + 1) % 4 != 0)
    return add_window(fields, replace(config, rope=rope), layers, local)


def read_ministral3(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Ministral3ForCausalLM configuration: a Mistral whose queries grow with positions."""
    growth = read_growth(fields)
    if growth is None:
        raise fields.refuse("rope_parameters", "an object with llama_4_scaling_beta")
    config = replace(add_rope(fields, read_shape(fields, context)), growth=growth)
    return add_windows(fields, config)


def read_cohere2(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Cohere2ForCausalLM configuration: blocks in parallel, and rope in local layers only.

    The head always is the embedding, and a head's size always hidden_size / num_attention_heads.
    """
    fields.expect_all(_COHERE2_FIXED)
    fields.rename({"layer_norm_eps": "rms_norm_eps", "layer_switch": "sliding_window_pattern"})
    config = read_shape(fields, context, grouped=False, epsilon=1e-5, bias=False)
    fields.expect("head_dim", config.hidden // config.heads)
    period = fields.get_integer("sliding_window_pattern", 4)
    layers = read_local_layers(fields, config.layers, lambda layer: (layer + 1) % period != 0)
    config = replace(
        add_rope(fields, config),
        tied=fields.get_flag("tie_word_embeddings", True),
        layer_norms=True,
        parallel=True,
        neighbours=True,
        unturned=frozenset(range(config.layers)) - layers,
        logit_scale=fields.get_number("logit_scale", 0.0625),
    )
    return add_window(fields, config, layers)


def read_gemma2(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Gemma2ForCausalLM configuration: every second layer is local, from the first on."""
    config = add_rope(fields, _read_gemma(fields, context))
    config = replace(config, attention_cap=fields.get_cap("attn_logit_softcapping"))
    layers = read_local_layers(fields, config.layers, lambda layer: layer % 2 == 0)
    return add_window(fields, config, layers)


def read_gemma3(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a Gemma3ForCausalLM configuration: five local layers, with a rope of their own, to one.

    A soft cap on scores is refused: the original has the field and no use for it.
    """
    if "attn_logit_softcapping" in fields:
        raise fields.refuse("attn_logit_softcapping", "null")
    config = replace(_read_gemma(fields, context), qk_norm=True)
    defaults = _make_rope_defaults(fields, config, fields.get_number("rope_theta", 1_000_000.0))
    local_theta = fields.get_number("rope_local_base_freq", 10_000.0)
    rope, local = read_two_ropes(fields, defaults, replace(defaults, theta=local_theta))
    period = fields.get_integer("sliding_window_pattern", 6)
    layers = read_local_layers(fields, config.layers, lambda layer: (layer + 1) % period != 0)
    return add_window(fields, replace(config, rope=rope), layers, local)


ARCHITECTURES: Final[dict[str, Read]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Phi3ForCausalLM": read_phi3,
    "SmolLM3ForCausalLM": read_smollm3,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "Ministral3ForCausalLM": read_ministral3,
    "Cohere2ForCausalLM": read_cohere2,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
}


def read_shape(
    fields: Fields,
    context: int | None,
    *,
    grouped: bool = True,
    split: bool = True,
    epsilon: float = 1e-6,
    tied: bool = False,
    activation: str = "hidden_act",
    inner: str = "intermediate_size",
    layers: int | None = None,
    bias: bool | None = None,
) -> DecoderConfig:
    """Read the fields that all families share, as Llama without a rope (see ``add_rope``).

    ``grouped``: num_key_value_heads must be given; otherwise its default is the number of heads.
    ``split``: the default of head_dim is hidden_size / num_attention_heads; otherwise it must be
    given. ``layers`` is the default of num_hidden_layers, ``bias`` that of attention_bias where a
    family has this field, for all projections of attention.
    """
    if bias is not None:
        bias = fields.get_flag("attention_bias", bias)
    hidden = fields.get_integer("hidden_size")
    heads = fields.get_integer("num_attention_heads")
    trained = fields.get_integer("max_position_embeddings")
    config = DecoderConfig(
        layers=fields.get_integer("num_hidden_layers", layers, tuning.MAX_LAYERS),
        hidden=hidden,
        intermediate=fields.get_integer(inner),
        heads=heads,
        kv_heads=fields.get_integer("num_key_value_heads", None if grouped else heads),
        head_dim=fields.get_integer("head_dim", max(hidden // heads, 1) if split else None),
        vocab=fields.get_integer("vocab_size"),
        context=trained if context is None else context,
        norm_epsilon=fields.get_number("rms_norm_eps", epsilon),
        rope=Rope(()),
        tied=fields.get_flag("tie_word_embeddings", tied),
        activation=read_activation(fields, activation, "gelu_pytorch_tanh" if tied else "silu"),
        qkv_bias=bool(bias),
        output_bias=bool(bias),
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise InvalidModel(
            f"config.json asks for {config.heads} heads of {config.head_dim} on "
            f"{config.kv_heads} key-value heads, which do not divide"
        )
    if not 1 <= config.context <= min(trained, limits.MAX_CONTEXT):
        raise InvalidModel(
            f"context {config.context} is not possible; "
            f"the model takes 1 to {min(trained, limits.MAX_CONTEXT)} positions"
        )
    return config


def read_activation(fields: Fields, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Return an activation; raises InvalidModel for one that is not known."""
    name = fields.get(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise fields.refuse(key, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def add_rope(
    fields: Fields,
    config: DecoderConfig,
    partial: float | None = None,
    *,
    theta: float = 10_000.0,
    needs_theta: bool = False,
    unused: Iterable[str] = (),
    **others: Any,
) -> DecoderConfig:
    """Return the configuration with one rope for all its layers.

    ``partial`` is the default of the rotated part of a head, for families with a field for it.
    ``needs_theta``: the family's own default of rope_theta is not ``theta``. ``unused`` are rope
    parameters without effect, ``others`` further defaults.
    """
    if needs_theta and "rope_parameters" not in fields:
        fields.get_number("rope_theta")
    if partial is not None:
        partial = fields.get_number("partial_rotary_factor", partial)
    theta = fields.get_number("rope_theta", theta)
    defaults = replace(_make_rope_defaults(fields, config, theta), partial=partial, **others)
    parameters = find_rope_parameters(fields)
    if parameters is not None:
        parameters.skip(*unused)
    return replace(config, rope=read_rope(parameters, defaults))


def _make_rope_defaults(fields: Fields, config: DecoderConfig, theta: float) -> RopeDefaults:
    trained = fields.get_integer("max_position_embeddings")
    return RopeDefaults(config.head_dim, trained, config.context, theta)


def add_windows(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with a sliding window in all layers, if one is given."""
    if fields.get("sliding_window") is None:
        return config
    return add_window(fields, config, range(config.layers))


def add_window(
    fields: Fields, config: DecoderConfig, layers: Iterable[int], rope: Rope | None = None
) -> DecoderConfig:
    """Return the configuration with sliding windows in ``layers``, by default with one rope."""
    local = frozenset(layers)
    if not local:
        fields.skip("sliding_window")  # without effect then
        return config
    window = fields.get_integer("sliding_window")
    return replace(config, local=Local(local, window, rope or config.rope))


def add_qwen_window(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with sliding windows in the upper layers, if that is switched on."""
    first = fields.get("max_window_layers", config.layers)
    if type(first) is not int or first < 0:
        raise fields.refuse("max_window_layers", "an integer, at least 0")
    if fields.get_flag("use_sliding_window", False):
        layers = read_local_layers(fields, config.layers, lambda layer: layer >= first)
        return add_window(fields, config, layers)
    fields.skip("sliding_window")  # without effect then
    if read_local_layers(fields, config.layers, lambda layer: False):
        raise fields.refuse("layer_types", "full_attention, as use_sliding_window is false")
    return config


def read_unturned(fields: Fields, layers: int) -> frozenset[int]:
    """Read which layers of SmolLM3 and Llama 4 have no rope, by default every fourth."""
    period = fields.get_integer("no_rope_layer_interval", 4)
    turned: Any = fields.get("no_rope_layers")  # 1 for a layer with rope
    if not turned:
        turned = [int((layer + 1) % period != 0) for layer in range(layers)]
    is_list = isinstance(turned, list) and len(turned) == layers
    if not is_list or any(type(one) is not int or one not in (0, 1) for one in turned):
        raise fields.refuse("no_rope_layers", f"{layers} of 0, 1")
    return frozenset(layer for layer, one in enumerate(turned) if not one)


def read_local_layers(
    fields: Fields, layers: int, is_local: Callable[[int], bool]
) -> frozenset[int]:
    """Return the layers with a window by ``layer_types``, or without it by the family's pattern."""
    kinds = fields.get_words("layer_types", layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        return frozenset(layer for layer in range(layers) if is_local(layer))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _read_olmo(fields: Fields, context: int | None) -> DecoderConfig:
    config = read_shape(fields, context, grouped=False, epsilon=1e-5, bias=False)
    return replace(config, wide_qk_norm=True, pre_norms=False, post_norms=True)


def read_gemma_shape(fields: Fields, context: int | None) -> DecoderConfig:
    """Read the sizes of a Gemma, whose head is the embedding unless a field says otherwise."""
    fields.skip("hidden_act")  # the model reads hidden_activation only
    return read_shape(
        fields, context, split=False, tied=True, activation="hidden_activation", bias=False
    )


def _read_gemma(fields: Fields, context: int | None) -> DecoderConfig:
    fields.expect("use_bidirectional_attention", False)
    config = read_gemma_shape(fields, context)
    return replace(
        config,
        unit_norms=True,
        post_norms=True,
        attention_scale=1.0 / math.sqrt(fields.get_number("query_pre_attn_scalar")),
        logit_cap=fields.get_cap("final_logit_softcapping"),
        embedding_scale=math.sqrt(config.hidden),
    )
