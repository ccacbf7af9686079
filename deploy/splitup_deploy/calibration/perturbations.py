"""Small perturbations of a task: what a node might change in it to compute less.

Each keeps the task's ports, so that its outputs can be compared with the correct ones. Each is the
smallest change of its kind: numbers are rounded to the nearest, by one step of precision or of
quantisation, and one branch is left out where several could be. ``list_noises`` changes a task in
no such way: only each rounding errs by one unit more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.arrays import decode_array, encode_array, round_array
from splitup.graph.dtypes import FLOATS
from splitup.graph.ir import Graph, Node
from splitup.graph.noise import add_noise
from splitup.graph.operations.spec import Value
from splitup.graph.rules import CheckedGraph, check_graph
from splitup_deploy.cutting.passes import replace_nodes

MAX_SKIPS: Final = 4  # branches left out, one at a time; more blocks have the same branches
NOISES: Final = 4  # times that a task is computed with noise
_LOWER: Final = {"float64": "float32", "float32": "float16", "float16": "bfloat16"}

Weights = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Perturbation:
    """A changed task; before step ``forget_at`` its state is cleared."""

    name: str
    graph: Graph
    weights: Weights
    forget_at: int | None = None


def list_perturbations(graph: Graph, weights: Weights, steps: int) -> Iterator[Perturbation]:
    """Yield the perturbations that change anything; ``weights`` are the task's, by name."""
    yield from _list_weight_perturbations(graph, weights)
    checked = check_graph(graph)
    lowered = round_activations(checked)
    if lowered != graph:
        yield Perturbation("activations in lower precision", lowered, weights)
    for count, skipped in enumerate(iter_skips(checked)):
        if count == MAX_SKIPS:
            break
        yield Perturbation("a skipped layer", skipped, weights)
    if graph.states:
        yield Perturbation("half the context forgotten", graph, weights, forget_at=steps // 2)


def list_noises(graph: CheckedGraph, weights: Weights) -> Iterator[Perturbation]:
    """Yield the task with noise in every rounding; nothing if it becomes larger than tasks may."""
    for seed in range(NOISES):
        try:
            noisy, keys = add_noise(graph, f"calibrate {seed}")
        except InvalidModel:
            return  # members cannot compute it either
        yield Perturbation(f"noise {seed + 1}", noisy, {**weights, **keys})


def _list_weight_perturbations(graph: Graph, weights: Weights) -> Iterator[Perturbation]:
    kinds: tuple[tuple[str, Callable[[str, tuple[int, ...], bytes], bytes]], ...] = (
        ("weights in lower precision", _lower),
        ("weights in 8 bits", _quantise),
        ("weights one quantisation level down", _requantise),
    )
    for name, change in kinds:
        changed = {w.name: change(w.dtype, w.shape, weights[w.name]) for w in graph.weights}
        if changed != dict(weights):
            yield Perturbation(name, rename_weights(graph, changed), changed)


def rename_weights(graph: Graph, weights: Weights) -> Graph:
    """Return the graph with the digests of other weights."""
    table = tuple(
        replace(w, digest=hashlib.sha256(weights[w.name]).hexdigest()) for w in graph.weights
    )
    return replace(graph, weights=table)


def _lower(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    if dtype not in _LOWER:
        return data
    array = _decode(dtype, data)
    with np.errstate(over="ignore"):
        return encode_array(dtype, round_array(dtype, round_array(_LOWER[dtype], array)))


def _quantise(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Round every row to 255 steps of its largest magnitude; vectors are small and stay."""
    if dtype not in FLOATS or len(shape) < 2:
        return data
    rows = _decode(dtype, data).astype(np.float64).reshape(-1, shape[-1])
    scale = np.abs(rows).max(axis=1, keepdims=True) / 127.0
    scale[scale == 0.0] = 1.0
    return encode_array(dtype, round_array(dtype, np.rint(rows / scale) * scale))


def _decode(dtype: str, data: bytes) -> np.ndarray[Any, Any]:
    return decode_array(TensorSpec("", dtype, (len(data) // ITEM_BYTES[dtype],)), data)


def _make_nibble_table() -> np.ndarray[Any, Any]:
    """Return for every byte the one whose two halves are rounded to even numbers, as often up."""
    half = [min(14, n + (1 if n & 2 else -1)) if n & 1 else n for n in range(16)]
    return np.array([half[n & 15] | half[n >> 4] << 4 for n in range(256)], dtype=np.uint8)


def _make_byte_table() -> np.ndarray[Any, Any]:
    """Return for every int8, as uint8, the nearest multiple of four."""
    numbers = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64)
    result = np.clip(np.rint(numbers / 4) * 4, -128, 124).astype(np.int8)
    return np.asarray(result.view(np.uint8))


# Bytes per block of the encodings in splitup_deploy.frontends.decoder.quantised -> where its
# numbers are, and how they lose a level: Q8 becomes 6 bits, Q6 5, Q5 4, Q4 3. The blocks that are
# no GGUF's are those of 32, 64 or 128 elements that published models have.
_BLOCKS: Final = {
    17: (1, 17, _make_nibble_table()),
    18: (2, 18, _make_nibble_table()),
    19: (3, 19, _make_nibble_table()),
    20: (4, 20, _make_nibble_table()),
    22: (6, 22, _make_nibble_table()),
    24: (8, 24, _make_nibble_table()),
    34: (2, 34, _make_byte_table()),
    35: (3, 35, _make_nibble_table()),
    66: (2, 66, _make_nibble_table()),
    67: (3, 67, _make_nibble_table()),
    84: (16, 80, _make_nibble_table()),
    110: (32, 96, _make_nibble_table()),
    130: (2, 130, _make_byte_table()),
    132: (4, 132, _make_byte_table()),
    136: (8, 136, _make_nibble_table()),
    144: (16, 144, _make_nibble_table()),
    176: (48, 176, _make_nibble_table()),
    210: (0, 128, _make_nibble_table()),
}


def _requantise(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    if dtype != "uint8" or len(shape) != 3 or shape[2] not in _BLOCKS:
        return data
    start, end, table = _BLOCKS[shape[2]]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, shape[2]).copy()
    blocks[:, start:end] = table[blocks[:, start:end]]
    return blocks.tobytes()


# ---- graphs ------------------------------------------------------------------------------------


class _Copy:
    """Builds a changed copy of a graph, node by node."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.nodes: list[Node] = []
        self.moved: dict[int, int] = {}

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def copy(self, index: int) -> None:
        node = self._graph.nodes[index]
        moved = tuple(self.moved[src] for src in node.srcs)
        self.moved[index] = self.add(replace(node, srcs=moved))

    def finish(self) -> Graph:
        return replace_nodes(self._graph, self.nodes, self.moved)


def round_activations(graph: CheckedGraph) -> Graph:
    """Return the graph with every float value in memory rounded to the next lower precision."""
    copy = _Copy(graph)
    for index, node in enumerate(graph.nodes):
        if node.op == "CONTIGUOUS" and node.dtype in _LOWER:
            source = copy.moved[node.srcs[0]]
            low = copy.add(Node("CAST", _LOWER[node.dtype], (source,)))
            # in memory, because tinygrad removes a cast that is cast back at once
            kept = copy.add(Node("CONTIGUOUS", _LOWER[node.dtype], (low,)))
            back = copy.add(Node("CAST", node.dtype, (kept,)))
            copy.moved[index] = copy.add(Node("CONTIGUOUS", node.dtype, (back,)))
        else:
            copy.copy(index)
    return copy.finish()


def iter_skips(graph: CheckedGraph) -> Iterator[Graph]:
    """Yield the graph without one residual branch: of x + f(x) written to memory, only x.

    This is the smallest part of a layer that can be left out.
    """
    for index, node in enumerate(graph.nodes):
        if node.op != "CONTIGUOUS" or node.dtype not in FLOATS:
            continue
        kept = _find_residual(graph, index)
        if kept is None:
            continue
        copy = _Copy(graph)
        for place in range(len(graph.nodes)):
            if place == index:
                dims = graph.values[index].dims
                flat = copy.add(Node("RESHAPE", node.dtype, (copy.moved[kept],), dims))
                copy.moved[index] = copy.add(Node("CONTIGUOUS", node.dtype, (flat,)))
            else:
                copy.copy(place)
        yield _prune(copy.finish())


def _find_residual(graph: CheckedGraph, index: int) -> int | None:
    """Return the value in memory that is added to the rest in a value, None when it is no sum."""
    place = _skip_reshapes(graph, graph.nodes[index].srcs[0])
    if graph.nodes[place].op != "ADD":
        return None
    elements, symbols = math.prod(graph.values[index].shape), _list_symbols(graph.values[index])
    for source in graph.nodes[place].srcs:
        found = _skip_reshapes(graph, source)
        if graph.nodes[found].op not in ("CONTIGUOUS", "INPUT"):
            continue
        if (
            math.prod(graph.values[found].shape) == elements > 1
            and _list_symbols(graph.values[found]) == symbols
        ):
            return found
    return None


def _list_symbols(value: Value) -> list[str]:
    return [dim for dim in value.dims if isinstance(dim, str)]


def _skip_reshapes(graph: Graph, index: int) -> int:
    while graph.nodes[index].op == "RESHAPE":
        index = graph.nodes[index].srcs[0]
    return index


def _prune(graph: Graph) -> Graph:
    """Return the graph without nodes that nothing uses; inputs and weights stay in their tables."""
    used = {output.node for output in graph.outputs} | {u.node for u in graph.updates}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if index in used:
            used.update(graph.nodes[index].srcs)
    copy = _Copy(graph)
    for index in sorted(used):
        copy.copy(index)
    return copy.finish()
