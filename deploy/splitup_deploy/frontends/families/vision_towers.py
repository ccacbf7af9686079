"""The vision tower of Gemma 3: the pixels of an image in, rows of the language model's width out.

SigLIP's vision transformer (arXiv 2303.15343): squares of pixels become rows, which all see each
other. Then squares of neighbouring rows are averaged, normalised and projected (arXiv 2503.19786,
section 2). Every image has one size, so nothing of a step is variable.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from tinygrad.tensor import Tensor

from splitup.core import tuning
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import ImageInfo
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.row_operations import (
    Activation,
    RowOperations,
    Weights,
    compute_activation,
)
from splitup_deploy.frontends.encoder.step_function import EncoderSizes, apply_layer_norm
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.encoder_fields import check_sizes, read_activation
from splitup_deploy.frontends.families.text_towers import find_text_tower
from splitup_deploy.frontends.tracing import TracedModel, Tracer, tracing

ARCHITECTURE: Final = "Gemma3ForConditionalGeneration"  # the only one with a tower that is read
_CHANNELS: Final = 3
_PREFIXES: Final = ("model.", "vision_tower.", "vision_model.", "multi_modal_projector.")
# What a checkpoint has besides: the text tower, and SigLIP's own way to one vector per image.
OTHER_WEIGHTS: Final = {
    "language_model.": "of the text tower: register it without --vision",
    "lm_head.": "of the text tower: register it without --vision",
    "head.": "of a head for another use",
}


@dataclass(frozen=True, slots=True)
class VisionTower:
    """An image has ``side`` rows of ``side`` patches of ``patch`` * ``patch`` pixels.

    ``pool`` * ``pool`` patches become a row of ``width`` elements. ``sizes`` have no vocabulary;
    their context is the number of patches.
    """

    sizes: EncoderSizes
    activation: Activation
    patch: int
    side: int
    pool: int
    width: int


def read_vision_tower(table: dict[str, Any]) -> VisionTower:
    """Read the tower of a config.json; raises InvalidModel for a model without a supported one."""
    if table.get("architectures") != [ARCHITECTURE]:
        raise InvalidModel(
            f"architecture {table.get('architectures')!r:.80} has no vision tower that is "
            f"supported; {ARCHITECTURE} has one"
        )
    inner = table.get("vision_config")
    if not isinstance(inner, dict):
        raise InvalidModel("config.json has no vision_config: fetch the model again")
    fields = Fields({"hidden_act": "gelu_pytorch_tanh", **inner}, "config.json's vision_config")
    fields.expect("model_type", "siglip_vision_model")
    fields.expect("num_channels", _CHANNELS)
    fields.get("vision_use_head")  # its result is not used
    patch = fields.get_integer("patch_size", 16)
    side = fields.get_integer("image_size", 224) // patch
    sizes = EncoderSizes(
        layers=fields.get_integer("num_hidden_layers", 12, most=tuning.MAX_LAYERS),
        hidden=fields.get_integer("hidden_size", 768),
        intermediate=fields.get_integer("intermediate_size", 3072),
        heads=fields.get_integer("num_attention_heads", 12),
        vocab=0,
        context=side * side,
        norm_epsilon=fields.get_number("layer_norm_eps", 1e-6),
    )
    check_sizes(sizes, sizes.context)
    activation = read_activation(fields, "hidden_act")
    fields.check_all_read()
    whole = Fields(table)
    tokens = math.isqrt(whole.get_integer("mm_tokens_per_image", 256))
    if tokens**2 != whole.get("mm_tokens_per_image", 256) or side % tokens:
        raise whole.refuse("mm_tokens_per_image", f"a square that divides {side} * {side} patches")
    width = Fields(find_text_tower(table)).get_integer("hidden_size", 2304)
    return VisionTower(sizes, activation, patch, side, side // tokens, width)


def read_images(table: dict[str, Any], tower: str, config: DecoderConfig) -> ImageInfo:
    """Read how the text model of a config.json takes images, of which ``tower`` makes rows.

    Raises InvalidModel where a layer's window does not show all of an image.
    """
    if not re.fullmatch("0x[0-9a-f]{64}", tower):
        raise InvalidModel(
            f"--images '{tower:.80}' is no model's id: give what 'register --vision' printed"
        )
    vision, fields = read_vision_tower(table), Fields(table, "config.json")
    rows = (vision.side // vision.pool) ** 2
    if config.local is not None and config.local.window < rows:
        raise InvalidModel(
            f"the model has a window of {config.local.window} positions, less than the {rows} of "
            "an image: it takes text only, so leave out --images"
        )
    found = ImageInfo(
        tower=tower,
        token=fields.get_integer("image_token_index", 262_144),
        begin=fields.get_integer("boi_token_index", 255_999),
        end=fields.get_integer("eoi_token_index", 256_000),
        rows=rows,
        width=vision.width,
    )
    if max(found.token, found.begin, found.end) >= config.vocab:
        raise InvalidModel("config.json has tokens of images that are outside the vocabulary")
    return found


def rename_weight(name: str) -> str:
    """Return the name of a weight within the tower, without those of the modules around it."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def trace_vision_tower(tower: VisionTower, weights: Weights) -> TracedModel:
    """Trace the tower: pixels float32 [3, height, width] -> embeddings float32 [rows, width].

    The rows stand for squares of the image, line by line.
    """
    size, sizes = tower.side * tower.patch, tower.sizes
    with tracing():
        tracer = Tracer()
        pixels = tracer.input(TensorSpec("pixels", "float32", (_CHANNELS, size, size)))
        on = RowOperations(weights, tracer, sizes.context)
        x = _embed(on, tower, pixels)
        for layer in range(sizes.layers):
            x = _attend(on, sizes, x, layer)
            x = _feed_forward(on, tower, x, layer)
        x = apply_layer_norm(on, x, "post_layernorm", sizes, "final norm")
        return tracer.finish({"embeddings": _project(on, tower, x)}, {})


