"""Front ends: each reads one kind of model source into a ``TracedModel``.

A new format is one module and one entry in ``FRONT_ENDS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from splitup.backend.compiler.simplified_sizes import keep_simplified
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.chat import check_tokenizer
from splitup_deploy.frontends.gguf.load import is_gguf_file, load_gguf
from splitup_deploy.frontends.huggingface.checkpoint import WEIGHT_SUFFIXES
from splitup_deploy.frontends.huggingface.config_only import is_without_weights, load_shapes
from splitup_deploy.frontends.huggingface.directory import (
    is_huggingface_directory,
    load_huggingface,
)
from splitup_deploy.frontends.onnx.model_file import is_onnx_file, load_onnx
from splitup_deploy.frontends.source_model import Sizes, SourceModel
from splitup_deploy.frontends.tinygrad_function import is_callable_reference, load_callable

__all__ = ["FRONT_ENDS", "FrontEnd", "Sizes", "SourceModel", "load_model", "trace_model"]

_Load = Callable[[str, Sizes], SourceModel]


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """``recognises`` says cheaply whether a source has this format; ``load`` traces it."""

    recognises: Callable[[str], bool]
    load: _Load


def _fixed(load: _Load) -> _Load:
    """Return a loader for a format without symbolic dimensions."""

    def load_fixed(source: str, sizes: Sizes) -> SourceModel:
        if sizes.dims:
            raise InvalidModel(
                f"'{source}' has no dimension '{next(iter(sizes.dims)):.80}'; "
                "only ONNX files have symbolic dimensions"
            )
        return load(source, sizes)

    return load_fixed


def _textless(load: _Load) -> _Load:
    """Return a loader for a format without text models."""

    def load_function(source: str, sizes: Sizes) -> SourceModel:
        for name in ("context", "chunk", "without"):
            if getattr(sizes, name) is not None:
                raise InvalidModel(f"'{source}' is no text model: leave out the {name}")
        return load(source, sizes)

    return load_function


FRONT_ENDS: Final[dict[str, FrontEnd]] = {
    "shapes": FrontEnd(is_without_weights, _fixed(load_shapes)),
    "huggingface": FrontEnd(is_huggingface_directory, _fixed(load_huggingface)),
    "gguf": FrontEnd(is_gguf_file, _fixed(load_gguf)),
    "onnx": FrontEnd(is_onnx_file, _textless(load_onnx)),
    "callable": FrontEnd(is_callable_reference, _fixed(_textless(load_callable))),
}


def load_model(source: str, sizes: Sizes | None = None) -> SourceModel:
    """Trace a model, and read its weights. Raises InvalidModel as ``trace_model`` does."""
    model = trace_model(source, sizes)
    return replace(model, traced=model.traced.read_weights())


def trace_model(source: str, sizes: Sizes | None = None) -> SourceModel:
    """Trace a model: a Hugging Face directory, an ONNX or GGUF file, or ``module:function``.

    Raises InvalidModel naming what is missing or not supported.
    """
    keep_simplified()
    sizes = sizes or Sizes()
    for name, front_end in FRONT_ENDS.items():
        if front_end.recognises(source):
            if sizes.adapter is not None and name != "huggingface":
                raise InvalidModel(
                    f"'{source}' is no Hugging Face directory with weights, which an adapter can "
                    "be merged into"
                )
            if sizes.vision and name not in ("huggingface", "shapes"):
                raise InvalidModel(f"'{source}' is no Hugging Face directory: leave out --vision")
            if sizes.images is not None and name not in ("huggingface", "shapes"):
                raise InvalidModel(f"'{source}' is no Hugging Face directory: leave out --images")
            model = front_end.load(source, sizes)
            if model.text is not None:
                check_tokenizer(model.text.tokenizer)
            return model
    path = Path(source)
    if path.is_file() and path.suffix in WEIGHT_SUFFIXES:
        raise InvalidModel(
            f"'{source}' is a file of weights without the model's architecture: put it into a "
            "directory with config.json and tokenizer.json, and give the directory"
        )
    what = "is no model" if path.exists() else "does not exist"
    raise InvalidModel(
        f"'{source}' {what}: give a Hugging Face directory with config.json and safetensors "
        "weights, a file named *.onnx or *.gguf, or a tinygrad function as module:function"
    )
