"""All supported decoders: which function reads their configuration, and how they are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.decoder import latent_attention, recurrent_layers
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.expert_layers import choose_feed_forward
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.decoder.step_function import CHUNK, trace_decoder
from splitup_deploy.frontends.families import block_diffusion, dense, hybrid, mixture_of_experts
from splitup_deploy.frontends.families.dense import Read
from splitup_deploy.frontends.source_model import Text
from splitup_deploy.frontends.tracing import TracedModel

ARCHITECTURES: Final[dict[str, Read]] = {
    **dense.ARCHITECTURES,
    **mixture_of_experts.ARCHITECTURES,
    **hybrid.ARCHITECTURES,
    **block_diffusion.ARCHITECTURES,
}


def make_text(
    config: DecoderConfig,
    tokenizer: Path | bytes,
    eos_ids: tuple[int, ...],
    chat: ChatInfo | None,
) -> Text:
    """Return the tokenizer, limits and chat template of a decoder."""
    is_recurrent = config.recurrent is not None
    return Text(
        tokenizer, eos_ids, config.vocab, config.context, is_recurrent, chat, config.diffusion
    )


def trace_language_model(
    config: DecoderConfig, weights: Weights, chunk: int | None = None
) -> TracedModel:
    """Trace a step of a decoder with the parts that its configuration asks for (``decoder``)."""
    blocks = config.diffusion
    if blocks is not None and chunk is None:
        chunk = max(blocks.block_size, min(CHUNK, config.context))
    if blocks is not None and chunk is not None and chunk < blocks.block_size:
        raise InvalidModel(
            f"the model writes blocks of {blocks.block_size} tokens, which do not fit a step of "
            f"{chunk} rows; give --chunk {blocks.block_size} or more"
        )
    mixer = recurrent_layers.choose_mixer(config, latent_attention.choose_mixer(config))
    return trace_decoder(config, weights, chunk, choose_feed_forward(config), mixer)
