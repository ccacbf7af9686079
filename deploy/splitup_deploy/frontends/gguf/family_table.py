"""Which keys each family of GGUF files has, and the fields of config.json that they become.

Sources: llama.cpp's src/models (which keys a family has, and what holds without them) and
convert_hf_to_gguf.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from splitup_deploy.frontends.gguf.hybrid_config import (
    GRANITE_FIELDS,
    KIMI_CHECKED,
    QWEN_CHECKED,
    QWEN_FIELDS,
)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of files; ``architecture`` is the one that its config.json would name.

    ``fields`` maps the family's own keys to config.json's fields; ``defaults`` are the values of
    absent ones; ``checked`` are keys that are read separately; ``names`` maps names of a block's
    tensors that differ. ``interleaved``: the converter reorders query and key heads.
    """

    architecture: str
    fields: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    checked: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False


_EXPERT_FIELDS: Final = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SHARED_EXPERT_FIELDS: Final = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_SHARED_EXPERT_DEFAULTS: Final = {
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "n_shared_experts": None,
    "first_k_dense_replace": 0,
}
YARN_WEIGHT: Final = "rope.scaling.yarn_log_multiplier"
_LATENT_CHECKED: Final = (
    "expert_gating_func",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    YARN_WEIGHT,
)
_INDEXER_FIELDS: Final = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
INDEXER_TYPES: Final = "attention.indexer.types"
GROWTH: Final = "attention.temperature_scale"
SHARED_FEED_FORWARD: Final = "expert_shared_feed_forward_length"
GRANITE_SCALES: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
# Granite 4 without recurrent layers has these as well; tensors of such layers are refused.
_GRANITE_UNUSED: Final = (
    SHARED_FEED_FORWARD,
    *(f"ssm.{part}" for part in ("conv_kernel", "group_count", "inner_size", "state_size")),
    "ssm.time_step_rank",
)
_GEMMA_FIELDS: Final = {"attention.sliding_window": "sliding_window"}
_GEMMA_NAMES: Final = {
    "ffn_norm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FAMILIES: Final = {
    "llama": Family("LlamaForCausalLM", interleaved=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        {**_EXPERT_FIELDS, "expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True},  # the architecture has no key for it
    ),
    "olmoe": Family("OlmoeForCausalLM", _EXPERT_FIELDS),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        _SHARED_EXPERT_FIELDS,
        _SHARED_EXPERT_DEFAULTS,
        ("expert_gating_func",),
        {"ffn_norm": "post_attention_norm"},
    ),
    "deepseek2": Family(  # DeepSeek-V3 and what is built like it; V2 is below
        "DeepseekV3ForCausalLM",
        _SHARED_EXPERT_FIELDS,
        {**_SHARED_EXPERT_DEFAULTS, "n_group": 1, "topk_group": 1},
        _LATENT_CHECKED,
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM",
        _SHARED_EXPERT_FIELDS,
        _SHARED_EXPERT_DEFAULTS,
        (*_LATENT_CHECKED, GROWTH, "attention.temperature_length"),
    ),
    "qwen35": Family(
        "Qwen3_5ForCausalLM",
        QWEN_FIELDS,
        checked=QWEN_CHECKED,
        names={"ffn_norm": "post_attention_norm"},
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        {
            **QWEN_FIELDS,
            **_EXPERT_FIELDS,
            "expert_feed_forward_length": "moe_intermediate_size",
            SHARED_FEED_FORWARD: "shared_expert_intermediate_size",
        },
        checked=QWEN_CHECKED,
        names={"ffn_norm": "post_attention_norm"},
    ),
    "kimi-linear": Family(
        "KimiLinearForCausalLM",
        _SHARED_EXPERT_FIELDS,
        {**_SHARED_EXPERT_DEFAULTS, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        (*_LATENT_CHECKED, *KIMI_CHECKED),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        checked=("rope.scaling.attn_factor",),
        names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        {
            **_EXPERT_FIELDS,
            "expert_count": "num_local_experts",
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        {"lm_head_bias": True},
        checked=("rope.scaling.attn_factor",),
    ),
    "mistral3": Family("Ministral3ForCausalLM", checked=(GROWTH, YARN_WEIGHT), interleaved=True),
    "smollm3": Family("SmolLM3ForCausalLM", interleaved=True),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        names={"ffn_norm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    ),
    "minimax-m2": Family(
        "MiniMaxM2ForCausalLM",
        {**_EXPERT_FIELDS, "expert_count": "num_local_experts"},
        checked=("expert_gating_func",),
    ),
    "granite": Family(
        "GraniteForCausalLM", GRANITE_SCALES, checked=_GRANITE_UNUSED, interleaved=True
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        {**GRANITE_SCALES, **_EXPERT_FIELDS, "expert_count": "num_local_experts"},
        checked=_GRANITE_UNUSED,
        interleaved=True,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "attention.sliding_window": "sliding_window",
            "logit_scale": "logit_scale",
        },
        {"tie_word_embeddings": True},
    ),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE_SCALES,
            **GRANITE_FIELDS,
            "expert_used_count": "num_experts_per_tok",
            SHARED_FEED_FORWARD: "shared_intermediate_size",
        },
        checked=("ssm.inner_size",),
        interleaved=True,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {
            **_EXPERT_FIELDS,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        names={"ffn_norm": "post_attention_norm"},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA_FIELDS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        names=_GEMMA_NAMES,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA_FIELDS, "rope.freq_base_swa": "rope_local_base_freq"},
        {"final_logit_softcapping": None, "rope_theta": 1_000_000.0},
        names=_GEMMA_NAMES,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {
            **_GEMMA_FIELDS,
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        {"final_logit_softcapping": None, "num_kv_shared_layers": 0},
        (
            *("attention.key_length_swa", "attention.value_length_swa", "rope.freq_base_swa"),
            *("attention.sliding_window_pattern", "rope.dimension_count_swa"),
        ),
        {
            **_GEMMA_NAMES,
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
        },
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        {
            **_EXPERT_FIELDS,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        {"attention_chunk_size": 8192},  # files do not say it, nor at which layers rope is absent
    ),
}
for _name, _architecture in (
    ("deepseek32", "DeepseekV32ForCausalLM"),
    ("glm-dsa", "GlmMoeDsaForCausalLM"),
):
    FAMILIES[_name] = replace(
        FAMILIES["deepseek2"],
        architecture=_architecture,
        fields={**_SHARED_EXPERT_FIELDS, **_INDEXER_FIELDS},
        checked=(*_LATENT_CHECKED, INDEXER_TYPES) if _name == "glm-dsa" else _LATENT_CHECKED,
    )
FAMILIES["qwen3next"] = replace(FAMILIES["qwen35moe"], architecture="Qwen3NextForCausalLM")
for _name in ("nemotron_h", "nemotron_h_moe"):
    FAMILIES[_name] = Family(
        "NemotronHForCausalLM",
        {
            **_SHARED_EXPERT_FIELDS,
            SHARED_FEED_FORWARD: "moe_shared_expert_intermediate_size",
            "moe_latent_size": "moe_latent_size",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.group_count": "n_groups",
            "ssm.state_size": "ssm_state_size",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        checked=("attention.layer_norm_epsilon", "ssm.inner_size"),
    )
# The largest Gemmas, by their layers, divide queries by another number than the size of a head.
LARGEST_GEMMAS: Final = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
DEEPSEEK_V2: Final = replace(  # with a router of its own
    FAMILIES["deepseek2"], architecture="DeepseekV2ForCausalLM", defaults=_SHARED_EXPERT_DEFAULTS
)
MIXTRAL: Final = Family(  # a llama with experts
    "MixtralForCausalLM",
    {**_EXPERT_FIELDS, "expert_count": "num_local_experts"},
    interleaved=True,
)
MISTRAL3: Final = replace(  # whose queries are not scaled by their positions
    FAMILIES["mistral3"], architecture="MistralForCausalLM", defaults={"sliding_window": None}
)
OLMO3: Final = replace(  # an olmo2 with windows
    FAMILIES["olmo2"],
    architecture="Olmo3ForCausalLM",
    fields={"attention.sliding_window": "sliding_window"},
    checked=("attention.sliding_window_pattern",),
)
GRANITE_SHARED: Final = replace(  # with a shared MLP beside the experts
    FAMILIES["granitemoe"],
    architecture="GraniteMoeSharedForCausalLM",
    fields={**FAMILIES["granitemoe"].fields, SHARED_FEED_FORWARD: "shared_intermediate_size"},
    names={f"ffn_{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
)
GRANITE_HYBRID_EXPERTS: Final = replace(FAMILIES["granitehybrid"], names=GRANITE_SHARED.names)
