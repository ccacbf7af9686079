"""The parts of which a static graph is put together: nodes, constants, weights, linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.onnx.onnx_graph import OnnxNode, OnnxTensor
from splitup_deploy.frontends.weight_sources import WeightSource

from splitup.core.tensors import get_numpy_dtype
from splitup_edge.static_step import StaticShape


@dataclass(frozen=True, slots=True)
class AsFloat32:
    """The bytes of a plain weight as float32, with a number added to every element."""

    source: WeightSource
    offset: float = 0.0

    def read(self) -> Iterator[bytes]:
        """Yield the bytes; holds the weight."""
        data, dtype = b"".join(self.source.read()), self.source.spec.dtype
        if dtype == "bfloat16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, get_numpy_dtype(dtype)).astype(np.float32)
        yield (values + np.float32(self.offset) if self.offset else values).tobytes()


class GraphBuilder:
    """A static step while it is described."""

    def __init__(self, config: DecoderConfig, weights: Weights, shape: StaticShape) -> None:
        self.config, self.weights, self.shape = config, weights, shape
        self.epsilon = float(np.float32(config.norm_epsilon))  # as a file holds it
        self.nodes: list[OnnxNode] = []
        self.tensors: dict[str, OnnxTensor] = {}

    def add(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its result."""
        result = name or f"{op.lower()}.{len(self.nodes)}"
        self.nodes.append(OnnxNode(op, "", result, inputs, (result,), attributes))
        return result

    def numbers(self, *values: int) -> str:
        """Return the name of a list of integers, as Reshape and Slice take it."""
        name = "int." + ".".join(map(str, values))
        data = np.array(values, np.int64).tobytes()
        self.tensors.setdefault(name, OnnxTensor(name, "int64", (len(values),), data))
        return name

    def scalar(self, value: float) -> str:
        name = f"float.{value!r}"
        data = np.float32(value).tobytes()
        self.tensors.setdefault(name, OnnxTensor(name, "float32", (), data))
        return name

    def hold(self, source: WeightSource, offset: float = 0.0) -> str:
        """Return the name of a weight."""
        spec = source.spec
        data = AsFloat32(source, offset)
        self.tensors.setdefault(spec.name, OnnxTensor(spec.name, "float32", spec.shape, data))
        return spec.name

    def reshape(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, self.numbers(*shape))

    def cut(self, x: str, axis: int, start: int, end: int) -> str:
        """Return the elements ``start`` to ``end`` of an axis."""
        return self.add("Slice", x, *(self.numbers(number) for number in (start, end, axis)))

    def scale(self, x: str, factor: float) -> str:
        return x if factor == 1.0 else self.add("Mul", x, self.scalar(factor))

    def project(self, x: str, name: str, rows: int, inner: int, bias: bool) -> str:
        operands = [self.hold(self.weights.get(f"{name}.weight", rows, inner))]
        if bias:
            operands.append(self.hold(self.weights.get(f"{name}.bias", rows)))
        return self.add("Gemm", x, *operands, transB=1)

    def project_parts(
        self, x: str, prefix: str, joined: str, parts: Sequence[tuple[str, int]], bias: bool
    ) -> list[str]:
        """Return the products with several layers (name, outputs), which a file may have as one."""
        if not self.config.fused:
            inner = self.config.hidden
            return [self.project(x, f"{prefix}.{n}", rows, inner, bias) for n, rows in parts]
        total = sum(rows for _, rows in parts)
        x = self.project(x, f"{prefix}.{joined}", total, self.config.hidden, bias)
        ends = np.cumsum([rows for _, rows in parts]).tolist()
        return [self.cut(x, 1, end - rows, end) for end, (_, rows) in zip(ends, parts, strict=True)]

    def compute_gated_mlp(self, h: str, prefix: str, inner: int) -> str:
        """Return the gated MLP of h [block, hidden] whose weights are called ``prefix``.*_proj."""
        c = self.config
        parts = [(f"{kind}_proj", inner) for kind in ("gate", "up")]
        gate, up = self.project_parts(h, prefix, "gate_up_proj", parts, c.mlp_bias)
        name = f"{prefix}.down_proj"
        return self.project(self.activate(gate, up), name, c.hidden, inner, c.mlp_bias)

    def activate(self, gate: str, up: str) -> str:
        """Return the activation of ``gate``, times ``up``."""
        inner = gate
        if (
            self.config.activation == "gelu-tanh"
        ):  # 0.5 (1 + tanh(u)) = sigmoid(2u); arXiv 1606.08415
            cubic = self.scale(self.add("Mul", gate, gate), 0.044715)
            inner = self.add("Mul", gate, self.add("Add", cubic, self.scalar(1.0)))
            inner = self.scale(inner, 2.0 * math.sqrt(2.0 / math.pi))
        return self.add("Mul", self.add("Mul", gate, self.add("Sigmoid", inner)), up)
