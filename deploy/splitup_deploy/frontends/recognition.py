"""Which front end reads a source, by its path alone: none is imported to find that out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

STATE_SUFFIXES: Final = (".pt", ".pth", ".bin", ".pkl")
WEIGHT_SUFFIXES: Final = (".safetensors", *STATE_SUFFIXES)
_SUFFIXES: Final = (*WEIGHT_SUFFIXES, ".index.json", ".gguf", ".onnx")
_REFERENCE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_without_weights(source: str) -> bool:
    """Say whether ``source`` is a config.json, under any name, or a directory with nothing else."""
    path = Path(source)
    if path.is_dir():
        names = [entry.name for entry in path.iterdir()]
        return "config.json" in names and not any(name.endswith(_SUFFIXES) for name in names)
    return path.suffix == ".json" and path.is_file()


def has_suffix(suffix: str, source: str) -> bool:
    """Say whether ``source`` is an existing file of that suffix."""
    return source.endswith(suffix) and Path(source).is_file()


def is_callable_reference(source: str) -> bool:
    """Say whether ``source`` has the form module:function."""
    return bool(_REFERENCE.fullmatch(source))
