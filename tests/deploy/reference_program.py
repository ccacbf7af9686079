"""A whole model computed in numpy: what a front end means, whatever kernels make of it.

Compiling a family's kernels takes ten times as long as computing its golden tokens so. Tests of
kernels compare them with this reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from safetensors.numpy import load
from splitup_deploy.cutting.build import prepare
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.frontends.tracing import TracedModel

from splitup.core.tensors import TensorSpec, bytes_to_array
from splitup.graph.arrays import Array, get_array_dtype
from splitup.graph.error_bound import compute_node
from splitup.graph.ir import Graph, bind_rows, count_rows, parse_graph
from splitup.graph.rules import CheckedGraph, check_graph


class ReferenceProgram:
    """A graph and its weights, in its order; ``run`` has the form of ``TaskProgram.run``."""

    def __init__(self, graph: Graph, weights: Sequence[Array]) -> None:
        checked = check_graph(graph)
        self._graph, self._weights = graph, list(weights)
        self._bound: dict[tuple[tuple[str, int], ...], CheckedGraph] = {}
        self.inputs: Sequence[TensorSpec] = checked.inputs

    def new_state(self) -> list[Array]:
        """Return the states before the first step."""
        return [np.zeros(spec.shape, get_array_dtype(spec.dtype)) for spec in self._graph.states]

    def run(self, state: list[Array], inputs: Sequence[bytes]) -> list[bytes]:
        """Return the outputs of a step; the state changes."""
        graph = self._bind(count_rows(self._graph.inputs, inputs))
        arrays = [bytes_to_array(s, data) for s, data in zip(graph.inputs, inputs, strict=True)]
        given = {"INPUT": arrays, "WEIGHT": self._weights, "STATE": list(state)}
        values = {
            index: given[node.op][int(str(node.arg))]
            for index, node in enumerate(graph.nodes)
            if node.op in given
        }
        for index, node in enumerate(graph.nodes):
            if index not in values:
                values[index] = compute_node(node, [values[src] for src in node.srcs])
        for update in graph.updates:
            state[update.state] = values[update.node]
        return [values[output.node].tobytes() for output in graph.outputs]

    def _bind(self, rows: Mapping[str, int]) -> CheckedGraph:
        key = tuple(sorted(rows.items()))
        if key not in self._bound:
            self._bound[key] = check_graph(bind_rows(self._graph, rows))
        return self._bound[key]


def load_graph(model: str, sizes: Sizes | None = None) -> ReferenceProgram:
    """Trace a whole model; ``load_reference`` compiles it as well."""
    return make_reference(prepare(model, sizes).traced)


def make_reference(traced: TracedModel) -> ReferenceProgram:
    """Return the program of a traced model."""
    sources = [traced.weights[weight.name] for weight in traced.graph.weights]
    weights = [bytes_to_array(source.spec, b"".join(source.read())) for source in sources]
    return ReferenceProgram(traced.graph, weights)


def load_task(graph: bytes, weights: bytes | None) -> ReferenceProgram:
    """Return the program of a task's two files."""
    parsed, arrays = parse_graph(graph), load(weights) if weights else {}
    return ReferenceProgram(parsed, [arrays[weight.name] for weight in parsed.weights])
