"""Quantised weights as float32, which static graphs take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from tinygrad import Tensor

from splitup.backend.devices.device_choice import select_device
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.quantised import dequantise
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.weight_sources import StoredWeights, WeightSource

_PART_BYTES: Final = 1 << 20  # of blocks that become numbers at once


@dataclass(frozen=True, slots=True)
class Dequantised:
    """The float32 numbers of a weight in blocks."""

    source: WeightSource

    def read(self) -> Iterator[bytes]:
        """Yield the bytes; holds the blocks."""
        select_device()
        data, shape = b"".join(self.source.read()), self.source.spec.shape
        blocks = np.frombuffer(data, np.uint8).reshape(math.prod(shape[:-2]), *shape[-2:])
        count = max(1, _PART_BYTES // blocks[0].nbytes)
        for row in range(0, len(blocks), count):
            part = Tensor(blocks[row : row + count])
            yield dequantise(part, self.source.encoding).numpy().tobytes()


class FloatWeights(StoredWeights):
    """A model's weights; those in blocks as the float32 numbers that they stand for."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape."""
        source = self._weights.get(name, *shape)
        if source.encoding in ("", "bfloat16"):
            return source
        return WeightSource(TensorSpec(name, "float32", shape), (Dequantised(source),))

    def can_join(self, names: list[str]) -> bool:
        """Say whether these weights have the same storage format."""
        return self._weights.can_join(names)
