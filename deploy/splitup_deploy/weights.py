"""Where a weight's bytes come from, read in chunks so that memory does not grow with the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.errors import InvalidModel
from splitup.graph.ir import Weight
from splitup.tensors import TensorSpec, encode_safetensors_header

CHUNK_BYTES: Final = 4 * 1024 * 1024  # large enough for full disk speed, small beside any model


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Bytes ``start`` to ``end`` of a file."""

    path: Path
    start: int
    end: int

    def read(self) -> Iterator[bytes]:
        """Yield the bytes in chunks; raises InvalidModel when the file has become shorter."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                left = self.end - self.start
                while left:
                    chunk = file.read(min(left, CHUNK_BYTES))
                    if not chunk:
                        raise InvalidModel(
                            f"weights file '{self.path}' ended early: it changed while it was read"
                        )
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise InvalidModel(f"cannot read '{self.path}': {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A weight and its bytes: the concatenation of ``parts`` (along the first axis)."""

    spec: TensorSpec
    parts: tuple[FileSlice | bytes, ...]

    def read(self) -> Iterator[bytes]:
        """Yield the little-endian bytes in chunks."""
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
            else:
                yield from part.read()

    def compute_weight(self) -> Weight:
        """Read the bytes once and return the weight with its digest."""
        digest = hashlib.sha256()
        for chunk in self.read():
            digest.update(chunk)
        return Weight(self.spec.name, self.spec.dtype, self.spec.shape, digest.hexdigest())


def read_safetensors(sources: Sequence[WeightSource]) -> Iterator[bytes]:
    """Yield a safetensors file with these weights in this order."""
    yield encode_safetensors_header([source.spec for source in sources])
    for source in sources:
        yield from source.read()
