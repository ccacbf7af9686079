"""An ONNX graph as plain data: nodes, tensors, ports."""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitup.core.tensors import ITEM_BYTES
from splitup_deploy.frontends.weight_sources import FilePart


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A constant; ``data`` has exactly the little-endian bytes of dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: FilePart | bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self) -> bytes:
        """Return the bytes; for small tensors."""
        return self.data if isinstance(self.data, bytes) else b"".join(self.data.read())


@dataclass(frozen=True, slots=True)
class OnnxPort:
    """An input or output. A dimension is a number, a symbol's name, or None when it is absent.

    ``dtype`` is None when the file does not say it.
    """

    name: str
    dtype: str | None
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One operation. Graphs among the attributes are those of If, Loop and Scan."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, object]

    @property
    def title(self) -> str:
        """Return its name, or its first output's: files need not name nodes."""
        return self.name or next(filter(None, self.outputs), "")

    def __str__(self) -> str:
        return f"node '{self.title:.80}' ({self.op:.40})"


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """Nodes in order, each after those it reads from."""

    nodes: tuple[OnnxNode, ...]
    tensors: dict[str, OnnxTensor]
    inputs: tuple[OnnxPort, ...]
    outputs: tuple[OnnxPort, ...]


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A graph and the version of the operations of each domain ("" is ONNX's own)."""

    graph: OnnxGraph
    opsets: dict[str, int]
