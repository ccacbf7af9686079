"""All supported decoders: which function reads their configuration, and how they are traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.decoder import latent_attention, state_spaces
from splitup_deploy.frontends.decoder.caches import count_steps_back
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.expert_layers import choose_feed_forward
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.decoder.step_function import choose_chunk, trace_decoder
from splitup_deploy.frontends.families import (
    block_diffusion,
    dense,
    gemma4,
    gpt_oss,
    granite,
    hybrid,
    llama4,
    mixture_of_experts,
    nemotron_h,
)
from splitup_deploy.frontends.families.dense import Read
from splitup_deploy.frontends.source_model import SourceText
from splitup_deploy.frontends.tracing import TracedModel

ARCHITECTURES: Final[dict[str, Read]] = {
    **dense.ARCHITECTURES,
    **mixture_of_experts.ARCHITECTURES,
    **gemma4.ARCHITECTURES,
    **gpt_oss.ARCHITECTURES,
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


def find_renaming(architecture: str) -> Callable[[str], str]:
    """Return the function of a weight's name in an architecture's checkpoint that gives ours."""
    names = _OWN_NAMES.get(architecture, {})

    def rename(name: str) -> str:
        for own, usual in names.items():
            name = name.replace(own, usual)
        return name

    return rename


def make_text(
    config: DecoderConfig,
    chunk: int | None,
    tokenizer: Path | bytes,
    eos_ids: tuple[int, ...],
    chat: ChatInfo | None,
) -> SourceText:
    """Return the tokenizer, limits and chat template of a decoder whose steps have this chunk."""
    return SourceText(
        tokenizer,
        eos_ids,
        config.vocab,
        config.context,
        is_recurrent=config.recurrent is not None,
        steps_back=count_steps_back(config, choose_chunk(config, chunk)),
        chat=chat,
        diffusion=config.diffusion,
        images=config.images,
    )


def trace_language_model(
    config: DecoderConfig, weights: Weights, chunk: int | None = None
) -> TracedModel:
    """Trace a step of a decoder with the parts that its configuration asks for (``decoder``)."""
    mixer = state_spaces.choose_mixer(config, latent_attention.choose_mixer(config))
    traced = trace_decoder(config, weights, chunk, choose_feed_forward(config), mixer)
    notes = (config.rope.note,) if config.rope.note else ()
    return replace(traced, notes=(*traced.notes, *notes))
