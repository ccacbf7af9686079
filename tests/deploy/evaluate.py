"""Computes a graph in numpy, node by node: slow, small, and nothing of the runtime's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from splitup.graph.ir import Graph, decode_float
from splitup.graph.rules import FLOATS

_BINARY: dict[str, Any] = {
    "ADD": np.add,
    "MUL": np.multiply,
    "MAX": np.maximum,
    "CMPLT": np.less,
    "CMPEQ": np.equal,
    "AND": np.bitwise_and,
}


def evaluate(
    graph: Graph, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """Return the value of every node."""
    values: list[Any] = []
    for node in graph.nodes:
        source = [values[src] for src in node.srcs]
        arg: Any = node.arg
        if node.op == "INPUT":
            value = inputs[graph.inputs[arg].name]
        elif node.op == "WEIGHT":
            value = weights[graph.weights[arg].name]
        elif node.op == "IOTA":
            value = np.arange(arg, dtype=np.int32)
        elif node.op == "CONST":
            number = decode_float(arg) if node.dtype in FLOATS else int(arg)
            value = np.array(number, node.dtype)
        elif node.op == "RESHAPE":
            value = source[0].reshape(arg)
        elif node.op == "EXPAND":
            value = np.broadcast_to(source[0], (*arg, *source[0].shape))
        elif node.op == "PERMUTE":
            value = source[0].transpose(arg)
        elif node.op == "SHRINK":
            value = source[0][tuple(slice(start, start + size) for start, size in arg)]
        elif node.op == "PAD":
            value = np.zeros([size for _, size in arg], source[0].dtype)
            place = zip(arg, source[0].shape, strict=True)
            value[tuple(slice(start, start + size) for (start, _), size in place)] = source[0]
        elif node.op == "FLIP":
            value = np.flip(source[0], [axis for axis, flipped in enumerate(arg) if flipped])
        elif node.op == "STACK":
            value = np.stack(source)
        elif node.op == "REDUCE":
            reduce = {"ADD": np.add, "MUL": np.multiply, "MAX": np.maximum}[arg[0]].reduce
            value = reduce(source[0], axis=tuple(range(arg[1])))
        elif node.op == "WHERE":
            value = np.where(*source)
        elif node.op == "CONTIGUOUS":
            value = source[0]
        else:
            value = _BINARY[node.op](*source)
        values.append(value)
    return values
