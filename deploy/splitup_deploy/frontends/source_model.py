"""What every front end gives: a traced model and, for a text model, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from splitup_deploy.frontends.tracing import TracedModel


@dataclass(frozen=True, slots=True)
class Sizes:
    """What somebody who compiles a model may choose; None leaves the choice to the front end.

    ``context``: positions of a text model. ``chunk``: the most rows of one of its steps. ``dims``:
    the sizes of an ONNX file's symbolic dimensions.
    """

    context: int | None = None
    chunk: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Text:
    """How to talk to a text model. ``context`` is the largest number of positions.

    ``is_recurrent``: it has layers that cannot forget a row that counted.

    ``tokenizer`` is a tokenizer.json, as a file or as its bytes.
    """

    tokenizer: Path | bytes
    eos_ids: tuple[int, ...]
    vocab: int
    context: int
    is_recurrent: bool = False


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model as it came in, before it is cut. ``kind`` is the manifest's."""

    kind: Literal["text-generation", "function"]
    traced: TracedModel
    text: Text | None
