"""Small ONNX files, written field by field (onnx.proto), without the ``onnx`` package."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from splitup_deploy.frontends.onnx.graph_file import DTYPES as CODES
from splitup_edge.export import onnx_file
from splitup_edge.export.onnx_file import encode_number as number
from splitup_edge.export.onnx_file import encode_piece as piece

DTYPES = {name: code for code, name in CODES.items()}
Port = tuple[str, str | int, Sequence[int | str | None]]  # name, dtype, shape


def encode_tensor(name: str, array: np.ndarray) -> bytes:
    dims = b"".join(number(1, size) for size in array.shape)
    head = dims + number(2, DTYPES[array.dtype.name]) + piece(8, name)
    return head + piece(9, array.tobytes())


def encode_attribute(name: str, value: Any) -> bytes:
    """Return an attribute: what the product writes, or a graph, a tensor, a text or floats."""
    head = piece(1, name)
    if isinstance(value, Graph):
        return head + piece(6, value.encode()) + number(20, 5)
    if isinstance(value, np.ndarray):
        return head + piece(5, encode_tensor("", value)) + number(20, 4)
    if isinstance(value, str):
        return head + piece(4, value) + number(20, 3)
    if isinstance(value, float | int) or all(isinstance(item, int) for item in value):
        return onnx_file.encode_attribute(name, value)
    packed = b"".join(struct.pack("<f", item) for item in value)
    return head + piece(7, packed) + number(20, 6)


def encode_port(port: Port) -> bytes:
    name, dtype, shape = port
    dims = b""
    for size in shape:
        if isinstance(size, str):
            dims += piece(1, piece(2, size))
        else:
            dims += piece(1, b"" if size is None else number(1, size))
    code = DTYPES[dtype] if isinstance(dtype, str) else dtype
    return piece(1, name) + piece(2, piece(1, number(1, code) + piece(2, dims)))


@dataclass
class Graph:
    """A graph while it is put together."""

    inputs: Sequence[Port]
    outputs: Sequence[Port]
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    nodes: list[bytes] = field(default_factory=list)
    node_name: str = "the {}"  # of the operation

    def add(self, op: str, inputs: str, outputs: str, domain: str = "", **options: Any) -> Graph:
        """Add a node; names are separated by blanks, "-" is one left out."""
        data = b"".join(piece(1, "" if name == "-" else name) for name in inputs.split())
        data += b"".join(piece(2, "" if name == "-" else name) for name in outputs.split())
        data += piece(3, self.node_name.format(op)) + piece(4, op) + piece(7, domain)
        data += b"".join(piece(5, encode_attribute(*item)) for item in options.items())
        self.nodes.append(data)
        return self

    def encode(self) -> bytes:
        data = b"".join(piece(1, node) for node in self.nodes) + piece(2, "graph")
        data += b"".join(piece(5, encode_tensor(*item)) for item in self.tensors.items())
        data += b"".join(piece(11, encode_port(port)) for port in self.inputs)
        return data + b"".join(piece(12, encode_port(port)) for port in self.outputs)


def encode_model(graph: Graph | bytes, opset: int = 17) -> bytes:
    data = graph if isinstance(graph, bytes) else graph.encode()
    return number(1, 8) + piece(7, data) + piece(8, piece(1, "") + number(2, opset))


def save_onnx(path: Path, graph: Graph, opset: int = 17) -> str:
    """Write a model and return its path as the compiler takes it."""
    path.write_bytes(encode_model(graph, opset))
    return str(path)


def save_vision(path: Path, *, batch: int | str = 1) -> tuple[str, dict[str, np.ndarray]]:
    """Write a small residual network for pictures [batch, 3, 8, 8]; return its weights, too."""
    draw = np.random.default_rng(0).normal
    weights = {
        "stem.w": draw(0, 0.3, (4, 3, 3, 3)).astype(np.float32),
        "stem.b": draw(0, 0.3, 4).astype(np.float32),
        "scale": draw(1, 0.1, 4).astype(np.float32),
        "shift": draw(0, 0.1, 4).astype(np.float32),
        "mean": draw(0, 0.1, 4).astype(np.float32),
        "var": np.abs(draw(1, 0.1, 4)).astype(np.float32),
        "body.w": draw(0, 0.3, (4, 4, 3, 3)).astype(np.float32),
        "fc.w": draw(0, 0.3, (5, 16)).astype(np.float32),
        "fc.b": draw(0, 0.3, 5).astype(np.float32),
    }
    shape = {"flat": np.array([0, -1], np.int64)}
    graph = Graph(
        [("picture", "float32", (batch, 3, 8, 8))],
        [("classes", "float32", (batch, 5))],
        {**weights, **shape},
    )
    graph.add("Conv", "picture stem.w stem.b", "a", pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    graph.add("BatchNormalization", "a scale shift mean var", "b", epsilon=1e-5)
    graph.add("Relu", "b", "c").add("Conv", "c body.w", "d", pads=[1, 1, 1, 1])
    graph.add("Add", "c d", "e").add("Relu", "e", "f")
    graph.add("MaxPool", "f", "g", kernel_shape=[4, 4], strides=[4, 4])
    graph.add("Reshape", "g flat", "h").add("Gemm", "h fc.w fc.b", "i", transB=1)
    graph.add("Softmax", "i", "classes", axis=1)
    return save_onnx(path, graph), weights


def compute_vision(weights: Mapping[str, np.ndarray], picture: np.ndarray) -> np.ndarray:
    """Return what ``save_vision``'s model gives, in plain numpy."""

    def convolve(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        return np.einsum("bchwij,ocij->bohw", windows, w)

    def spread(name: str) -> np.ndarray:
        return weights[name][:, None, None]

    x = convolve(picture.astype(np.float64), weights["stem.w"]) + spread("stem.b")
    x = (x - spread("mean")) / np.sqrt(spread("var") + 1e-5) * spread("scale") + spread("shift")
    x = np.maximum(x, 0)
    x = np.maximum(x + convolve(x, weights["body.w"]), 0)
    x = x.reshape(len(x), 4, 2, 4, 2, 4).max((3, 5)).reshape(len(x), -1)
    x = x @ weights["fc.w"].T + weights["fc.b"]
    powers = np.exp(x - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)
