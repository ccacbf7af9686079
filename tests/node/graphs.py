"""Tiny tasks for tests of the node: an accumulator (state), and a two-input sum (no state)."""

from __future__ import annotations

import numpy as np

from splitup.backend.devices.device_choice import get_common_class
from splitup.core import limits
from splitup.core.codec import compute_digest
from splitup.core.tensors import TensorSpec
from splitup.graph.ir import Graph, GraphOutput, Node, Update
from splitup.graph.self_test_vectors import make_inputs, make_vectors
from tests.graph.graphs import compute_graph

DETERMINISM = get_common_class()


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
        outputs=(GraphOutput("y", 3),),
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
        outputs=(GraphOutput("z", 3),),
        updates=(),
    )


def make_reference(graph: Graph, determinism: str = DETERMINISM) -> bytes:
    """Return the reference vectors of one of these tasks, whose only sums are exact."""
    outputs, state = [], np.zeros([spec.shape[0] for spec in graph.states], np.float32)
    for step in range(limits.VECTOR_STEPS):
        inputs = make_inputs(graph.inputs, 1, step)
        params = {("INPUT", i): np.frombuffer(data, np.float32) for i, data in enumerate(inputs)}
        values = compute_graph(graph, {**params, ("STATE", 0): state})
        state = values[graph.outputs[0].node]
        outputs.append([state.tobytes()])
    task_id, ports = compute_digest(graph.to_bytes()), [TensorSpec("y", "float32", state.shape)]
    return make_vectors(task_id, 1, determinism, outputs, ports).to_bytes()
