"""Traces of a language model's steps: kernels on their own, and what the reference gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from splitup_deploy.cutting.build import prepare

from splitup.backend.runtime import TaskProgram
from splitup.backend.trace_recording import record_trace
from splitup.cpu.native_kernels import is_supported
from splitup.decode.step import make_causal_step
from splitup.graph.arrays import decode_array
from splitup.graph.error_bound import compute_bounds, is_within
from splitup.graph.reference import list_operands, list_region
from splitup.graph.rules import check_graph
from splitup.graph.value_trace import (
    ValueLayout,
    cut_region,
    decode_operands,
    list_region_inputs,
    trace_operations,
)
from tests.deploy.llamas import save_llama
from tests.deploy.steps import step_inputs

STEPS = (make_causal_step([5, 9, 2], 0), make_causal_step([7], 3))


def test_a_kernel_of_a_step_gives_its_bytes_and_those_are_within_the_bound(tmp_path: Path) -> None:
    save_llama(tmp_path, {"num_hidden_layers": 1})
    traced = prepare(str(tmp_path)).traced
    graph = check_graph(traced.graph)
    table = {name: b"".join(source.read()) for name, source in traced.weights.items()}
    steps = []
    for step in STEPS:
        arrays = step_inputs(graph.inputs, step)
        steps.append([arrays[spec.name] for spec in graph.inputs])
    leaves: list[bytes] = []
    record_trace(graph, lambda name: memoryview(table[name]), steps, leaves.append)
    layout = ValueLayout(graph, ((3, 1), (1, 1)))
    assert layout.count == len(leaves)
    known = {weight.digest: table[weight.name] for weight in graph.weights}
    for root in layout.stored:
        region = cut_region(graph, root)
        program = TaskProgram.from_graph(region, lambda name: memoryview(b""))
        for step in range(len(STEPS)):
            operands = {}
            for index in list_operands(graph, list_region(graph, root)):
                found = layout.find_operand(step, index)
                spec = layout.get_spec(step, index)
                operands[index] = (
                    leaves[found]
                    if isinstance(found, int)
                    else known.get(found, bytes(spec.nbytes))
                )
            inputs = list_region_inputs(region, layout, step, operands)
            (result,) = program.run(program.new_state(), inputs)
            slot = step * layout.width + len(graph.inputs) + layout.stored.index(root)
            assert result == leaves[slot], graph.nodes[root]
            bound_graph = layout.bind(step)
            values = decode_operands(layout, step, operands)
            bounds = compute_bounds(bound_graph, list_region(graph, root), values)
            claimed = decode_array(layout.get_spec(step, root), result)
            assert is_within(claimed, values[root], bounds[root]), graph.nodes[root]
        digests = trace_operations(layout, step, root, operands)
        assert len(digests) == len(list_region(graph, root))


def test_equal_models_have_equal_ids_by_default() -> None:
    """Only the class that most machines have makes vectors, which are part of the id."""
    code = "from splitup_deploy.calibration.tolerances import makes_vectors; print(makes_vectors())"
    for device, expected in (("CPU:X86", is_supported()), ("CPU:CLANG", False)):
        environment = {**os.environ, "DEV": device}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        said = done.stdout.strip()
        assert said == str(expected) or "asks for clang" in done.stderr, done.stderr
