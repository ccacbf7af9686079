"""What an export is made of: the static step of each size, what it says of itself, its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from splitup_deploy.frontends.chat import check_text
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.float_weights import FloatWeights
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.families.architectures import OpenDecoder
from splitup_deploy.frontends.families.text_towers import find_text_tower
from splitup_deploy.frontends.gguf.header import read_gguf_parts
from splitup_deploy.frontends.gguf.load import open_gguf
from splitup_deploy.frontends.huggingface.checkpoint import read_json
from splitup_deploy.frontends.huggingface.directory import (
    ShapeWeights,
    open_decoder,
    parse_config,
)
from splitup_deploy.frontends.onnx.onnx_graph import OnnxModel, OnnxNode
from splitup_deploy.frontends.recognition import has_suffix, is_without_weights
from splitup_deploy.frontends.source_model import Sizes, SourceText

from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import ITEM_BYTES
from splitup.graph.manifest import TextInfo
from splitup_edge.export.static_experts import ROUTER
from splitup_edge.export.static_graph import build_static_step, make_shape
from splitup_edge.program import EdgeInfo
from splitup_edge.static_step import StaticShape

Backend = Literal["xnnpack", "portable", "onnx"]
Dtype = Literal["fp32", "fp16", "int8", "int4"]
PREFILL_ROWS: Final = 32  # of a step of the prompt
GROUP: Final = 32  # weights that share a factor in int4
# Bytes of a weight of products by dtype, and of the factors of a row, and of a group.
_PRODUCT: Final = {
    "fp32": (4.0, 0, 0),
    "fp16": (2.0, 0, 0),
    "int8": (1.0, 4, 0),
    "int4": (0.5, 0, 2),
}


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A model's static steps by method; without ``info`` its weights are not here."""

    models: Mapping[str, OnnxModel]
    shapes: Mapping[str, StaticShape]
    dtype: Dtype
    info: EdgeInfo | None
    tokenizer: bytes
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the bytes of weights, cache and masks, by formula."""
        shapes = list(self.shapes.values())
        item = 2 if self.dtype == "fp16" else 4
        layers, length = shapes[0].layers, shapes[0].max_len
        largest = max(shape.block for shape in shapes)
        # attention mask, insert matrix and keep mask of one step
        masks = layers * (largest * (length + largest) + length * largest + length) * item
        return {
            "dtype": self.dtype,
            "max_len": length,
            "rows": {name: shape.block for name, shape in self.shapes.items()},
            "weights_bytes": compute_weight_bytes(next(iter(self.models.values())), self.dtype),
            "cache_bytes": shapes[0].count_cache_bytes(item),
            "cache_formula": (
                f"{layers} layers x 2 x {length} positions x {shapes[0].kv_heads} heads x "
                f"{shapes[0].head_dim} x {item} bytes"
            ),
            "masks_bytes": masks,
        }


def plan_export(
    source: str, dtype: Dtype, max_len: int | None, block: int | None, *, prefill: bool = True
) -> ExportPlan:
    """Read a model and describe its steps; raises InvalidModel, InvalidInput.

    A step has ``block`` rows; by default one, or those of the model's blocks. With ``prefill``
    there is another method for longer steps.
    """
    if dtype not in get_args(Dtype):
        raise InvalidInput(f"'{dtype:.40}' is no dtype; use one of {', '.join(get_args(Dtype))}")
    config, weights, text, opened = _open(source, max_len)
    own = 1 if config.diffusion is None else config.diffusion.block_size
    block = block or own
    if block % own or config.context % block:
        raise InvalidInput(
            f"a block of {block} rows does not divide: it must be a multiple of {own}"
            f"{' (the blocks that the model writes)' * (own > 1)}, and {config.context} positions "
            "a multiple of it (--block, --max-len)"
        )
    rows = {"forward": block}
    most = min(PREFILL_ROWS, config.context) // own * own
    if prefill and most > block:
        rows["prefill"] = most
    shapes = {name: make_shape(config, count) for name, count in rows.items()}
    models = {name: build_static_step(config, weights, shape) for name, shape in shapes.items()}
    if text is None or opened is None:
        return ExportPlan(models, shapes, dtype, None, b"", ())
    check_text(text)
    notes = opened.check_all_read()
    tokenizer = text.tokenizer
    data = tokenizer if isinstance(tokenizer, bytes) else tokenizer.read_bytes()
    info = _describe(config, shapes, dtype, text, data)
    return ExportPlan(models, shapes, dtype, info, data, notes)


def _open(
    source: str, max_len: int | None
) -> tuple[DecoderConfig, Weights, SourceText | None, OpenDecoder | None]:
    path = Path(source)
    if is_without_weights(source):
        file = path / "config.json" if path.is_dir() else path
        table = find_text_tower(read_json(file))
        return parse_config(table, max_len), ShapeWeights(table), None, None
    sizes = Sizes(context=max_len)
    if has_suffix(".gguf", source):
        opened = open_gguf(source, read_gguf_parts(path), sizes)
    elif path.is_dir():
        opened = open_decoder(path, sizes)
    else:
        what = "is neither" if path.exists() else "does not exist"
        raise InvalidModel(
            f"'{source}' {what}: give the Hugging Face directory, or a GGUF file, of a language "
            "model"
        )
    return opened.config, FloatWeights(opened.weights), opened.text, opened


def _describe(
    config: DecoderConfig,
    shapes: Mapping[str, StaticShape],
    dtype: Dtype,
    text: SourceText,
    tokenizer: bytes,
) -> EdgeInfo:
    return EdgeInfo(
        version=1,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_len=config.context,
        windows=next(iter(shapes.values())).windows,
        dtype="float16" if dtype == "fp16" else "float32",
        methods={name: shape.block for name, shape in shapes.items()},
        text=TextInfo(
            tokenizer_digest=compute_digest(tokenizer),
            tokenizer_bytes=len(tokenizer),
            eos_ids=text.eos_ids,
            vocab=text.vocab,
            context=text.context,
            chat=text.chat,
            diffusion=text.diffusion,
        ),
    )


def compute_weight_bytes(model: OnnxModel, dtype: Dtype) -> int:
    """Return the bytes of the weights: each once for products, and once for looking up rows."""
    held: dict[tuple[str, str], int] = {}
    for node in model.graph.nodes:
        for place, name in enumerate(node.inputs):
            if name in model.graph.tensors and node.op in ("Gemm", "Gather", "RMSNormalization"):
                held[node.op, name] = _count(node, place, model.graph.tensors[name].shape, dtype)
    return sum(held.values())


def _count(node: OnnxNode, place: int, shape: tuple[int, ...], dtype: Dtype) -> int:
    count, plain = math.prod(shape), 2 if dtype == "fp16" else 4
    if node.op == "Gemm" and place == 1 and not node.outputs[0].startswith(ROUTER):
        item, of_row, of_group = _PRODUCT[dtype]
        return int(count * item) + shape[0] * of_row + count // GROUP * of_group
    is_table = node.op == "Gather" and not node.inputs[0].startswith("rope.")
    if is_table and dtype in ("int8", "int4"):
        return count + shape[0] * ITEM_BYTES["float32"]
    return count * (8 if node.op == "RMSNormalization" else plain)
