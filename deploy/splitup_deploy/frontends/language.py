"""Decoders of every family: how their configurations are read, and which parts they consist of."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from splitup_deploy.frontends import families, hybrids, latent, moefamilies, recurrent
from splitup_deploy.frontends.decoder import DecoderConfig, Weights, trace_decoder
from splitup_deploy.frontends.families import Read
from splitup_deploy.frontends.model import Text
from splitup_deploy.frontends.moe import choose_feed_forward
from splitup_deploy.trace import TracedModel

ARCHITECTURES: Final[dict[str, Read]] = {
    **families.ARCHITECTURES,
    **moefamilies.ARCHITECTURES,
    **hybrids.ARCHITECTURES,
}


def make_text(config: DecoderConfig, tokenizer: Path | bytes, eos_ids: tuple[int, ...]) -> Text:
    """Return how to talk to a decoder."""
    is_recurrent = config.recurrent is not None
    return Text(tokenizer, eos_ids, config.vocab, config.context, is_recurrent)


def trace_language_model(
    config: DecoderConfig, weights: Weights, chunk: int | None = None
) -> TracedModel:
    """Trace a step of a decoder with the parts that its configuration asks for (``decoder``)."""
    mixer = recurrent.choose_mixer(config, latent.choose_mixer(config))
    return trace_decoder(config, weights, chunk, choose_feed_forward(config), mixer)
