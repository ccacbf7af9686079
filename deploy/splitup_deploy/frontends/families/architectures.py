"""All supported decoders: which function reads their configuration, and how they are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from splitup.graph.manifest import ChatInfo, ModelKind
from splitup_deploy.frontends.chat import offer_way_out
from splitup_deploy.frontends.decoder.caches import count_steps_back
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.expert_layers import compute_feed_forward
from splitup_deploy.frontends.decoder.row_operations import CacheKind, Weights
from splitup_deploy.frontends.decoder.state_spaces import mix
from splitup_deploy.frontends.decoder.step_function import choose_chunk, trace_decoder
from splitup_deploy.frontends.families import (
    block_diffusion,
    dense,
    gemma4,
    granite,
    hybrid,
    llama4,
    mixture_of_experts,
    nemotron_h,
)
from splitup_deploy.frontends.families.dense import Read
from splitup_deploy.frontends.source_model import Sizes, SourceModel, SourceText
from splitup_deploy.frontends.tracing import TracedModel

ARCHITECTURES: Final[dict[str, Read]] = {
    **dense.ARCHITECTURES,
    **mixture_of_experts.ARCHITECTURES,
    **gemma4.ARCHITECTURES,
    **granite.ARCHITECTURES,
    **llama4.ARCHITECTURES,
    **hybrid.ARCHITECTURES,
    **nemotron_h.ARCHITECTURES,
    **block_diffusion.ARCHITECTURES,
}
# Parts of names in a checkpoint -> what they are called here, where a family has its own.
_OWN_NAMES: Final[dict[str, dict[str, str]]] = {
    **mixture_of_experts.OWN_NAMES,
    **dict.fromkeys(gemma4.ARCHITECTURES, gemma4.OWN_NAMES),
    **dict.fromkeys(granite.ARCHITECTURES, granite.OWN_NAMES),
    **dict.fromkeys(llama4.ARCHITECTURES, llama4.OWN_NAMES),
    **dict.fromkeys(nemotron_h.ARCHITECTURES, nemotron_h.OWN_NAMES),
}
FURTHER: Final = "of blocks that only predict tokens further ahead"
UNUSED_INDEXER: Final = "an indexer would choose all positions"
BORROWED: Final = "the layers attend to another one's keys"


def find_renaming(architecture: str) -> Callable[[str], str]:
    """Return the function of a weight's name in an architecture's checkpoint that gives ours."""
    names = _OWN_NAMES.get(architecture, {})

    def rename(name: str) -> str:
        for own, usual in names.items():
            name = name.replace(own, usual)
        return name

    return rename


class ReadWeights(Weights, Protocol):
    """Weights that know which of them were read."""

    def check_all_read(self, others: Mapping[str, str]) -> tuple[str, ...]:
        """Return what to say of weights that were left out; raise InvalidModel for unknown ones."""
        ...


@dataclass(frozen=True, slots=True)
class OpenDecoder:
    """A decoder's source before its step is described; ``left_out``: what is not read of it."""

    config: DecoderConfig
    weights: ReadWeights
    text: SourceText | None
    left_out: Mapping[str, str]
    notes: tuple[str, ...]

    def check_all_read(self) -> tuple[str, ...]:
        """Return what to say of weights that were left out; raise InvalidModel for unknown ones."""
        return self.weights.check_all_read(self.left_out)

    def trace(self, sizes: Sizes) -> SourceModel:
        """Trace a step; raises InvalidModel for what is not supported."""
        traced = trace_language_model(self.config, self.weights, sizes.chunk, sizes.cache)
        traced = replace(traced, notes=(*traced.notes, *self.check_all_read(), *self.notes))
        kind: ModelKind = "function" if self.text is None else "text-generation"
        return SourceModel(kind, traced, self.text)


def read_text(
    config: DecoderConfig,
    sizes: Sizes,
    read_tokenizer: Callable[[], tuple[Path | bytes, tuple[int, ...]]],
    read_chat: Callable[[], tuple[ChatInfo | None, tuple[str, ...]]],
) -> tuple[SourceText | None, tuple[str, ...]]:
    """Return what turns texts into tokens, None without it, and what to say of that.

    ``read_tokenizer`` returns a tokenizer.json and the tokens that end a text.
    """
    if sizes.without == "text":
        return None, ()
    with offer_way_out("text"):
        tokenizer, eos_ids = read_tokenizer()
    with offer_way_out("chat"):
        chat, notes = (None, ()) if sizes.without == "chat" else read_chat()
    text = SourceText(
        tokenizer,
        eos_ids,
        config.vocab,
        config.context,
        is_recurrent=config.recurrent is not None,
        steps_back=count_steps_back(config, choose_chunk(config, sizes.chunk)),
        chat=chat,
        diffusion=config.diffusion,
        images=config.images,
    )
    return text, notes


def trace_language_model(
    config: DecoderConfig,
    weights: Weights,
    chunk: int | None = None,
    cache: CacheKind | None = None,
) -> TracedModel:
    """Trace a step of a decoder with the parts that its configuration asks for (``decoder``)."""
    traced = trace_decoder(config, weights, chunk, compute_feed_forward, mix, cache)
    notes = (config.rope.note,) if config.rope.note else ()
    return replace(traced, notes=(*traced.notes, *notes))
