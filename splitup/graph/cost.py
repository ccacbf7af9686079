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
from splitup.graph.ir import Graph
from splitup.graph.rules import MOVEMENT, Value

BUFFER_ALIGNMENT: Final = 256  # tinygrad's planner places values at multiples of this
# One micro-USDC buys this much. A 5 TFLOP/s, 300 GB/s card rented at 0.20 USDC an hour does
# 90 GFLOP and 5 GB in that price; half of it is left to the owner.
FLOPS_PER_MICRO_USDC: Final = 50 * 10**9
BYTES_PER_MICRO_USDC: Final = 25 * 10**8


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
    activations = sum(
        round_up(value.nbytes)
        for position, (node, value) in enumerate(zip(graph.nodes, values, strict=True))
        if is_materialised(node.op) and position not in updated
    )
    ports = sum(round_up(spec.nbytes) for spec in graph.inputs)
    return compute_weight_bytes(graph) + compute_state_bytes(graph) + ports + activations


def compute_flops(graph: Graph, values: Sequence[Value]) -> int:
    """Return the arithmetic operations of one step.

    A one-hot sum, the way in which graphs look something up, costs what it gives: the code
    generator turns it into a load.
    """
    roles: list[str] = []
    total = 0
    for node, value in zip(graph.nodes, values, strict=True):
        sources = [roles[src] for src in node.srcs]
        role = _get_role(node.op, sources)
        if node.op == "REDUCE" and sources[0] == "picked":
            total += math.prod(value.shape)
        elif not role:
            total += value.operations
        roles.append(role)
    return min(total, MAX_SAFE_INTEGER)


def _get_role(op: str, sources: Sequence[str]) -> str:
    """Say what part of a one-hot sum a node is: const, iota, hit, picked, or "" for none."""
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
