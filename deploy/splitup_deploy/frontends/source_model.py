"""The result of every front end: a traced model and, for a text model, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from splitup.graph.manifest import ChatInfo, DiffusionInfo, ImageInfo, ModelKind
from splitup_deploy.frontends.decoder.row_operations import CacheKind
from splitup_deploy.frontends.tracing import TracedModel


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be chosen when a model is compiled; None is the front end's default.

    ``context``: positions of a text model. ``chunk``: the most rows of one of its steps. ``dims``:
    the sizes of an ONNX file's symbolic dimensions. ``adapter``: a directory with a LoRA adapter
    that is merged into a Hugging Face directory's weights. ``vision``: compile the tower for images
    of a model for images and text, not the one for text. ``images``: the text model takes images,
    of which the model with this id makes rows. ``without``: go on without the tokenizer, as a
    function of token ids, or without the chat template. ``cache``: the numbers in which keys and
    values are kept.
    """

    context: int | None = None
    chunk: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    adapter: Path | None = None
    vision: bool = False
    images: str | None = None
    without: Literal["text", "chat"] | None = None
    cache: CacheKind | None = None


@dataclass(frozen=True, slots=True)
class SourceText:
    """The tokenizer and limits of a text model. ``context`` is the largest number of positions.

    ``tokenizer`` is a tokenizer.json, as a file or as its bytes. ``is_recurrent``: the model has
    layers from whose state a valid row cannot be removed. ``steps_back``: how far a step may start
    before the furthest one, if there is a bound. ``chat``: how it takes a conversation.
    ``diffusion``: how it writes blocks of tokens, if it does. ``images``: how a prompt holds them.
    """

    tokenizer: Path | bytes
    eos_ids: tuple[int, ...]
    vocab: int
    context: int
    is_recurrent: bool = False
    steps_back: int | None = None
    chat: ChatInfo | None = None
    diffusion: DiffusionInfo | None = None
    images: ImageInfo | None = None


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A traced model before it is cut. ``kind`` is the manifest's."""

    kind: ModelKind
    traced: TracedModel
    text: SourceText | None
