"""The text towers of models for images and text: each is a model of a family of its own.

Only the tower that reads and writes text is compiled, so such a model takes no images. For text
alone all axes of a position are equal, so rope with several axes ("mrope") is plain rope. Names,
defaults and their meaning are those of the Hugging Face model of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from splitup_deploy.frontends.families.config_fields import Fields

# What a checkpoint calls the tower's modules -> what a model of its family does.
NAMES: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# Modules that turn pictures into rows of the embedding.
OTHER_MODULES: Final = tuple(
    f"{prefix}{module}."
    for prefix in ("", "model.")
    for module in (
        *("vision_tower", "vision_model", "multi_modal_projector", "mm_projector", "visual"),
        *("embed_vision", "audio_tower", "embed_audio"),
    )
)
# Fields beside the text tower's: of the other towers, and which tokens stand for pictures.
_OTHER_FIELDS: Final = (
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "ignore_index",
    "media_placeholder_token_id",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projection_hidden_size",
    "projection_layer_norm_eps",
    "projector_hidden_act",
    "use_unified_vision_chunk",
    "video_placeholder",
    "spatial_merge_size",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_start_token_id",
)


@dataclass(frozen=True, slots=True)
class Tower:
    """A text tower: the architecture that it is, its model type, and the values of absent fields.

    Published configurations leave out what is the default of their class. ``fixed`` are fields that
    the text model reads and the class of the whole does not. ``others`` are further model types,
    and what they are.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)


_KIMI: Final = Tower(
    "DeepseekV3ForCausalLM", "deepseek_v3", others={"kimi_k2": "DeepseekV3ForCausalLM"}
)
_LLAMA4: Final = {"rope_theta": 500_000.0}
TOWERS: Final[dict[str, Tower]] = {
    "Gemma3ForConditionalGeneration": Tower(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "vocab_size": 262_208,
        },
        {"final_logit_softcapping": None},
    ),
    "Gemma4ForConditionalGeneration": Tower("Gemma4ForCausalLM", "gemma4_text"),
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "Llama4ForConditionalGeneration": Tower("Llama4ForCausalLM", "llama4_text", _LLAMA4),
    "Mistral3ForConditionalGeneration": Tower(
        "MistralForCausalLM",
        "mistral",
        others={"ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"},
    ),
    "Qwen3VLForConditionalGeneration": Tower("Qwen3ForCausalLM", "qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": Tower(
        "Qwen3MoeForCausalLM", "qwen3_vl_moe_text", fixed={"norm_topk_prob": True}
    ),
    "Qwen3_5ForConditionalGeneration": Tower("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": Tower("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}


def find_text_tower(table: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that a model's text tower would have alone; any other unchanged."""
    names = table.get("architectures")
    tower = None
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        tower = TOWERS.get(names[0])
    if tower is None:
        return table
    fields = Fields(table)
    inner = fields.get("text_config")
    kinds = {tower.model_type: tower.architecture, **tower.others}
    kind = inner.get("model_type", tower.model_type) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or kind not in list(kinds):
        raise fields.refuse("text_config", f"an object of the type {', '.join(kinds)}")
    for key, value in tower.fixed.items():
        if inner.get(key, value) != value:
            raise Fields(inner, "config.json's text_config").refuse(key, repr(value))
    fields.skip(*_OTHER_FIELDS)
    is_tied = fields.get_flag("tie_word_embeddings", False)
    fields.check_all_read()
    shared = {key: table[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in table}
    result = {**tower.defaults, **shared, **inner, **tower.fixed}
    result["architectures"] = [kinds[kind]]
    if is_tied:  # a head that the file has is used nevertheless
        result["tie_word_embeddings"] = True
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := result.get(key), dict):
            result[key] = {k: value for k, value in rope.items() if not k.startswith("mrope_")}
    return result


def rename_weight(name: str) -> str:
    """Return what a model of the text tower's family calls a weight."""
    for old, new in NAMES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
