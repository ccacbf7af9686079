"""Front ends: each reads one kind of model source into a ``TracedModel``.

A new format is one module and one entry in ``FRONT_ENDS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

from splitup.backend.compiler.simplified_sizes import keep_simplified
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.chat import check_text
from splitup_deploy.frontends.recognition import (
    WEIGHT_SUFFIXES,
    has_suffix,
    is_callable_reference,
    is_without_weights,
)
from splitup_deploy.frontends.source_model import Sizes, SourceModel

__all__ = ["FRONT_ENDS", "FrontEnd", "Sizes", "SourceModel", "load_model", "trace_model"]


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """``recognises`` says cheaply whether a source has this format; ``loader`` traces it.

    The loader is a module of this package, which is imported for its sources only, and a function.
    ``takes`` are the ``Sizes`` that have a meaning for it.
    """

    recognises: Callable[[str], bool]
    loader: tuple[str, str]
    takes: tuple[str, ...] = ()

    def load(self, source: str, sizes: Sizes) -> SourceModel:
        """Trace a source; raises InvalidModel."""
        module, function = self.loader
        model: SourceModel = getattr(import_module(f"{__name__}.{module}"), function)(source, sizes)
        return model


_TEXT: Final = ("context", "chunk", "without", "cache")
_IMAGES: Final = (*_TEXT, "vision", "images")
FRONT_ENDS: Final = (
    FrontEnd(is_without_weights, ("huggingface.directory", "load_shapes"), _IMAGES),
    FrontEnd(os.path.isdir, ("huggingface.directory", "load_huggingface"), (*_IMAGES, "adapter")),
    FrontEnd(partial(has_suffix, ".gguf"), ("gguf.load", "load_gguf"), _TEXT),
    FrontEnd(partial(has_suffix, ".onnx"), ("onnx.model_file", "load_onnx"), ("dims",)),
    FrontEnd(is_callable_reference, ("tinygrad_function", "load_callable")),
)
_REFUSALS: Final = {
    **{name: f"is no text model: leave out the {name}" for name in _TEXT},
    "adapter": "is no Hugging Face directory with weights, which an adapter can be merged into",
    "vision": "is no Hugging Face directory: leave out --vision",
    "images": "is no Hugging Face directory: leave out --images",
    "dims": "has no dimension '{:.80}'; only ONNX files have symbolic dimensions",
}


def load_model(source: str, sizes: Sizes | None = None) -> SourceModel:
    """Trace a model, check its text, and read its weights. Raises InvalidModel."""
    model = trace_model(source, sizes)
    check_text(model.text)
    return replace(model, traced=model.traced.read_weights())


def trace_model(source: str, sizes: Sizes | None = None) -> SourceModel:
    """Trace a model: a Hugging Face directory, an ONNX or GGUF file, or ``module:function``.

    Raises InvalidModel naming what is missing or not supported. Whether clients can use its
    tokenizer and chat template ``chat.check_text`` finds out, which takes a process.
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
            if sizes.cache and not any(one.dtype == "int8" for one in model.traced.graph.states):
                raise InvalidModel(f"'{source}' keeps no keys and values: leave out the cache")
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
