"""Run a small task on this machine's device, and compare it with the reference.

A device that opens may still lack what tasks need: a dtype, views into a buffer, a file that a
confined process may not read. So ``splitup doctor`` runs this module as the nodes' workers run
tasks: in a confined process, with weights, rows, a state and the operations of a language model.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from splitup.core.errors import SplitUpError
from splitup.core.tensors import TensorSpec, array_to_bytes, bytes_to_array
from splitup.graph.arrays import Array
from splitup.graph.error_bound import compute_bounds, is_within
from splitup.graph.ir import (
    Arg,
    Graph,
    GraphOutput,
    Node,
    Symbol,
    Update,
    Weight,
    bind_rows,
    encode_float,
)
from splitup.graph.rules import check_graph
from splitup.sandbox.child import Child
from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.serving import Answer

_MODULE: Final = "splitup.backend.devices.device_check"  # __name__ is another in the child
_TIMEOUT_S: Final = 120.0  # a driver's compiler takes seconds
_MAX_ANSWER_BYTES: Final = 4_096
_WIDTH, _MOST, _CONTEXT = 32, 4, 8
_STEPS: Final = (3, 1, 1)  # rows


def run_apart(device: str = "") -> dict[str, Any]:
    """Check a device, by default DEV's, in a confined process; returns what ``check_device`` does.

    Raises ChildFailed and Unavailable, which say why the device cannot run tasks.
    """
    child = Child(_MODULE, device=device)
    try:
        head, _ = child.ask({}, timeout_s=_TIMEOUT_S, max_bytes=_MAX_ANSWER_BYTES)
        return head
    finally:
        child.close()


def check_device() -> dict[str, Any]:
    """Run the task for three steps; return the device's report, and "step_ms" of the last one.

    Raises InvalidModel when the task cannot be compiled, and SplitUpError when an output is further
    from the reference than an honest kernel's.
    """
    from splitup.backend.runtime import TaskProgram, describe_device

    graph, weights = make_task()
    data = {spec.name: array.tobytes() for spec, array in weights.items()}
    program = TaskProgram.from_graph(check_graph(graph), lambda name: memoryview(data[name]))
    state, cache = program.new_state(), np.zeros((_CONTEXT, _WIDTH), np.float32)
    random = np.random.default_rng(0)
    step_s = 0.0
    for rows in _STEPS:
        x = random.standard_normal((rows, _WIDTH)).astype(np.float32)
        at = np.arange(rows, dtype=np.int32)
        inputs = [array_to_bytes(s, a) for s, a in zip(graph.inputs, (x, at), strict=True)]
        started = time.perf_counter()
        (found,) = program.run(state, inputs)
        step_s = time.perf_counter() - started
        cache = _compare(graph, [*weights.values()], (x, at), cache, found)
    return {**describe_device().to_dict(), "step_ms": round(1e3 * step_s, 2)}


def _compare(
    graph: Graph, weights: Sequence[Array], inputs: Sequence[Array], state: Array, found: bytes
) -> Array:
    """Raise SplitUpError unless an output is near the reference; return the reference's state."""
    bound = check_graph(bind_rows(graph, {graph.symbols[0].name: len(inputs[0])}))
    given: dict[str, Sequence[Array]] = {"INPUT": inputs, "WEIGHT": weights, "STATE": [state]}
    values: dict[int, Array] = {}
    for index, node in enumerate(bound.nodes):
        if node.op in given:
            assert isinstance(node.arg, int)
            values[index] = given[node.op][node.arg]
    bounds = compute_bounds(bound, [i for i in range(len(bound.nodes)) if i not in values], values)
    output = bound.outputs[0]
    claimed = bytes_to_array(bound.values[output.node].make_spec(output.name), found)
    if not is_within(claimed, values[output.node], bounds[output.node]):
        far = float(np.abs(claimed - values[output.node]).max())
        raise SplitUpError(
            f"the device computes a task wrongly: an output is {far:.3g} from the reference; "
            "update its driver, or use another device (DEV)"
        )
    return values[bound.updates[0].node]


def make_task() -> tuple[Graph, dict[Weight, Array]]:
    """Return the graph, and its weights.

    Of rows x it computes the softmax of normalised x W, and adds rows of a state that are looked
    up; the sum of all results is added to the state.
    """
    random = np.random.default_rng(1)
    arrays: dict[str, Array] = {
        "w": random.standard_normal((_WIDTH, _WIDTH)).astype(np.float16),
        "gain": random.standard_normal(_WIDTH).astype(np.float32),
    }
    weights = {
        Weight(name, str(array.dtype), array.shape, _digest(array)): array
        for name, array in arrays.items()
    }
    nodes: list[Node] = []

    def add(op: str, *srcs: int, dtype: str = "float32", arg: Arg = None) -> int:
        nodes.append(Node(op, dtype, srcs, arg))
        return len(nodes) - 1

    def number(value: float) -> int:
        return add("CONST", arg=encode_float(value))

    x, at = add("INPUT", arg=0), add("INPUT", dtype="int32", arg=1)
    w, gain = add("WEIGHT", dtype="float16", arg=0), add("WEIGHT", arg=1)
    cache = add("STATE", arg=0)

    def reduce(op: str, value: int) -> int:
        """Reduce the last axis of [T, width]: the format reduces the first axes."""
        turned = add("PERMUTE", value, arg=(1, 0))
        return add("RESHAPE", add("REDUCE", turned, arg=(op, 1)), arg=("T", 1))

    squares = reduce("ADD", add("MUL", x, x))
    length = add("SQRT", add("ADD", squares, number(2.0**-10)))
    normal = add("CONTIGUOUS", add("MUL", add("FDIV", x, length), gain))
    spread = add("RESHAPE", normal, arg=("T", 1, _WIDTH))
    product = add("MUL", spread, add("CAST", w))
    turned = add("PERMUTE", product, arg=(2, 0, 1))
    scores = add("CONTIGUOUS", add("REDUCE", turned, arg=("ADD", 1)))
    powers = add("CONTIGUOUS", add("EXP2", add("SUB", scores, reduce("MAX", scores))))
    shares = add("MUL", powers, add("RECIPROCAL", reduce("ADD", powers)))
    result = add("CONTIGUOUS", add("ADD", shares, add("LOOKUP", cache, at)))
    total = add("REDUCE", result, arg=("ADD", 1))
    update = add("CONTIGUOUS", add("ADD", cache, total))
    inputs = (
        TensorSpec("x", "float32", (_MOST, _WIDTH), "T"),
        TensorSpec("at", "int32", (_MOST,), "T"),
    )
    graph = Graph(
        inputs=inputs,
        weights=tuple(weights),
        states=(TensorSpec("cache", "float32", (_CONTEXT, _WIDTH)),),
        nodes=tuple(nodes),
        outputs=(GraphOutput("y", result),),
        updates=(Update(0, update),),
        symbols=(Symbol("T", _MOST),),
    )
    return graph, weights


def _digest(array: Array) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def _answer(question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
    return check_device(), ()


def main() -> None:
    """Answer ``run_apart``."""
    serve_confined(_answer, os.environ.get("DEV", ""))


if __name__ == "__main__":
    main()
