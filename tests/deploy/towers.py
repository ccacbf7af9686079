"""Small random checkpoints of models for images and text; their text towers are other cases.

``golden/make_golden.py`` saves what Hugging Face's own models compute from text alone. This module
needs neither torch nor our compiler.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from tests.deploy.saved import save_case

OLD = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEW = {"model.": "model.language_model.", "lm_head.": "lm_head."}
_PLAIN = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_SQUARES = {**_PLAIN, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_QWEN_VISION = {**_QWEN, "out_hidden_size": 32, "num_position_embeddings": 16}
_PICTURE_TOKENS = {
    "image_token_id": 1000,
    "video_token_id": 1001,
    "vision_start_token_id": 1002,
    "vision_end_token_id": 1003,
}
_KIMI = {"vision_config": {**_PLAIN, "num_attention_heads": 2, "patch_size": 4}}
_KINDS = {"mistral3": "mistral", "kimi_k25": "deepseek_v3"}  # of text towers
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
VISION: dict[str, Any] = {**_SQUARES, "num_hidden_layers": 2, "image_size": 56}
IMAGE = np.random.RandomState(5).uniform(-1, 1, (3, 56, 56)).astype(np.float32)
IMAGE_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
PHOTO_PROMPT = "w0 w8 <start_of_image> w15\n\n<start_of_image> w15 w11 w4"
# The text model that a tower is alone, as ``saved.save_case`` names it.
CASES = {
    "Gemma3ForConditionalGeneration": "gemma3-new",
    "Gemma4ForConditionalGeneration": "gemma4",
    "KimiK25ForConditionalGeneration": "deepseek-v3",
    "Kimi_K25ForConditionalGeneration": "deepseek-v3",
    "Llama4ForConditionalGeneration": "llama4",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3.5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5-moe",
}
_OUTER: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "vision_config": {**_SQUARES, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 1000,
    },
    "Gemma4ForConditionalGeneration": {
        "model_type": "gemma4",
        "vision_config": {**_SQUARES, "model_type": "gemma4_vision"},
        "audio_config": None,
        "image_token_id": 1000,
    },
    "KimiK25ForConditionalGeneration": {"model_type": "kimi_k25", **_KIMI},
    "Kimi_K25ForConditionalGeneration": {"model_type": "kimi_k25", **_KIMI},
    "Llama4ForConditionalGeneration": {
        "model_type": "llama4",
        "vision_config": {**_SQUARES, "model_type": "llama4_vision_model"},
        "image_token_index": 1000,
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3",
        "vision_config": {**_SQUARES, "model_type": "pixtral"},
        "image_token_index": 1000,
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        **_PICTURE_TOKENS,
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "model_type": "qwen3_vl_moe",
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        **_PICTURE_TOKENS,
    },
    "Qwen3_5ForConditionalGeneration": {
        "model_type": "qwen3_5",
        "vision_config": _QWEN_VISION,
        **_PICTURE_TOKENS,
    },
    "Qwen3_5MoeForConditionalGeneration": {
        "model_type": "qwen3_5_moe",
        "vision_config": _QWEN_VISION,
        **_PICTURE_TOKENS,
    },
}


def fuse_experts(weights: dict[str, np.ndarray], is_turned: bool) -> dict[str, np.ndarray]:
    """Return weights in which all experts of a layer are one tensor, as newer models store them."""
    groups: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    result = {}
    for name, array in weights.items():
        stem, found, rest = name.partition(".experts.")
        number, _, kind = rest.partition(".")
        if found:
            groups.setdefault(stem + ".experts", {}).setdefault(int(number), {})[kind] = array
        else:
            result[name] = array
    for stem, experts in groups.items():
        rows = [experts[number] for number in range(len(experts))]
        both = [np.concatenate([e["gate_proj.weight"], e["up_proj.weight"]]) for e in rows]
        for part, arrays in (("gate_up", both), ("down", [e["down_proj.weight"] for e in rows])):
            turned = [array.T if is_turned else array for array in arrays]
            result[f"{stem}.{part}_proj"] = np.ascontiguousarray(np.stack(turned))
    return result


def save_tower(
    directory: Path,
    name: str,
    names: dict[str, str],
    inner: dict[str, Any] | None = None,
    **outer: Any,
) -> str:
    """Write a checkpoint whose text tower has the weights of the case.

    ``names`` is ``OLD`` or ``NEW``; ``inner`` and ``outer`` change the two configurations.
    """
    save_case(CASES[name], directory)
    text = json.loads((directory / "config.json").read_text())
    kind = _OUTER[name]["model_type"]
    text["model_type"] = _KINDS.get(kind, f"{kind}_text")
    del text["architectures"]
    if "VL" in name:
        rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
        text["rope_parameters"] = {**rope, "rope_theta": text.pop("rope_theta")}
    config = {"architectures": [name], "text_config": {**text, **(inner or {})}, **_OUTER[name]}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps({**config, **outer}))
    path = directory / "model.safetensors"
    weights = {}
    plain = load_file(path)
    for key, array in (fuse_experts(plain, True) if "VLMoe" in name else plain).items():
        old = next(prefix for prefix in names if key.startswith(prefix))
        weights[names[old] + key.removeprefix(old)] = array
    other = "visual.blocks.9.weight" if names is OLD else "model.vision_tower.blocks.9.weight"
    weights[other] = np.ones(3, np.float32)
    save_file(weights, path, metadata={"format": "pt"})
    return str(directory)


def save_vision(directory: Path, names: dict[str, str], **vision: Any) -> str:
    """Write a Gemma 3 with a tower for images, which makes 4 rows of 16 patches of ``IMAGE``."""
    change = {"vision_config": {"model_type": "siglip_vision_model", **VISION, **vision}}
    save_tower(directory, "Gemma3ForConditionalGeneration", names, **change)
    path = directory / "model.safetensors"
    table = load_file(path)
    text = {name: array for name, array in table.items() if "visual" not in name}
    text = {name: array for name, array in text.items() if "vision_tower" not in name}
    outer = "" if names is OLD else "model."
    save_file({**text, **_make_vision_weights(outer, text)}, path, metadata={"format": "pt"})
    return str(directory)


def save_images(directory: Path, names: dict[str, str]) -> str:
    """Write ``save_vision``'s model whose vocabulary has the tokens of images, and a tokenizer."""
    save_vision(directory, names)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    fields = ("boi_token_index", "image_token_index", "eoi_token_index")
    first = config["text_config"]["vocab_size"] - len(IMAGE_TOKENS)
    for number, field in enumerate(fields):
        config[field] = first + number
    path.write_text(json.dumps(config))
    words = {f"w{number}": number for number in range(first - 2)}
    words |= {"\n\n": first - 2, "?": first - 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    splits = ((" ", "removed"), ("\n\n", "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, how) for pattern, how in splits]
    )
    tokenizer.add_special_tokens(list(IMAGE_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


def make_photos() -> list[bytes]:
    """Return two files of other sizes than the tower's: PNG and, turned by EXIF data, WebP."""
    random, files = np.random.RandomState(7), []
    for height, width, kind in ((37, 90, "PNG"), (61, 23, "WEBP")):
        image = Image.fromarray(random.randint(0, 256, (height, width, 3)).astype(np.uint8))
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6 if kind == "WEBP" else 1
        file = BytesIO()
        image.save(file, kind, exif=exif, lossless=True)
        files.append(file.getvalue())
    return files


def _make_vision_weights(outer: str, text: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    hidden, inner = VISION["hidden_size"], VISION["intermediate_size"]
    width = next(array for name, array in text.items() if name.endswith("model.norm.weight")).size
    tower, projector = f"{outer}vision_tower.vision_model.", f"{outer}multi_modal_projector."
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}embeddings.patch_embedding.weight": (hidden, 3, 14, 14),
        f"{tower}embeddings.patch_embedding.bias": (hidden,),
        f"{tower}embeddings.position_embedding.weight": (16, hidden),
        f"{projector}mm_input_projection_weight": (hidden, width),
        f"{projector}mm_soft_emb_norm.weight": (hidden,),
    }
    norms = [f"{tower}post_layernorm"]
    for layer in range(VISION["num_hidden_layers"]):
        block = f"{tower}encoder.layers.{layer}."
        norms += [f"{block}layer_norm1", f"{block}layer_norm2"]
        sizes = {f"self_attn.{part}": (hidden, hidden) for part in _PROJECTIONS}
        for name, size in {**sizes, "mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}.items():
            shapes |= {f"{block}{name}.weight": size, f"{block}{name}.bias": size[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    random = np.random.RandomState(11)
    return {
        name: (0.15 * random.standard_normal(shape) + 1.0 * name.endswith("m.weight")).astype("<f4")
        for name, shape in shapes.items()
    }
