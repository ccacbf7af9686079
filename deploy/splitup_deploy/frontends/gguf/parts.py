"""GGUF models in several files, ``NAME-00001-of-00003.gguf`` and so on.

The first holds the metadata, and often no tensor; the others hold tensors, and of metadata only
which part they are. Source: llama.cpp's gguf-split and the ``gguf`` package, which write them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.gguf.header import GgufFile, Metadata, read_gguf

_NAME: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def read_gguf_parts(path: Path) -> GgufFile:
    """Read the header of a file, and of the parts that follow if it is the first of several.

    Raises InvalidModel naming the file and what is wrong with it.
    """
    first = read_gguf(path)
    count = first.metadata.get(_COUNT, 1)
    if type(count) is not int or count in (0, 1):
        return first
    match = _NAME.fullmatch(path.name)
    if match is None or type(count) is not int or int(match[3]) != count:
        raise InvalidModel(
            f"'{path}' is one of {count!r:.40} parts: it must be called as llama-gguf-split calls "
            "them, NAME-00001-of-… with their number"
        )
    paths = [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]
    if path != paths[0]:
        raise InvalidModel(f"'{path}' is a later part of a model: give the first, '{paths[0]}'")
    tensors = dict(first.tensors)
    _check_metadata(first, 0, first.metadata)
    for number, other in enumerate(paths[1:], 1):
        part = read_gguf(other)
        _check_metadata(part, number, first.metadata)
        if twice := tensors.keys() & part.tensors.keys():
            raise InvalidModel(f"'{other}' has the tensor '{min(twice):.80}' of a part before it")
        tensors |= part.tensors
        if len(tensors) > limits.MAX_WEIGHTS:
            raise InvalidModel(
                f"'{path}' and its parts have more than {limits.MAX_WEIGHTS} tensors"
            )
    if first.metadata.get(_TENSORS, len(tensors)) != len(tensors):
        raise InvalidModel(
            f"'{path}' and its parts have {len(tensors)} tensors, not "
            f"{first.metadata[_TENSORS]!r:.40}: fetch them again"
        )
    return replace(first, tensors=tensors)


def _check_metadata(part: GgufFile, number: int, first: Metadata) -> None:
    """Raise InvalidModel unless a part has its own number, and what the first part says."""
    wanted = {**first, _NUMBER: number}
    for key, value in {_NUMBER: None, **part.metadata}.items():
        if wanted.get(key) != value:
            raise InvalidModel(
                f"'{part.path}' has {key:.80} = {value!r:.40}; as part {number + 1} of its model "
                f"it would have {wanted.get(key)!r:.40}"
            )
