"""Experts in a static graph: all are computed, and the gates of those not chosen are zero.

A graph without addresses cannot look up the chosen experts. The experts of a layer are one wide MLP
whose inner activations are multiplied by the gates, so a step costs what all of them cost, and
three products a layer hold them. The choice is ``splitup_deploy.frontends.decoder.expert_layers``':
an expert's rank is the number of those with a greater score, or an equal one and a lower number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from splitup_deploy.frontends.decoder.decoder_config import Experts, Shared
from splitup_deploy.frontends.decoder.expert_layers import MIN_SCORES
from splitup_deploy.frontends.onnx.onnx_graph import OnnxTensor
from splitup_deploy.frontends.weight_sources import FilePart, WeightSource

from splitup_edge.export.graph_builder import GraphBuilder

ROUTER: Final = "router."  # begins the names of products that choose experts: they stay floats


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Float32 matrices [count, out, inner] as one of [out, count * inner]."""

    source: FilePart
    shape: tuple[int, int, int]

    def read(self) -> Iterator[bytes]:
        """Yield the bytes; holds the matrices."""
        values = np.frombuffer(b"".join(self.source.read()), np.float32).reshape(self.shape)
        yield values.transpose(1, 0, 2).tobytes()


def are_plain(experts: Experts) -> bool:
    """Return whether ``compute_experts`` knows this form of experts."""
    router = experts.router
    return (
        len(experts.names) == 3
        and not (experts.biased or experts.gated_input or router.linear_bias)
        and router.scoring != "mixer"
    )


def compute_experts(graph: GraphBuilder, h: str, layer: int, experts: Experts) -> str:
    """Return the gated sum of the experts' MLPs of h [block, hidden], and the shared experts'."""
    block, hidden = graph.shape.block, graph.config.hidden
    count, inner = experts.count, experts.intermediate
    prefix = f"model.layers.{layer}.{experts.prefix}"
    gates = _route(graph, h, f"{prefix}.{experts.router.name}", layer, experts)
    first, second, last = (
        [f"{prefix}.experts.{expert}.{name}.weight" for expert in range(count)]
        for name in experts.names
    )
    wide = [
        graph.add("Gemm", h, graph.hold(_join(graph, names, inner, hidden)), transB=1)
        for names in (first, second)
    ]
    active = graph.reshape(graph.activate(*wide), block, count, inner)
    active = graph.add("Mul", active, graph.reshape(gates, block, count, 1))
    active = graph.reshape(active, block, count * inner)
    table = graph.tensors[graph.hold(_join(graph, last, hidden, inner))]
    assert not isinstance(table.data, bytes)
    matrices = SideBySide(table.data, (count, hidden, inner))
    graph.tensors[table.name] = OnnxTensor(table.name, "float32", (hidden, count * inner), matrices)
    result = graph.add("Gemm", active, table.name, transB=1)
    if experts.shared is None:
        return result
    return graph.add("Add", result, _share(graph, h, layer, experts.shared))


def _join(graph: GraphBuilder, names: list[str], rows: int, inner: int) -> WeightSource:
    joined = names[0].replace(".experts.0.", ".experts.")
    parts = [(name, rows) for name in names]
    return graph.weights.join(joined, parts, len(names) * rows, inner)


def _share(graph: GraphBuilder, h: str, layer: int, shared: Shared) -> str:
    """Return what the shared experts give."""
    name = f"model.layers.{layer}.{shared.module}"
    result = graph.compute_gated_mlp(h, name, shared.intermediate)
    if shared.gated:
        gate = graph.project(h, f"{name}_gate", 1, graph.config.hidden, bias=False)
        result = graph.add("Mul", result, graph.add("Sigmoid", gate))
    return result


def _route(graph: GraphBuilder, h: str, name: str, layer: int, experts: Experts) -> str:
    """Return the gates of all experts, [block, count]: zero for those that are not chosen."""
    router, count = experts.router, experts.count
    weight = graph.hold(graph.weights.get(f"{name}.weight", count, graph.config.hidden))
    logits = graph.add("Gemm", h, weight, name=f"{ROUTER}{layer}", transB=1)
    is_softmax = router.scoring == "softmax"
    scores = graph.add("Softmax", logits, axis=-1) if is_softmax else graph.add("Sigmoid", logits)
    choice = scores
    if router.biased:
        bias = graph.hold(graph.weights.get(f"{name}.e_score_correction_bias", count))
        choice = graph.add("Add", scores, bias)
    gates = graph.add("Mul", scores, _choose(graph, choice, count, experts.active))
    if router.renormalised:
        total = graph.add("ReduceSum", gates, graph.numbers(1), keepdims=1)
        if not is_softmax:
            total = graph.add("Max", total, graph.scalar(MIN_SCORES))
        gates = graph.add("Div", gates, total)
    return graph.scale(gates, router.scale)


def _choose(graph: GraphBuilder, choice: str, count: int, active: int) -> str:
    """Return 1 for the ``active`` greatest of a row, 0 for the others: [block, count].

    A number is positive, zero or negative by its sign, without booleans.
    """
    block, zero = graph.shape.block, graph.scalar(0.0)
    order = np.tri(count, k=-1, dtype=np.float32)[None] / 2  # of equals, those before come first
    graph.tensors.setdefault(
        f"order.{count}", OnnxTensor(f"order.{count}", "float32", order.shape, order.tobytes())
    )
    one, other = graph.reshape(choice, block, count, 1), graph.reshape(choice, block, 1, count)
    sign = graph.add("Add", graph.add("Sign", graph.add("Sub", other, one)), f"order.{count}")
    before = graph.add("Max", graph.add("Sign", sign), zero)
    rank = graph.add("ReduceSum", before, graph.numbers(2), keepdims=0)
    room = graph.add("Sub", graph.scalar(active - 0.5), rank)
    return graph.add("Max", graph.add("Sign", room), zero)
