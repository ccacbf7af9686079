"""What a task costs before it runs: memory, arithmetic, price. Upper bounds, in integers.

Memory counts every buffer that ``splitup.graph.runtime`` allocates: weights, inputs, each state
twice (old and new), and every value that is written to memory. tinygrad's planner lets values
that do not live at the same time share memory, so a task needs at most this much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from splitup.codec import MAX_SAFE_INTEGER
from splitup.graph.ir import Graph, Node
from splitup.graph.rules import MOVEMENT, Value
from splitup.tensors import ITEM_BYTES, TensorSpec

BUFFER_ALIGNMENT: Final = 256  # tinygrad's planner places values at multiples of this
# One micro-USDC buys this much. A 5 TFLOP/s, 300 GB/s card rented at 0.20 USDC an hour does
# 90 GFLOP and 5 GB in that price; half of it is left to the owner.
FLOPS_PER_MICRO_USDC: Final = 50 * 10**9
BYTES_PER_MICRO_USDC: Final = 25 * 10**8


ROW_PADDING: Final = 16  # elements between rows whose number is a symbol


def get_stride(length: int) -> int:
    """Return how many elements apart rows of ``length`` elements stand where a symbol counts them.

    Were they without a gap, tinygrad would run over rows and elements in one loop of symbolic
    length, which it does not vectorise.
    """
    return length + ROW_PADDING if length > 1 else length


def measure_buffer(spec: Value | TensorSpec) -> int:
    """Return the memory that a value or a port takes at its largest."""
    if not spec.rows:
        return round_up(spec.nbytes)
    length = math.prod(spec.shape[1:])
    return round_up(spec.shape[0] * get_stride(length) * ITEM_BYTES[spec.dtype])


def round_up(nbytes: int) -> int:
    """Return the memory that a value of ``nbytes`` takes."""
    return -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def compute_weight_bytes(graph: Graph) -> int:
    """Return the bytes of all weights, each rounded up to its place in memory."""
    return sum(round_up(weight.spec.nbytes) for weight in graph.weights)


def compute_state_bytes(graph: Graph) -> int:
    """Return the bytes that one execution's state takes: old and new values."""
    return 2 * sum(round_up(state.nbytes) for state in graph.states)


def is_materialised(op: str) -> bool:
    """Say whether a node's value may be written to memory: tinygrad may store a REDUCE too."""
    return op in ("CONTIGUOUS", "REDUCE")


def compute_vram_bytes(graph: Graph, values: Sequence[Value]) -> int:
    """Return an upper bound of the device memory that the task takes with one execution."""
    updated = {update.node for update in graph.updates}  # already counted as state
    loads = find_loads(graph, values, compute_roles(graph))
    activations = sum(
        measure_buffer(value)
        for position, (node, value) in enumerate(zip(graph.nodes, values, strict=True))
        if is_materialised(node.op) and position not in updated and position not in loads
    )
    ports = sum(measure_buffer(spec) for spec in graph.inputs)
    return compute_weight_bytes(graph) + compute_state_bytes(graph) + ports + activations


def compute_flops(graph: Graph, values: Sequence[Value]) -> int:
    """Return the arithmetic operations of one step."""
    return min(sum(list_flops(graph, values, compute_roles(graph))), MAX_SAFE_INTEGER)


def list_flops(graph: Graph, values: Sequence[Value], roles: Sequence[str]) -> list[int]:
    """Return every node's arithmetic operations.

    A one-hot sum, the way in which graphs look something up, costs what it gives: the code
    generator turns it into a load.
    """
    return [
        math.prod(value.shape)
        if is_pick(node, roles) or node.op == "LOOKUP"
        else 0
        if roles[position]
        else value.operations
        for position, (node, value) in enumerate(zip(graph.nodes, values, strict=True))
    ]


def compute_roles(graph: Graph) -> list[str]:
    """Say what part of a one-hot sum each node is: const, iota, hit, picked, or "" for none."""
    roles: list[str] = []
    for node in graph.nodes:
        roles.append(_get_role(node.op, [roles[src] for src in node.srcs]))
    return roles


def is_pick(node: Node, roles: Sequence[str]) -> bool:
    """Say whether a node is a one-hot sum: it looks something up."""
    return node.op == "REDUCE" and roles[node.srcs[0]] == "picked"


def find_loads(graph: Graph, values: Sequence[Value], roles: Sequence[str]) -> frozenset[int]:
    """Return the one-hot sums that are never stored: they are loads inside of another reduction.

    That is so when only arithmetic on as many elements stands between the two, as where a row
    multiplies the weights of the expert that was selected for it.
    """
    consumers: dict[int, list[int]] = {}
    loads: list[int] = []
    for index, node in enumerate(graph.nodes):
        if is_pick(node, roles):
            loads.append(index)
        for src in node.srcs:
            consumers.setdefault(src, []).append(index)
    stored = {output.node for output in graph.outputs}
    fused = set()
    for load in loads:
        elements, pending = math.prod(values[load].shape), [load]
        while pending:
            index = pending.pop()
            readers = consumers.get(index, [])
            if len(readers) != 1 or index in stored:
                break
            reader = readers[0]
            if graph.nodes[reader].op == "REDUCE":
                continue
            if (
                math.prod(values[reader].shape) != elements
                or graph.nodes[reader].op == "CONTIGUOUS"
            ):
                break
            pending.append(reader)
        else:
            fused.add(load)
    return frozenset(fused)


def _get_role(op: str, sources: Sequence[str]) -> str:
    if op in ("CONST", "IOTA"):
        return op.lower()
    if op in MOVEMENT:
        return sources[0]
    if op in ("CMPEQ", "CMPNE") and ("iota" in sources or "hit" in sources):
        return "hit"
    if op == "WHERE" and sources[0] == "hit" and sources[2] == "const":
        return "picked"
    return ""


def compute_price_micro_usdc(flops: int, vram_bytes: int) -> int:
    """Return the price of one step: its arithmetic, and its memory read once. At least 1."""
    return 1 + flops // FLOPS_PER_MICRO_USDC + vram_bytes // BYTES_PER_MICRO_USDC
