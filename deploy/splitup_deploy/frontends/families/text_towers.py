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
    for module in ("vision_tower", "multi_modal_projector", "visual")
)
# Fields beside the text tower's: of the other towers, and which tokens stand for pictures.
_OTHER_FIELDS: Final = (
    "boi_token_index",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
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
    the text model reads and the class of the whole does not.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


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
    "Mistral3ForConditionalGeneration": Tower("MistralForCausalLM", "mistral"),
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
    tower = TOWERS.get(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if tower is None:
        return table
    fields = Fields(table)
    inner = fields.get("text_config")
    if not isinstance(inner, dict) or inner.get("model_type", tower.model_type) != tower.model_type:
        raise fields.refuse("text_config", f"an object of the type {tower.model_type}")
    for key, value in tower.fixed.items():
        if inner.get(key, value) != value:
            raise Fields(inner, "config.json's text_config").refuse(key, repr(value))
    for name in _OTHER_FIELDS:
        fields.get(name)
    is_tied = fields.get_flag("tie_word_embeddings", False)
    fields.check_all_read()
    shared = {key: table[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in table}
    result = {**tower.defaults, **shared, **inner, **tower.fixed}
    result["architectures"] = [tower.architecture]
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
