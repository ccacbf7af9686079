"""GGUF files: which reader takes one, and those of the families in ``gguf.family_table``.

The metadata are translated to a config.json of the same family, and the tokenizer to a
tokenizer.json.
"""

from __future__ import annotations

from pathlib import Path

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.families.architectures import (
    BORROWED,
    FURTHER,
    UNUSED_INDEXER,
    OpenDecoder,
    read_text,
)
from splitup_deploy.frontends.gguf import encoder_file
from splitup_deploy.frontends.gguf.config import choose_family, list_further_blocks, read_config
from splitup_deploy.frontends.gguf.family_table import FAMILIES
from splitup_deploy.frontends.gguf.header import GgufFile, read_gguf_parts
from splitup_deploy.frontends.gguf.model_file import GgufWeights
from splitup_deploy.frontends.gguf.tokenizer import find_end_tokens, make_tokenizer, read_chat
from splitup_deploy.frontends.source_model import Sizes, SourceModel


def load_gguf(source: str, sizes: Sizes) -> SourceModel:
    """Trace a GGUF file; raises InvalidModel naming the file and what is not supported."""
    file = read_gguf_parts(Path(source))
    family = file.metadata.get("general.architecture")
    if family in encoder_file.FAMILIES:
        return encoder_file.load_encoder_gguf(file, family, sizes)
    return open_gguf(source, file, sizes).trace(sizes)


def open_gguf(source: str, file: GgufFile, sizes: Sizes) -> OpenDecoder:
    """Read the metadata of a decoder's file; raises InvalidModel for another model's."""
    family = file.metadata.get("general.architecture")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join((*FAMILIES, *encoder_file.FAMILIES))
        raise InvalidModel(f"'{source}' has the architecture {family!r:.40}; supported: {known}")
    config = read_config(file, family, sizes.context)
    text, notes = read_text(
        config, sizes, lambda: _read_tokenizer(file, config.vocab), lambda: read_chat(file.metadata)
    )
    weights = GgufWeights(file, config, choose_family(file, family))
    others = dict.fromkeys(list_further_blocks(file, config), FURTHER)
    if config.latent is not None and config.latent.indexer is None:
        others |= {f"blk.{layer}.indexer.": UNUSED_INDEXER for layer in range(config.layers)}
    for layer in config.borrowed.layers if config.borrowed is not None else ():
        others |= {f"blk.{layer}.attn_{part}": BORROWED for part in ("k.", "v.", "k_norm.")}
    return OpenDecoder(config, weights, text, others, notes)


def _read_tokenizer(file: GgufFile, vocab: int) -> tuple[bytes, tuple[int, ...]]:
    """Return the tokenizer, and the tokens that end a text: named ones, and those known by name."""
    tokenizer = make_tokenizer(file.metadata, vocab)
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {file.metadata.get(f"tokenizer.ggml.{name}") for name in names} - {None}
    ids |= find_end_tokens(file.metadata)
    if not all(type(item) is int and 0 <= item < vocab for item in ids):
        raise InvalidModel(f"'{file.path}' ends texts with a token that does not exist")
    return tokenizer, tuple(sorted(item for item in ids if isinstance(item, int)))
