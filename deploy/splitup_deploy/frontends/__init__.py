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


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """``recognises`` says cheaply whether a source has this format; ``load`` traces it.

    ``takes`` are the ``Sizes`` that have a meaning for it.
    """

    recognises: Callable[[str], bool]
    load: Callable[[str, Sizes], SourceModel]
    takes: tuple[str, ...] = ()


_TEXT: Final = ("context", "chunk", "without")
_IMAGES: Final = (*_TEXT, "vision", "images")
FRONT_ENDS: Final = (
    FrontEnd(is_without_weights, load_shapes, _IMAGES),
    FrontEnd(is_huggingface_directory, load_huggingface, (*_IMAGES, "adapter")),
    FrontEnd(is_gguf_file, load_gguf, _TEXT),
    FrontEnd(is_onnx_file, load_onnx, ("dims",)),
    FrontEnd(is_callable_reference, load_callable),
)
_REFUSALS: Final = {
    **{name: f"is no text model: leave out the {name}" for name in _TEXT},
    "adapter": "is no Hugging Face directory with weights, which an adapter can be merged into",
    "vision": "is no Hugging Face directory: leave out --vision",
    "images": "is no Hugging Face directory: leave out --images",
    "dims": "has no dimension '{:.80}'; only ONNX files have symbolic dimensions",
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
    for front_end in FRONT_ENDS:
        if front_end.recognises(source):
            for name, refusal in _REFUSALS.items():
                is_given = getattr(sizes, name) != getattr(Sizes(), name)
                if is_given and name not in front_end.takes:
                    raise InvalidModel(f"'{source}' {refusal.format(*sizes.dims)}")
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
