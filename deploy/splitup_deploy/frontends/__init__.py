"""Front ends: each reads one kind of model source into a ``TracedModel``.

A new format is one module and one entry in ``FRONT_ENDS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.errors import InvalidModel
from splitup_deploy.frontends.callable import is_callable_reference, load_callable
from splitup_deploy.frontends.huggingface import is_huggingface_directory, load_huggingface
from splitup_deploy.frontends.model import SourceModel

__all__ = ["FRONT_ENDS", "FrontEnd", "SourceModel", "load_model"]


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """``recognises`` looks at the source only as far as it must; ``load`` traces it."""

    recognises: Callable[[str], bool]
    load: Callable[[str, int | None], SourceModel]


FRONT_ENDS: Final[dict[str, FrontEnd]] = {
    "huggingface": FrontEnd(is_huggingface_directory, load_huggingface),
    "callable": FrontEnd(is_callable_reference, load_callable),
}


def load_model(source: str, context: int | None = None) -> SourceModel:
    """Trace a model: a Hugging Face directory, or ``module:function`` (see ``callable``).

    ``context`` is the number of KV cache rows of a text model, None for the model's own. Raises
    InvalidModel naming what is missing or not supported.
    """
    for front_end in FRONT_ENDS.values():
        if front_end.recognises(source):
            return front_end.load(source, context)
    what = "is no model" if Path(source).exists() else "does not exist"
    raise InvalidModel(
        f"'{source}' {what}: give a Hugging Face directory with config.json and safetensors "
        "weights, or a tinygrad function as module:function"
    )
