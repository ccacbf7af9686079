"""Which reader takes a GGUF file."""

from __future__ import annotations

from pathlib import Path

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.gguf import encoder_file
from splitup_deploy.frontends.gguf.family_table import FAMILIES
from splitup_deploy.frontends.gguf.header import GgufFile
from splitup_deploy.frontends.gguf.model_file import (
    OpenGguf,
    load_decoder_gguf,
    open_decoder_gguf,
)
from splitup_deploy.frontends.gguf.parts import read_gguf_parts
from splitup_deploy.frontends.source_model import Sizes, SourceModel


def is_gguf_file(source: str) -> bool:
    """Say whether ``source`` is an existing file called *.gguf."""
    return source.endswith(".gguf") and Path(source).is_file()


def load_gguf(source: str, sizes: Sizes) -> SourceModel:
    """Trace a GGUF file; raises InvalidModel naming the file and what is not supported."""
    file = read_gguf_parts(Path(source))
    if file.metadata.get("general.architecture") == encoder_file.FAMILY:
        return encoder_file.load_encoder_gguf(file, sizes)
    return load_decoder_gguf(open_gguf(source, file, sizes), sizes)


def open_gguf(source: str, file: GgufFile, sizes: Sizes) -> OpenGguf:
    """Read the metadata of a decoder's file; raises InvalidModel for another model's."""
    family = file.metadata.get("general.architecture")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join((*FAMILIES, encoder_file.FAMILY))
        raise InvalidModel(f"'{source}' has the architecture {family!r:.40}; supported: {known}")
    return open_decoder_gguf(file, family, sizes)
