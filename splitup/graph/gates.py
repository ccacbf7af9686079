"""Gates: inputs whose zeros make all that a task gives zero, so that it need not be run.

An expert of a mixture has the gates of its slots as an input. In a step that chose none of its
experts, that input is zero, and the graph itself says that every output is zero then, whatever the
other inputs and the weights hold. So nobody sends these others, nobody runs the task, and by
definition they count as zeros of as many rows as the gate has: executor, validator and members
account for one and the same step.

What is proved is exact, bit by bit: with floats zero times something is no zero when that is
infinite, so a graph has to select (``WHERE(gate != 0, value, 0)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec, holds_zeros
from splitup.graph.ir import Graph, Node, decode_float, encode_float
from splitup.graph.rules import FLOATS, INTEGERS, MOVEMENT

# what every element of a value is known to be; None when nothing is known
_Known = int | float | None

_ZERO_FLOAT: Final = encode_float(0.0)  # and not minus zero, whose bytes are not zero
_KEEP_ZERO: Final = frozenset(
    {"PAD", "CAST", "BITCAST", "STACK", "REDUCE", "ADD", "MUL", "MAX", "OR"}
)


def compute_zero_step(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], gate: int, gate_bytes: int
) -> tuple[list[bytes], list[bytes]]:
    """Return what the inputs count as, and the outputs, of a step whose gate is zero.

    ``gate`` is the gate's place among the inputs, ``gate_bytes`` its length in this step.
    """
    rows = gate_bytes // inputs[gate].row_bytes

    def make(spec: TensorSpec) -> bytes:
        return bytes(spec.row_bytes * rows if spec.rows else spec.nbytes)

    return [make(spec) for spec in inputs], [make(spec) for spec in outputs]


def shut(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    gate: int | None,
    tensors: Sequence[bytes | memoryview],
) -> tuple[list[bytes], list[bytes]] | None:
    """Return ``compute_zero_step`` of a step whose gate is zero, None of one that is to be run."""
    if gate is None or not holds_zeros(tensors[gate]):
        return None
    return compute_zero_step(inputs, outputs, gate, len(tensors[gate]))


def check_gate(graph: Graph, gate: int | None) -> None:
    """Raise InvalidModel unless the graph proves that this input is a gate."""
    if gate is not None and not is_gate(graph, gate):
        raise InvalidModel(
            f"input {gate} is called the task's gate, and its zeros do not make the outputs zero"
        )


def find_gate(graph: Graph) -> int | None:
    """Return the first input that is a gate, None when none is."""
    return next((port for port in range(len(graph.inputs)) if is_gate(graph, port)), None)


def is_gate(graph: Graph, gate: int) -> bool:
    """Return whether every output is zero where input ``gate`` is. The graph has been checked.

    A task with state is always run. Rows have to be the gate's: nothing else says how many a step
    has. A gate fits a frame, so that its digest says at once whether it is zero.
    """
    if graph.states or not 0 <= gate < len(graph.inputs):
        return False
    if graph.inputs[gate].nbytes > limits.INLINE_TENSOR_BYTES:
        return False
    if {symbol.name for symbol in graph.symbols} - {graph.inputs[gate].rows}:
        return False
    known: list[_Known] = []
    for node in graph.nodes:
        known.append(_find(node, [known[src] for src in node.srcs], gate))
    return all(_is_zero(known[output.node]) for output in graph.outputs)


def _is_zero(value: _Known) -> bool:
    return value == 0 and value is not None


def _find(node: Node, sources: list[_Known], gate: int) -> _Known:
    """Return what a node's elements are, each of them, when the gate's are zero."""
    op, dtype = node.op, node.dtype
    if op == "INPUT":
        return 0 if node.arg == gate else None
    if op == "CONST":
        return _read_constant(str(node.arg), dtype)
    if op == "WHERE":
        condition, chosen, other = sources
        if condition is None:
            return 0 if _is_zero(chosen) and _is_zero(other) else None
        return other if _is_zero(condition) else chosen
    if op in ("CMPNE", "CMPEQ", "CMPLT"):
        return _compare(op, sources)
    if op == "LOOKUP":
        return 0 if _is_zero(sources[0]) else None
    if op in ("MUL", "AND") and (dtype in INTEGERS or dtype == "bool"):
        return 0 if any(map(_is_zero, sources)) else None
    if op == "CONTIGUOUS" or op in MOVEMENT - {"PAD"}:
        return sources[0]
    if op in _KEEP_ZERO:
        return 0 if all(map(_is_zero, sources)) else None
    return None


def _read_constant(text: str, dtype: str) -> _Known:
    if dtype not in FLOATS:
        return int(text)
    value = decode_float(text)
    # a minus zero compares as zero and is not zero bytes: nothing is known of it
    return None if value == 0 and text != _ZERO_FLOAT else value


def _compare(op: str, sources: list[_Known]) -> _Known:
    left, right = sources
    if left is None or right is None:
        return None
    found = {"CMPNE": left != right, "CMPEQ": left == right, "CMPLT": left < right}
    return int(found[op])
