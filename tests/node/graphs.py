"""Tiny tasks for tests of the node: an accumulator (state), and a two-input sum (no state)."""

from __future__ import annotations

from splitup.graph.ir import Graph, Node, Output, Update
from splitup.tensors import TensorSpec


def make_accumulator(size: int = 4) -> Graph:
    """Return y = x + s, s' = y over float32 vectors: step n gives the sum of all inputs so far."""
    return Graph(
        inputs=(TensorSpec("x", "float32", (size,)),),
        weights=(),
        states=(TensorSpec("s", "float32", (size,)),),
        nodes=(
            Node("INPUT", "float32", (), 0),
            Node("STATE", "float32", (), 0),
            Node("ADD", "float32", (0, 1)),
            Node("CONTIGUOUS", "float32", (2,)),
        ),
        outputs=(Output("y", 3),),
        updates=(Update(0, 3),),
    )


def make_sum(size: int = 4) -> Graph:
    """Return z = x + y over float32 vectors."""
    return Graph(
        inputs=(TensorSpec("x", "float32", (size,)), TensorSpec("y", "float32", (size,))),
        weights=(),
        states=(),
        nodes=(
            Node("INPUT", "float32", (), 0),
            Node("INPUT", "float32", (), 1),
            Node("ADD", "float32", (0, 1)),
            Node("CONTIGUOUS", "float32", (2,)),
        ),
        outputs=(Output("z", 3),),
        updates=(),
    )
