"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention, an MLP or experts, and only that.

Attention knows no positions. An MLP is down(relu(up x)^2), which is relu(up x) times up x. Source:
arXiv 2504.03624, section 2. Field names, defaults and their meaning are those of the Hugging Face
model of the same name. That raises the time steps of a prompt to ``time_step_min``, and those of
single tokens not; NVIDIA's own code uses ``time_step_limit``, from 0, for both, and so does this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig, Shared
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import Read, read_shape
from splitup_deploy.frontends.families.granite import check_time_steps
from splitup_deploy.frontends.families.hybrid import make_recurrent
from splitup_deploy.frontends.families.mixture_of_experts import add_experts, read_sigmoid_router

# One after the other: every layer has a norm, and its part is called "mixer" whatever it is.
OWN_NAMES: Final = {
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    ".norm.weight": ".input_layernorm.weight",
    "model.input_layernorm.": "model.norm.",
    ".mixer.input_layernorm.": ".mixer.norm.",
    **{f".mixer.{part}_proj.": f".self_attn.{part}_proj." for part in "qkvo"},
    **{
        f".mixer.{part}": f".mlp.{part}"
        for part in ("up_proj.", "down_proj.", "experts.", "shared_experts.", "gate.", "fc")
    },
    ".mixer.": ".mamba.",
}
_KINDS: Final = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# All names of a kind, those of older versions first -> its name.
_NAMES: Final = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    **{kind: kind for kind in _KINDS.values()},
}
# Fields of training, of how the original computes, and of rope, which it does not have.
_UNUSED: Final = (
    *("chunk_size", "expand", "hidden_act", "mamba_proj_bias", "mamba_ssm_cache_dtype"),
    *("moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    *("num_logits_to_keep", "partial_rotary_factor", "rescale_prenorm_residual"),
    *("residual_in_fp32", "rope_theta", "time_step_floor", "time_step_max", "time_step_min"),
    "use_mamba_kernels",
)
_EXPERT_FIELDS: Final = (
    *("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size"),
    *("n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
    *("num_nextn_predict_layers", "output_router_logits", "routed_scaling_factor", "topk_group"),
)


def read_nemotron_h(fields: Fields, context: int | None) -> DecoderConfig:
    """Read a NemotronHForCausalLM configuration."""
    fields.rename({"attention_head_dim": "head_dim", "num_local_experts": "n_routed_experts"})
    fields.rename({"norm_eps": "layer_norm_epsilon", "layer_norm_epsilon": "rms_norm_eps"})
    fields.rename({"layer_types": "layers_block_type"})
    fields.skip(*_UNUSED)
    fields.expect_all({"attention_bias": False, "mlp_hidden_act": "relu2"})
    if "sliding_window" in fields:
        raise fields.refuse("sliding_window", "null")
    kinds = _read_kinds(fields)
    config = read_shape(fields, context, split=False, epsilon=1e-5, layers=len(kinds))
    if config.layers != len(kinds):
        raise fields.refuse("num_hidden_layers", f"{len(kinds)}, as many as the kinds of layers")
    layers = {kind: _find(kinds, kind) for kind in _KINDS.values()}
    config = replace(
        config,
        mlp_bias=fields.get_flag("mlp_bias", False),
        activation="relu",
        gated=False,
        mlp_layers=layers["mlp"] | layers["moe"],
        unturned=frozenset(range(config.layers)),
    )
    config = _add_mamba(fields, config, layers["linear_attention"])
    if layers["moe"]:
        return _add_experts(fields, config, layers["mlp"])
    fields.skip(*_EXPERT_FIELDS)  # without effect then
    return config


ARCHITECTURES: Final[dict[str, Read]] = {"NemotronHForCausalLM": read_nemotron_h}


def _read_kinds(fields: Fields) -> list[str]:
    """Read what every layer is: a list of names, a string of letters, or both."""
    listed: Any = fields.get("layers_block_type")
    pattern: Any = fields.get("hybrid_override_pattern")
    if listed is None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_KINDS):
            raise fields.refuse("hybrid_override_pattern", f"letters of {' '.join(_KINDS)}")
        return [_KINDS[letter] for letter in pattern]
    known = list(_NAMES)
    if not isinstance(listed, list) or not listed or any(one not in known for one in listed):
        raise fields.refuse("layers_block_type", f"a list of {', '.join(_KINDS.values())}")
    kinds = [_NAMES[one] for one in listed]
    if pattern is not None and pattern != "".join(
        letter for one in kinds for letter, kind in _KINDS.items() if kind == one
    ):
        raise fields.refuse("hybrid_override_pattern", "what layers_block_type says")
    return kinds


def _find(kinds: list[str], kind: str) -> frozenset[int]:
    return frozenset(layer for layer, one in enumerate(kinds) if one == kind)


def _add_mamba(fields: Fields, config: DecoderConfig, layers: frozenset[int]) -> DecoderConfig:
    """Return the configuration with state spaces, whose groups have a norm each."""
    check_time_steps(fields)
    fields.expect("mamba_hidden_act", "silu")
    shape = make_recurrent(
        layers,
        key_heads=fields.get_integer("n_groups", 8),
        value_heads=fields.get_integer("mamba_num_heads", 128),
        key_dim=fields.get_integer("ssm_state_size", 128),
        value_dim=fields.get_integer("mamba_head_dim", 64),
        taps=fields.get_integer("conv_kernel", 4),
        selective=True,
        conv_bias=fields.get_flag("use_conv_bias", True),
        bias=fields.get_flag("use_bias", False),
    )
    return replace(config, recurrent=shape) if layers else config


def _add_experts(fields: Fields, config: DecoderConfig, dense: frozenset[int]) -> DecoderConfig:
    fields.expect("n_shared_experts", 1)  # versions of the original differ for several
    shared = fields.get_integer("moe_shared_expert_intermediate_size")
    latent = None
    if "moe_latent_size" in fields:
        latent = fields.get_integer("moe_latent_size")
    return add_experts(
        fields,
        config,
        read_sigmoid_router(fields, grouped=False),
        fields.get_integer("moe_intermediate_size"),
        count="n_routed_experts",
        names=("up_proj", "down_proj"),
        dense_layers=dense,
        shared=Shared(shared, "mlp.shared_experts"),
        latent=latent,
    )
