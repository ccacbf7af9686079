"""Gates: inputs that make all outputs of a task zero when they are zero, so it need not be run.

A task with experts of a mixture has the gates of its slots as an input. In a step that chose none
of its experts this input is zero, and the graph itself proves that every output is then zero,
whatever the other inputs and the weights are. So nobody sends the other inputs and nobody runs the
task. By definition they count as zeros, of as many rows as the gate has, so that executor,
validator and committee members account for the same step.

The proof is exact, bit by bit. With floats zero times infinity is not zero, so a graph has to
select: ``WHERE(gate != 0, value, 0)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec, holds_zeros

if TYPE_CHECKING:
    from splitup.graph.operations.spec import Known
    from splitup.graph.rules import CheckedGraph


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


def check_gate(graph: CheckedGraph, gate: int | None) -> None:
    """Raise InvalidModel unless the graph proves that this input is a gate."""
    if gate is not None and not is_gate(graph, gate):
        raise InvalidModel(
            f"input {gate} is called the task's gate, and its zeros do not make the outputs zero"
        )


def find_gate(graph: CheckedGraph) -> int | None:
    """Return the first input that is a gate, None when none is."""
    return next((port for port in range(len(graph.inputs)) if is_gate(graph, port)), None)


def is_gate(graph: CheckedGraph, gate: int) -> bool:
    """Return whether every output is zero where input ``gate`` is.

    A task with state is always run. Rows have to be the gate's: nothing else says how many a step
    has. A gate fits a frame, so that its digest says at once whether it is zero.
    """
    # a daemon, which only counts zeros, does without the operations
    from splitup.graph.operations.known_values import is_zero
    from splitup.graph.operations.table import OPERATIONS

    if graph.states or not 0 <= gate < len(graph.inputs):
        return False
    if graph.inputs[gate].nbytes > limits.INLINE_TENSOR_BYTES:
        return False
    if {symbol.name for symbol in graph.symbols} - {graph.inputs[gate].rows}:
        return False
    known: list[Known] = []
    for node in graph.nodes:
        if node.op == "INPUT" and node.arg == gate:
            known.append(0)
        else:
            operands = [known[src] for src in node.srcs]
            known.append(OPERATIONS[node.op].propagate(node, operands))
    return all(is_zero(known[output.node]) for output in graph.outputs)
