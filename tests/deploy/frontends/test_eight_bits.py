"""Caches of eight bits: int8, with a float32 step for each row and head."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.decoder import caches
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.cpu.matmul_match import Matmul
from splitup.cpu.native_kernels import is_supported
from splitup.decode.step import make_causal_step
from splitup.graph.rules import check_graph
from tests.deploy.checkpoints import TOKENS, save_checkpoint
from tests.deploy.encoders import CASES as ENCODERS
from tests.deploy.encoders import save_encoder
from tests.deploy.execution import CutModel
from tests.deploy.frontends import test_step as promises
from tests.deploy.frontends.test_rings import CASE, CHUNK, CONTEXT, RING, WINDOW, draw_steps
from tests.deploy.llamas import compute_logits, relative_error, save_llama
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import check_merged, check_together, feed, run_step, step_inputs
from tests.deploy.variations import CASES

SIZES = Sizes(chunk=CHUNK, cache="8bit")
TEXT = [5, 0, 39, 7, 7, 12, 1, 30, 22, 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose layers see a window and all positions in turn."""
    change = {
        **CASE.change,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    }
    path = tmp_path_factory.mktemp("window")
    save_checkpoint(path, replace(CASE, change=change))
    return path


@pytest.fixture(scope="module")
def program(directory: Path) -> TaskProgram:
    return load_reference(str(directory), SIZES)


def test_keys_and_values_are_rounded_also_those_of_the_step_itself(tmp_path: Path) -> None:
    """By numpy; the first token's keys and values are zeros."""
    weights = save_llama(tmp_path)
    weights["model.embed_tokens.weight"][TEXT[0]] = 0.0
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = compute_logits(config, weights, TEXT, cache="8bit")
    for chunk in (1, 4):
        given = feed(load_graph(str(tmp_path), Sizes(chunk=chunk, cache="8bit")), TEXT, rows=chunk)
        assert relative_error(given, wanted) <= 1e-5
    assert 1e-3 < relative_error(given, compute_logits(config, weights, TEXT)) < 3e-2


def test_kernels_give_the_reference_s_logits(directory: Path, program: TaskProgram) -> None:
    wanted = feed(load_graph(str(directory), SIZES), TOKENS, rows=CHUNK)
    assert relative_error(feed(program, TOKENS, rows=CHUNK), wanted) <= 1e-5


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next"])
def test_sinks_gates_and_recurrent_layers_beside_it_stay_what_they_are(
    name: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, CASES[name])
    plain, given = (
        feed(load_graph(str(tmp_path), Sizes(chunk=4, cache=cache)), TOKENS, rows=4)
        for cache in (None, "8bit")  # type: ignore[arg-type]
    )
    assert 1e-4 < relative_error(given, plain) < 3e-2


def test_chunks_of_every_size_give_the_same_bytes(program: TaskProgram) -> None:
    wanted = feed(program, TOKENS)
    for rows in (2, 3, CHUNK):
        np.testing.assert_array_equal(feed(program, TOKENS, rows), wanted)


def test_steps_of_every_kind_give_the_bytes_of_a_full_cache(
    directory: Path, program: TaskProgram
) -> None:
    """Trees, kept rows and steps back, in a ring and in a cache of all positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "count_ring_rows", lambda *_: 0)
        full = load_reference(str(directory), SIZES)
    states = program.new_state(), full.new_state()
    for number, step in enumerate(draw_steps(1, 60)):
        given, wanted = run_step(program, states[0], step), run_step(full, states[1], step)
        assert given.tobytes() == wanted.tobytes(), (number, step)


def test_steps_together_and_merged_give_the_same_bytes(program: TaskProgram) -> None:
    plans = [[make_causal_step(TOKENS[n : n + 2], n) for n in range(k, k + 8, 2)] for k in (0, 1)]
    check_together(program, plans)
    check_merged(program, list(draw_steps(4, 8)), passes=1)


def test_the_promises_of_all_models_hold(program: TaskProgram) -> None:
    """Memory that no step wrote, and numbers from anybody."""
    promises.test_what_lies_behind_a_step_s_rows_never_matters(program)
    promises.test_any_integers_are_safe(program)


def test_rows_have_a_byte_a_number_and_steps_of_four_bytes(program: TaskProgram) -> None:
    states = {spec.name: (spec.dtype, spec.shape) for spec in program.states}
    heads, size = states["layers.0.kv"][1][2:]
    assert states == {
        "layers.0.furthest": ("int32", (1,)),
        "layers.0.kv": ("int8", (RING, 2, heads, size)),
        "layers.0.steps": ("float32", (RING, 8)),
        "layers.1.kv": ("int8", (CONTEXT, 2, heads, size)),
        "layers.1.steps": ("float32", (CONTEXT, 8)),
    }
    assert program.allocated_bytes <= program.vram_bytes


def test_cuts_give_the_same_bytes_and_send_no_rounded_rows(
    directory: Path, program: TaskProgram
) -> None:
    """Two devices round some numbers to neighbours, and integers that are sent have to be equal."""
    cut = CutModel(build(str(directory), 35_000, sizes=SIZES))
    assert len(cut.manifest.tasks) > 2
    ports = [port for task in cut.manifest.tasks for port in task.outputs]
    assert ports and all(port.dtype != "int8" for port in ports)
    states, state = cut.new_states(), program.new_state()
    for step in draw_steps(3, 20):
        inputs = step_inputs(cut.inputs, step)
        (wanted,) = program.run(state, [inputs[spec.name] for spec in program.inputs])
        assert cut.step(states, inputs)["logits"] == wanted


@pytest.mark.skipif(not is_supported(), reason="needs x86-64 with AVX2, FMA and F16C")
def test_products_with_rows_and_with_their_steps_have_native_code(directory: Path) -> None:
    select_device()
    counts = []
    for cache in (None, "8bit"):
        graph = load_model(str(directory), replace(SIZES, cache=cache)).traced.graph  # type: ignore[arg-type]
        schedule = compile_graph(check_graph(graph), "CPU")
        products = [
            schedule.natives[launch.index]
            for launch in schedule.launches
            if launch.kind == "native"
        ]
        kinds = [one.shape.kind for one in products if isinstance(one, Matmul) and one.shape.lookup]
        counts.append((kinds.count("float32"), kinds.count("int8")))
    assert counts == [(4, 0), (2, 4)]  # of two layers: keys and values; then with steps, too


def test_what_has_no_such_cache_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "latent", CASES["deepseek-v3.2"])
    save_checkpoint(tmp_path / "borrowed", CASES["gemma4-e"])
    encoder = save_encoder(tmp_path / "encoder", ENCODERS["bert"])
    for source, problem in (
        (str(tmp_path / "latent"), "--cache 8bit is not there for a model with compressed rows"),
        (str(tmp_path / "borrowed"), "with layers that read others' caches"),
        (encoder, "keeps no keys and values: leave out the cache"),
        ("tests.deploy.frontends.on_device_models:model", "is no text model: leave out the cache"),
    ):
        with pytest.raises(InvalidModel, match=re.escape(problem)):
            load_model(source, Sizes(cache="8bit"))
