"""What a task costs: memory, arithmetic operations and price, predicted as integers.

Memory is that of every buffer that ``splitup.backend.runtime`` allocates: weights, inputs, each
state twice (old and new), and the arena that all other values share (``splitup.graph.memory``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from splitup.core.codec import MAX_SAFE_INTEGER, compute_digest
from splitup.core.errors import InvalidModel
from splitup.graph.ir import Graph, Node
from splitup.graph.memory import (
    find_live_ranges,
    measure_buffer,
    place_buffers,
    round_up,
)
from splitup.graph.operations.table import MOVEMENT
from splitup.graph.rules import CheckedGraph

# One nano-USDC buys this much. A 5 TFLOP/s, 300 GB/s card rented at 0.20 USDC an hour does
# 90 MFLOP and 5 MB in that price; half of it is left to the owner.
FLOPS_PER_NANO_USDC: Final = 50 * 10**6
BYTES_PER_NANO_USDC: Final = 25 * 10**5


def compute_weight_bytes(graph: Graph) -> int:
    """Return the bytes of all weights, each rounded up to its place in memory."""
    return sum(round_up(weight.spec.nbytes) for weight in graph.weights)


def compute_state_bytes(graph: Graph) -> int:
    """Return the bytes that one execution's state takes: old and new values."""
    return 2 * sum(round_up(state.nbytes) for state in graph.states)


def compute_vram_bytes(graph: CheckedGraph) -> int:
    """Return the device memory that the task takes with one execution."""
    ports = sum(measure_buffer(spec) for spec in graph.inputs)
    _, shared = place_buffers(list(find_live_ranges(graph).values()))
    return compute_weight_bytes(graph) + compute_state_bytes(graph) + ports + shared


def check_memory(graph: CheckedGraph, declared_bytes: int | None, machine_bytes: int) -> None:
    """Raise InvalidModel when a task needs more memory than its manifest says or a machine has."""
    needed = compute_vram_bytes(graph)
    declared = needed if declared_bytes is None else declared_bytes
    for most, where in ((declared, "are declared for it"), (machine_bytes, "are in this machine")):
        if needed > most:
            task = compute_digest(graph.to_bytes())
            raise InvalidModel(
                f"task {task[:12]} needs {needed} bytes of memory for one execution; {most} {where}"
            )


def compute_flops(graph: CheckedGraph) -> int:
    """Return the arithmetic operations of one step."""
    return min(sum(list_flops(graph, compute_roles(graph))), MAX_SAFE_INTEGER)


def list_flops(graph: CheckedGraph, roles: Sequence[str]) -> list[int]:
    """Return every node's arithmetic operations.

    A sum over a one-hot mask, by which graphs look something up, costs one operation per element
    of its result: the code generator turns it into a load.
    """
    return [
        math.prod(value.shape)
        if is_pick(node, roles) or node.op == "LOOKUP"
        else 0
        if roles[position]
        else value.operations
        for position, (node, value) in enumerate(zip(graph.nodes, graph.values, strict=True))
    ]


def compute_roles(graph: Graph) -> list[str]:
    """Return which part of a one-hot sum each node is: const, iota, hit, picked, or "" for none."""
    roles: list[str] = []
    for node in graph.nodes:
        roles.append(_get_role(node.op, [roles[src] for src in node.srcs]))
    return roles


def is_pick(node: Node, roles: Sequence[str]) -> bool:
    """Return whether a node is a one-hot sum, which looks something up."""
    return node.op == "REDUCE" and roles[node.srcs[0]] == "picked"


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


def compute_price_nano_usdc(flops: int, vram_bytes: int) -> int:
    """Return the price of one step: its arithmetic, and its memory read once; rounded up."""
    work = flops * BYTES_PER_NANO_USDC + vram_bytes * FLOPS_PER_NANO_USDC
    return max(1, -(-work // (FLOPS_PER_NANO_USDC * BYTES_PER_NANO_USDC)))
