"""A static graph as a torch module, which ExecuTorch exports.

torch is in the extra ``edge`` and imported by nobody else. A product with a weight is an
``nn.Linear``, so that torchao can quantise it; everything else runs as the graph says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from splitup_deploy.frontends.onnx.onnx_graph import OnnxModel, OnnxNode
from torch import Tensor, nn
from torch.nn import functional

from splitup.core.errors import InvalidModel
from splitup_edge.export.static_experts import ROUTER

Attributes = Mapping[str, Any]
DTYPES: Final = {"float32": torch.float32, "float16": torch.float16}


class RmsNorm(nn.Module):  # type: ignore[misc]  # torch is not there for the checker
    """The RMS norm of the last axis, in float32: squares are beyond float16.

    The mean is a product with a row of 1/n, which every back end has; few have a mean.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        size = weight.shape[0]
        self.epsilon = epsilon
        self.register_buffer("weight", weight)
        self.register_buffer("share", torch.full((1, size), 1.0 / size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = functional.linear(wide * wide, self.get_buffer("share"))
        normal = wide / torch.sqrt(mean + self.epsilon)
        return (normal * self.get_buffer("weight")).to(x.dtype)


class TorchTable(nn.Module):  # type: ignore[misc]  # torch is not there for the checker
    """Rows that are looked up; with ``is_narrow`` stored as int8 with a factor for every row."""

    def __init__(self, values: Tensor, *, is_narrow: bool) -> None:
        super().__init__()
        factors = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127.0
        self.is_narrow = is_narrow
        rows = (values / factors).round().to(torch.int8) if is_narrow else values
        self.register_buffer("rows", rows)
        if is_narrow:
            self.register_buffer("factors", factors)

    def forward(self, index: Tensor) -> Tensor:
        rows = self.get_buffer("rows").index_select(0, index)
        if not self.is_narrow:
            return rows
        return rows.to(torch.float32) * self.get_buffer("factors").index_select(0, index)


class StaticModule(nn.Module):  # type: ignore[misc]  # torch is not there for the checker
    """The static step as a function of its inputs, in their order.

    ``held`` are weights that several modules share, by name. ``has_narrow_table``: the embedding's
    rows are int8.
    """

    def __init__(
        self,
        model: OnnxModel,
        dtype: str = "float32",
        held: dict[str, Tensor] | None = None,
        *,
        has_narrow_table: bool = False,
    ) -> None:
        super().__init__()
        self._tensors, self._dtype = model.graph.tensors, DTYPES[dtype]
        self._held = {} if held is None else held
        self._has_narrow_table = has_narrow_table
        self._inputs = [port.name for port in model.graph.inputs]
        self._outputs = [port.name for port in model.graph.outputs]
        self.parts = nn.ModuleList()
        self._constants: dict[str, str] = {}  # the buffers of weights that plain operations read
        self._calls = [self._prepare(node) for node in model.graph.nodes]
        scalars = (name for name, tensor in self._tensors.items() if not tensor.shape)
        self._scalars = {name: float(self._read(name)) for name in scalars}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[str, Any] = dict(zip(self._inputs, inputs, strict=True)) | self._scalars
        values |= {name: self.get_buffer(held) for name, held in self._constants.items()}
        for result, operands, compute in self._calls:
            given = [values[name] for name in operands]
            values[result] = (
                self.parts[compute](*given) if type(compute) is int else compute(*given)
            )
        return tuple(values[name] for name in self._outputs)

    def _prepare(self, node: OnnxNode) -> tuple[str, list[str], Any]:
        """Return a node's result, its operands that are computed, and a function or a part."""
        operands = [name for name in node.inputs if not self._is_held(name, node)]
        if node.op in PARTS:
            self.parts.append(self._make_part(node))
            return node.outputs[0], operands, len(self.parts) - 1
        if node.op not in OPERATIONS:
            raise InvalidModel(
                f"{node} is an operation that models for devices do not have; these are: "
                f"{', '.join(sorted((*OPERATIONS, *PARTS)))}"
            )
        lists = [
            np.frombuffer(self._tensors[name].read(), np.int64).tolist()
            for name in node.inputs
            if self._is_held(name, node)
        ]
        for name in operands:
            if name in self._tensors and self._tensors[name].shape and name not in self._constants:
                self._constants[name] = f"constant_{len(self._constants)}"
                self.register_buffer(self._constants[name], self._read(name))
        return node.outputs[0], operands, partial(OPERATIONS[node.op], node.attributes, *lists)

    def _is_held(self, name: str, node: OnnxNode) -> bool:
        """Say whether a node does not compute with an operand: a part's weight, or integers."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape == ():
            return False
        return node.op in PARTS or tensor.dtype == "int64"

    def _make_part(self, node: OnnxNode) -> nn.Module:
        first, *others = (self._read(name) for name in node.inputs if self._is_held(name, node))
        if node.op == "Gemm":
            part = nn.Linear(first.shape[1], first.shape[0], bias=bool(others), device="meta")
            part.weight = nn.Parameter(first, requires_grad=False)
            part.is_exact = node.outputs[0].startswith(ROUTER)
            if others:
                part.bias = nn.Parameter(others[0], requires_grad=False)
            return part
        if node.op == "Gather":
            is_angle = node.inputs[0].startswith("rope.")
            return TorchTable(first, is_narrow=self._has_narrow_table and not is_angle)
        return RmsNorm(first.float(), float(str(node.attributes["epsilon"])))

    def _read(self, name: str) -> Tensor:
        if name not in self._held:
            tensor = self._tensors[name]
            values = np.frombuffer(bytearray(tensor.read()), np.float32).reshape(tensor.shape)
            self._held[name] = torch.from_numpy(values).to(self._dtype)
        return self._held[name]


def cut(_: Attributes, start: list[int], end: list[int], axis: list[int], x: Tensor) -> Tensor:
    """Return the elements ``start`` to ``end`` of an axis."""
    return x.narrow(axis[0], start[0], end[0] - start[0])


PARTS: Final = ("Gather", "Gemm", "RMSNormalization")  # hold their weights
# What computes a node, from its attributes, its lists of integers, and its operands.
OPERATIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "Add": lambda _, x, y: x + y,
    "Concat": lambda options, *parts: torch.cat(parts, options["axis"]),
    "Div": lambda _, x, y: x / y,
    "MatMul": lambda _, x, y: torch.bmm(x, y),
    "Max": lambda _, x, least: x.clamp(min=least),
    "Mul": lambda _, x, y: x * y,
    "ReduceSum": lambda options, axes, x: x.sum(axes, keepdim=bool(options["keepdims"])),
    "Reshape": lambda _, shape, x: x.reshape(shape),
    "Sigmoid": lambda _, x: torch.sigmoid(x),
    "Sign": lambda _, x: torch.sign(x),
    "Slice": cut,
    "Softmax": lambda options, x: torch.softmax(x, options["axis"]),
    "Sub": lambda _, x, y: x - y,
    "Tanh": lambda _, x: torch.tanh(x),
    "Transpose": lambda options, x: x.permute(options["perm"]),
}