def _embed(on: RowOperations, tower: VisionTower, pixels: Tensor) -> Tensor:
    """Return the patches' embeddings plus those of their places [patches, hidden]."""
    side, patch, hidden = tower.side, tower.patch, tower.sizes.hidden
    squares = pixels.reshape(_CHANNELS, side, patch, side, patch).permute(1, 3, 0, 2, 4)
    inner = _CHANNELS * patch * patch
    squares = on.tracer.mark(squares.reshape(side * side, inner), "patches")
    name = "embeddings.patch_embedding"
    kernel = on.tensor(on.weights.get(f"{name}.weight", hidden, _CHANNELS, patch, patch))
    x = (squares.reshape(-1, 1, inner) * kernel.reshape(1, hidden, inner)).sum(2)
    x = x + on.tensor(on.weights.get(f"{name}.bias", hidden))
    place = on.weights.get("embeddings.position_embedding.weight", side * side, hidden)
    return on.tracer.mark(x + on.tensor(place), "embed")


def _attend(on: RowOperations, sizes: EncoderSizes, x: Tensor, layer: int) -> Tensor:
    """Return x [patches, hidden] plus the attention of all patches to each other."""
    rows, heads, size, mark = sizes.context, sizes.heads, sizes.head_dim, on.tracer.mark
    label, prefix = f"block {layer} attention", f"encoder.layers.{layer}"
    h = apply_layer_norm(on, x, f"{prefix}.layer_norm1", sizes, f"{label}: norm")
    name = f"{prefix}.self_attn"
    parts = [(f"{name}.{part}_proj", sizes.hidden) for part in ("q", "k", "v")]
    qkv = mark(on.project(h, f"{name}.qkv_proj", parts, sizes.hidden, bias=True), f"{label}: qkv")
    query, keys, values = qkv.reshape(rows, 3, heads, size).permute(1, 2, 0, 3)
    pairs = query.reshape(heads, rows, 1, size) * keys.reshape(heads, 1, rows, size)
    scores = mark(pairs.sum(3) / math.sqrt(size), f"{label}: scores")
    highest = mark(scores.max(2, keepdim=True), f"{label}: highest scores")
    powers = mark((scores - highest).exp(), f"{label}: softmax")
    total = mark(powers.sum(2, keepdim=True), f"{label}: softmax sum")
    mixed = (powers.unsqueeze(3) * values.reshape(heads, 1, rows, size)).sum(2) / total
    mixed = mark(mixed.permute(1, 0, 2).reshape(rows, sizes.hidden), f"{label}: values")
    name = f"{name}.out_proj"
    branch = on.project(mixed, name, [(name, sizes.hidden)], sizes.hidden, bias=True)
    return mark(x + branch, f"{label}: output")


def _feed_forward(on: RowOperations, tower: VisionTower, x: Tensor, layer: int) -> Tensor:
    """Return x [patches, hidden] plus the feed-forward part of a layer."""
    s, mark = tower.sizes, on.tracer.mark
    label, prefix = f"block {layer} MLP", f"encoder.layers.{layer}"
    h = apply_layer_norm(on, x, f"{prefix}.layer_norm2", s, f"{label}: norm")
    up, down = f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
    inner = mark(on.project(h, up, [(up, s.intermediate)], s.hidden, bias=True), f"{label}: up")
    inner = mark(compute_activation(tower.activation, inner), f"{label}: activation")
    branch = on.project(inner, down, [(down, s.hidden)], s.intermediate, bias=True)
    return mark(x + branch, f"{label}: output")


def _project(on: RowOperations, tower: VisionTower, x: Tensor) -> Tensor:
    """Return the mean of each square of patches, RMS-normalised and projected [rows, width]."""
    hidden, pool, mark = tower.sizes.hidden, tower.pool, on.tracer.mark
    side = tower.side // pool
    x = x.reshape(side, pool, side, pool, hidden).permute(0, 2, 4, 1, 3)
    x = mark(x.reshape(side * side, hidden, pool * pool).mean(2), "means of patches")
    scale = (x.square().mean(1, keepdim=True) + tower.sizes.norm_epsilon).rsqrt()
    x = x * scale * (1.0 + on.tensor(on.weights.get("mm_soft_emb_norm.weight", hidden)))
    x = mark(x, "projector: norm").reshape(side * side, hidden, 1)
    table = on.tensor(on.weights.get("mm_input_projection_weight", hidden, tower.width))
    return mark((x * table.reshape(1, hidden, tower.width)).sum(1), "projector")
