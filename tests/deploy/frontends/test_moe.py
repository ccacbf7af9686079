"""Experts: right numbers, divided among tasks, and not run when nobody chose them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.decoder.expert_layers import compute_feed_forward
from splitup_deploy.frontends.decoder.step_function import trace_decoder
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.frontends.weight_sources import WeightSource
from splitup_deploy.uncut_model import load_reference

from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.gates import compute_zero_step
from splitup.graph.manifest import InputSource, Task
from splitup.graph.rules import check_graph
from tests.deploy.execution import CutModel
from tests.deploy.llamas import relative_error
from tests.deploy.moes import (
    CASES,
    GOLDEN,
    MIXTRAL,
    QWEN3_MOE,
    TOKENS,
    compute_digest,
    compute_logits,
    make_weights,
    save_moe,
)
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import as_inputs, feed

TARGET = 40_000  # one expert takes 26 kB with its rows, two do not fit
CHUNK = Sizes(chunk=2)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    with np.load(GOLDEN, allow_pickle=False) as golden:
        assert str(golden[f"{name}/digest"]) == compute_digest(CASES[name])
        wanted = golden[f"{name}/logits"]
    save_moe(tmp_path / "m", CASES[name])
    given = feed(load_graph(str(tmp_path / "m")), TOKENS)
    assert relative_error(given, wanted) <= 1e-5


def test_the_numpy_model_is_right_as_well() -> None:
    with np.load(GOLDEN, allow_pickle=False) as golden:
        for name, config in CASES.items():
            logits = compute_logits(config, make_weights(config), TOKENS)
            assert relative_error(logits, golden[f"{name}/logits"]) <= 1e-5


class Halves:
    """Weights in memory as bfloat16: the upper halves of float32 numbers."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self._weights = weights

    def get(self, name: str, *shape: int) -> WeightSource:
        data = (self._weights[name].view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return WeightSource(TensorSpec(name, "bfloat16", shape), (data,))

    def can_join(self, names: list[str]) -> bool:
        return True

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        sources = [self.get(part, rows, *shape[1:]) for part, rows in parts]
        spec = TensorSpec(name, "bfloat16", shape)
        return WeightSource(spec, tuple(part for source in sources for part in source.parts))


@pytest.mark.long  # in small: test_mixtures.py, in float32
@pytest.mark.usefixtures("float32_caches")
def test_several_rows_at_once_in_bfloat16() -> None:
    config = {**MIXTRAL, "num_hidden_layers": 1}
    weights = make_weights(config)
    parsed = parse_config(config, None)
    traced = trace_decoder(parsed, Halves(weights), 2, compute_feed_forward).read_weights()
    program = TaskProgram.from_graph(
        check_graph(traced.graph), lambda name: memoryview(b"".join(traced.weights[name].read()))
    )
    given = feed(program, TOKENS[:2], rows=2)
    for array in weights.values():
        array.view(np.uint32)[:] &= 0xFFFF0000
    wanted = compute_logits(config, weights, TOKENS[:2])
    assert relative_error(given, wanted) <= 1e-5


def is_expert(task: Task) -> bool:
    return re.fullmatch(r"block \d experts \d of \d", task.label) is not None


@pytest.mark.long  # in small: node/execution/test_gates.py
def test_experts_without_a_gate_are_not_run(tmp_path: Path) -> None:
    save_moe(tmp_path / "m", MIXTRAL, "float32")
    compiled = build(str(tmp_path / "m"), TARGET, sizes=CHUNK)
    tasks = compiled.manifest.tasks
    gates = [task.gate for task in tasks]
    assert sum(gate is not None for gate in gates) == 2 * 4  # every expert is a task
    for task in tasks:
        assert (task.gate is not None) == is_expert(task)
        assert task.gate is None or "gates-of" in task.inputs[task.gate].name
    assert all(task.vram_bytes <= TARGET for task in tasks)
    for index, gate in enumerate(gates):
        sources = {source for source, target in compiled.manifest.edges() if target == index}
        if gate is not None:  # parallel: they read from the router's task alone
            assert len(sources) == 1 and tasks[index].state_bytes == 0
    cut, whole = CutModel(compiled), load_reference(str(tmp_path / "m"), CHUNK)
    for task, program in zip(tasks, cut.programs, strict=True):
        assert program.allocated_bytes <= task.vram_bytes
    states, state, lazy = cut.new_states(), whole.new_state(), cut.new_states()
    skipped = 0
    for position, token in enumerate(TOKENS):
        inputs = as_inputs(cut.inputs, token, position)
        (wanted,) = whole.run(state, [inputs[spec.name] for spec in whole.inputs])
        assert cut.step(states, inputs)["logits"] == wanted  # bit for bit, all experts run
        made: dict[tuple[int, int], bytes] = {}
        for index, (task, program) in enumerate(zip(tasks, cut.programs, strict=True)):
            data = [
                inputs[port.source.input]
                if isinstance(port.source, InputSource)
                else made[port.source.task, port.source.port]
                for port in task.inputs
            ]
            gate = gates[index]
            if gate is not None and not any(data[gate]):
                specs = [[port.spec for port in ports] for ports in (task.inputs, task.outputs)]
                count_as, zeros = compute_zero_step(specs[0], specs[1], gate, len(data[gate]))
                assert list(map(len, count_as)) == list(map(len, data))
                for given in (data, count_as):  # exactly zero, not -0.0
                    assert program.run(program.new_state(), given) == zeros
                results, skipped = zeros, skipped + 1
            else:
                results = program.run(lazy[index], data)
            made.update({(index, port): value for port, value in enumerate(results)})
        output = compiled.manifest.outputs[0]
        assert made[output.task, output.port] == wanted
    assert skipped == 2 * 2 * len(TOKENS)  # two of four experts, in two layers, in every step


@pytest.mark.long  # in small: test_mixtures.py has finite ones
def test_an_infinite_weight_of_another_expert_is_not_seen(tmp_path: Path) -> None:
    """A gate of zero hides its expert: zero times infinity would be NaN."""
    config: dict[str, Any] = {**MIXTRAL, "num_hidden_layers": 1}
    weights = make_weights(config)
    gate = weights["model.layers.0.block_sparse_moe.gate.weight"]
    gate[:] = 0.0  # equal scores: the first two experts are taken
    for name in weights:
        if re.search(r"experts\.[23]\.w2", name):
            weights[name][:] = np.inf
    save_moe(tmp_path / "m", config, weights=weights)
    cut = CutModel(build(str(tmp_path / "m"), TARGET, sizes=CHUNK))
    logits = np.frombuffer(
        cut.step(cut.new_states(), as_inputs(cut.inputs, 3, 0))["logits"], np.float32
    )
    assert np.isfinite(logits).all()


@pytest.mark.long  # in small: test_mixtures.py, and above with a gate
def test_groups_of_experts_and_dense_layers(tmp_path: Path) -> None:
    save_moe(tmp_path / "m", {**QWEN3_MOE, "num_hidden_layers": 2})
    compiled = build(str(tmp_path / "m"), 40_000, sizes=CHUNK)
    groups = [task for task in compiled.manifest.tasks if task.gate is not None]
    assert [task.label for task in groups[:2]] == [
        "block 0 experts 1 of 2",
        "block 0 experts 2 of 2",
    ]
    assert not any(task.label.startswith("block 1 experts") for task in compiled.manifest.tasks)
    cut, whole = CutModel(compiled), load_reference(str(tmp_path / "m"), CHUNK)
    states, state = cut.new_states(), whole.new_state()
    for position, token in enumerate(TOKENS[:4]):
        inputs = as_inputs(cut.inputs, token, position)
        (wanted,) = whole.run(state, [inputs[spec.name] for spec in whole.inputs])
        assert cut.step(states, inputs)["logits"] == wanted


def test_a_step_costs_the_chosen_experts_only(tmp_path: Path) -> None:
    costs = []
    for experts in (2, 8):
        save_moe(tmp_path / str(experts), {**MIXTRAL, "num_local_experts": experts})
        compiled = build(str(tmp_path / str(experts)), 10**9, sizes=Sizes(chunk=1))
        costs.append((compiled.manifest.tasks[0].flops, compiled.times_ps[0]))
    assert costs[1][0] <= 1.05 * costs[0][0] and costs[1][1] <= 1.05 * costs[0][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, "5 active experts of 4"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"rope_theta": None}, "rope_theta"),
        ({"shared_expert": 3}, "shared_expert"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        parse_config({**MIXTRAL, **changes}, None)
