"""Differences between variants, small perturbations, and the tolerance between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from splitup_deploy.calibration.calibrate_model import calibrate_model
from splitup_deploy.calibration.perturbations import (
    NOISES,
    iter_skips,
    list_noises,
    list_perturbations,
    round_activations,
)
from splitup_deploy.calibration.separation import (
    BOUNDS,
    MARGIN,
    calibrate,
    measure_step,
    take_largest,
    take_smaller,
)
from splitup_deploy.calibration.tolerances import (
    attach_tolerances,
    describe_tolerances,
    load_tolerances,
    makes_vectors,
)
from splitup_deploy.calibration.variant_runs import VARIANTS, Variant, make_steps, run_jobs
from splitup_deploy.cli.commands import app
from splitup_deploy.cutting.build import build, prepare
from splitup_deploy.frontends.source_model import Sizes
from typer.testing import CliRunner

from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidInput, Unavailable
from splitup.core.tensors import TensorSpec
from splitup.cpu.native_kernels import is_supported
from splitup.graph.compare import compare_tensors
from splitup.graph.ir import Graph, encode_float
from splitup.graph.manifest_rules import load_manifest
from splitup.graph.rules import check_graph
from splitup.graph.self_test_vectors import make_inputs
from tests.deploy.llamas import EXAMPLE, save_llama
from tests.graph.graphs import Builder, compute_graph

STEPS, SIZE = 4, 64


def make_block() -> Builder:
    """h = x + 0.1 W x, twice, and a running mean of what went in: layers, weights, a state."""
    b = Builder()
    rng = np.random.default_rng(2)
    h = x = b.input("x", "float32", SIZE)
    tenth = b.const("float32", encode_float(0.10000000149011612))
    for layer in range(2):
        w = b.weight(f"w{layer}", rng.standard_normal((SIZE, SIZE)).astype(np.float32))
        column = b.add("RESHAPE", "float32", h, arg=(SIZE, 1))
        product = b.add("MUL", "float32", w, column)
        branch = b.store("float32", b.add("REDUCE", "float32", product, arg=("ADD", 1)))
        h = b.store("float32", b.add("ADD", "float32", h, b.add("MUL", "float32", branch, tenth)))
    s = b.state("s", "float32", SIZE)
    total = b.store("float32", b.add("ADD", "float32", s, x))
    b.store("float32", b.add("ADD", "float32", h, b.add("MUL", "float32", total, tenth)))
    return b


BLOCK = make_block()
STORED = [i for i, node in enumerate(BLOCK.nodes) if node.op == "CONTIGUOUS"]
GRAPH = check_graph(BLOCK.graph({"y": STORED[-1]}, [STORED[-2]]))
PORT = TensorSpec("y", "float32", (SIZE,))


def run(graph: Graph, weights: dict[str, bytes], forget_at: int | None = None) -> list[list[bytes]]:
    program = TaskProgram.from_graph(check_graph(graph), lambda name: memoryview(weights[name]))
    state, results = program.new_state(), []
    for step in range(STEPS):
        if step == forget_at:
            state = program.new_state()
        results.append(program.run(state, make_inputs(graph.inputs, 1, step)))
    return results


def run_on_reference() -> list[list[bytes]]:
    state, results = np.zeros(SIZE, np.float32), []
    weights = {
        ("WEIGHT", place): np.frombuffer(BLOCK.weight_bytes[w.name], np.float32).reshape(w.shape)
        for place, w in enumerate(GRAPH.weights)
    }
    for step in range(STEPS):
        (data,) = make_inputs(GRAPH.inputs, 1, step)
        known = {("INPUT", 0): np.frombuffer(data, np.float32), ("STATE", 0): state, **weights}
        values = compute_graph(GRAPH, known)
        state = values[STORED[-2]]
        results.append([values[STORED[-1]].tobytes()])
    return results


def test_a21_every_cheaper_computation_is_told_from_another_class() -> None:
    honest = [run(GRAPH, BLOCK.weight_bytes), run_on_reference()]
    pairs = [measure_step([PORT], a, b) for a, b in zip(*honest, strict=True)]
    apart = take_largest(m for found in pairs for m in found.get("float32", ()))
    assert apart["relative_l2_ppb"] > 0  # the classes differ, or the test would say nothing
    outputs, spreads = {}, {}
    for perturbation in list_perturbations(GRAPH, BLOCK.weight_bytes, STEPS):
        results = outputs[perturbation.name] = run(
            perturbation.graph, dict(perturbation.weights), perturbation.forget_at
        )
        for variant in honest:
            for step in range(STEPS):
                if results[step] != honest[0][step]:
                    found = measure_step([PORT], results[step], variant[step])["float32"]
                    spreads[perturbation.name] = take_smaller(
                        spreads.get(perturbation.name), take_largest(found)
                    )
    assert set(spreads) == {
        "weights in lower precision",
        "weights in 8 bits",
        "activations in lower precision",
        "a skipped layer",
        "half the context forgotten",
    }
    calibration = calibrate("float32", apart, spread(), spreads)
    assert calibration.tolerance is not None, calibration
    for step in range(STEPS):
        (one,), (other,) = honest[0][step], honest[1][step]
        assert compare_tensors(PORT, one, other, calibration.tolerance).is_accepted
    for name, results in outputs.items():
        caught = [
            not compare_tensors(PORT, claim[0], right[0], calibration.tolerance).is_accepted
            for claim, right in zip(results, honest[1], strict=True)
        ]
        assert any(caught), name
        assert all(caught) or name == "half the context forgotten"


def test_perturbations_change_what_they_say() -> None:
    lowered = round_activations(GRAPH)
    assert sum(node.dtype == "float16" for node in lowered.nodes) == 2 * len(STORED)
    skips = list(iter_skips(GRAPH))
    assert len(skips) == 4  # two layers, and each of the other two sums
    for graph in (lowered, *skips):
        check_graph(graph)


def test_layers_of_steps_of_many_rows_are_skipped_too(tmp_path: Path) -> None:
    save_llama(tmp_path)
    graph = prepare(str(tmp_path), Sizes(chunk=8)).traced.graph
    checked = check_graph(graph)
    skips = list(iter_skips(checked))
    assert len(skips) >= 4  # attention and MLP of two layers
    for skipped in skips:
        made = check_graph(skipped).values
        for ours, theirs in zip(skipped.outputs, graph.outputs, strict=True):
            assert made[ours.node].dims == checked.values[theirs.node].dims


def test_quantised_weights_lose_one_level() -> None:
    rng = np.random.default_rng(4)
    b = Builder()
    blocks = rng.integers(0, 256, (2, 3, 34), dtype=np.uint8)
    w = b.weight("w", blocks)
    y = b.store("uint8", w)
    (perturbation,) = list_perturbations(b.graph({"y": y}), b.weight_bytes, 2)
    assert perturbation.name == "weights one quantisation level down"
    changed = np.frombuffer(perturbation.weights["w"], np.uint8).reshape(2, 3, 34)
    np.testing.assert_array_equal(changed[..., :2], blocks[..., :2])  # the scale stays
    apart = changed[..., 2:].view(np.int8).astype(int) - blocks[..., 2:].view(np.int8).astype(int)
    assert np.abs(apart).max() <= 3 and (np.abs(apart) > 2).mean() < 0.02
    assert set((changed[..., 2:].view(np.int8) % 4).ravel()) == {0}


def spread(**values: int) -> dict[str, int]:
    return dict.fromkeys(BOUNDS, 0) | values


def test_a_line_is_drawn_only_with_a_margin_on_both_sides() -> None:
    honest = spread(relative_l2_ppb=10**5)
    edge = MARGIN * MARGIN * 10**5 + MARGIN
    below = {"c": spread(relative_l2_ppb=edge - MARGIN)}
    assert calibrate("float32", honest, spread(), below).tolerance is None
    far = {name: spread(relative_l2_ppb=edge * n) for name, n in (("c", 400), ("d", 1))}
    found = calibrate("float32", honest, spread(), far)
    assert found.tolerance is not None
    assert found.tolerance.list_bounds() == {"relative_l2_ppb": edge // MARGIN}


def test_a_metric_is_used_only_for_a_perturbation_that_needs_it() -> None:
    honest = spread(relative_l2_ppb=10**5, max_ulp=10)
    perturbations = {
        "big": spread(relative_l2_ppb=10**9, max_ulp=10**6),
        "odd": spread(max_ulp=10**6),
    }
    found = calibrate("float32", honest, spread(), perturbations)
    assert found.tolerance is not None
    assert set(found.tolerance.list_bounds()) == {"relative_l2_ppb", "max_ulp"}
    found = calibrate("float32", honest, spread(), {"big": perturbations["big"]})
    assert found.tolerance is not None
    assert set(found.tolerance.list_bounds()) == {"relative_l2_ppb"}


def test_what_cannot_be_told_apart_leaves_equal_bytes() -> None:
    found = calibrate("float32", spread(relative_l2_ppb=100), spread(), {"c": spread()})
    assert found.tolerance is None and "'c' differs too little" in found.reason
    assert calibrate("float32", spread(), spread(), {}).tolerance is None
    assert calibrate("int32", spread(), spread(), {"c": spread()}).tolerance is None


def test_members_own_noise_stays_within_half_of_a_tolerance() -> None:
    """A calibration of few steps sees no number that two devices round to different halves."""
    honest, cheat = spread(relative_l2_ppb=300), {"c": spread(relative_l2_ppb=8 * 10**5)}
    edge = 10**5
    found = calibrate("float32", honest, spread(relative_l2_ppb=edge - 1), cheat)
    assert found.tolerance is not None and found.tolerance.relative_l2_ppb == 2 * edge
    assert calibrate("float32", honest, spread(relative_l2_ppb=edge), cheat).tolerance is None


def test_outputs_in_float16_are_bound_in_scale_and_in_their_mantissas() -> None:
    """What block 3's MLP with the keys and values of block 4 differ by, in 24 steps."""
    one_rounding = {"mantissa_ppb": 7_630, "max_ulp": 1}
    honest = spread(relative_l2_ppb=80_000, **one_rounding)
    noise = spread(relative_l2_ppb=76_000, mantissa_ppb=7_630, max_ulp=6)
    cheats = {
        "activations": spread(relative_l2_ppb=1_200_000, mantissa_ppb=1_700_000, max_ulp=12),
        "a skipped layer": spread(relative_l2_ppb=10**8, mantissa_ppb=10**8, max_ulp=10**4),
    }
    found = calibrate("float16", honest, noise, cheats)
    assert found.tolerance is not None, found
    assert found.tolerance.list_bounds() == {"relative_l2_ppb": 25 * 10**6, "mantissa_ppb": 425_000}


def make_cache() -> Builder:
    """Numbers in the middle of two of float16, in a cache of that dtype, read as float32."""
    b = Builder()
    x = b.input("x", "float32", SIZE)
    w = b.weight("w", np.full(SIZE, 1 + 2.0**-11, np.float32))
    nothing = b.add("MUL", "float32", x, b.const("float32", encode_float(0.0)))
    half = b.store("float16", b.add("CAST", "float16", b.add("ADD", "float32", w, nothing)))
    b.store("float32", b.add("CAST", "float32", half))
    return b


def test_noise_rounds_numbers_of_a_cache_the_other_way() -> None:
    b = make_cache()
    graph = check_graph(b.graph({"y": len(b.nodes) - 1}))
    right = run(graph, b.weight_bytes)
    noises = list(list_noises(graph, b.weight_bytes))
    assert len(noises) == NOISES
    apart = take_largest(
        metrics
        for noise in noises
        for one, other in zip(run(noise.graph, dict(noise.weights)), right, strict=True)
        for metrics in measure_step([PORT], one, other).get("float32", ())
    )
    assert 10**5 < apart["relative_l2_ppb"] < 10**6  # one rounding of float16, of half of them


MODULE = """
import numpy as np
from tinygrad import Tensor

W = Tensor(np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32))


def model(x):
    return (x @ W).relu()


model.inputs = {"x": ("float32", (1, 64))}
"""


def test_a_device_that_fails_is_named_without_advice_about_a_variable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"^tinygrad cannot use DEV=CPU:NONE: ") as error:
        run_jobs(tmp_path / "jobs.json", Variant("v", {"DEV": "CPU:NONE"}), [])
    assert "unset" not in str(error.value)


@pytest.mark.long  # in small: above, in one process
def test_variants_are_computed_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    compiled = build("small_model:model", 10**6)
    broken = Variant("broken", {"DEV": "CPU:NONE"})
    folder = tmp_path / "files"
    folder.mkdir()
    report = calibrate_model(compiled, folder, 3, variants=(broken, *VARIANTS[:2]))
    assert [bool(variant.problem) for variant in report.variants] == [True, False, False]
    (task,) = report.tasks
    (found,) = task.calibrations
    assert found.perturbations and found.tolerance is not None, found
    json.dumps(report.to_dict())

    path = tmp_path / "tolerance.json"
    path.write_text(json.dumps(report.make_file()))
    file = load_tolerances(path)
    assert file.classes and all("/CPU:X86/" in name for name in file.classes)
    changed = attach_tolerances(compiled, file.tasks)
    said = describe_tolerances(changed.manifest, file.classes)
    assert said.startswith("1 of 1 tasks have tolerances, measured on CPU:X86; nodes of other kin")
    assert describe_tolerances(changed.manifest, ()).count("the file does not name") == 1
    assert "splitup-deploy calibrate" in describe_tolerances(compiled.manifest, ())
    assert changed.manifest.tasks[0].tolerances == (found.tolerance,)
    assert load_manifest(changed.manifest_bytes).model_id != compiled.model_id
    other = {"00" * 32: (found.tolerance,)}
    with pytest.raises(InvalidInput, match="calibrate the model again"):
        attach_tolerances(compiled, other)

    with pytest.raises(Unavailable, match="nothing to compare"):
        (empty := tmp_path / "empty").mkdir()
        unable = Variant("no Python", {"PYTHONHOME": str(empty)})
        calibrate_model(compiled, empty, 3, variants=(unable,))


@pytest.mark.long  # in small: above, with a model that has no client
def test_a_private_model_is_calibrated_where_nodes_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes' inputs are what the client's tasks make of a text, so these are computed first."""
    monkeypatch.setattr(
        "splitup_deploy.calibration.calibrate_model.list_perturbations", lambda *_: iter(())
    )  # slow
    save_llama(tmp_path / "m", {"num_hidden_layers": 1})
    sizes = Sizes(chunk=1)
    whole = build(str(tmp_path / "m"), 10**6, sizes=sizes)
    compiled = build(str(tmp_path / "m"), 10**6, sizes=sizes, private=0)
    assert compiled.manifest.client is not None and whole.manifest.client is None
    folder = tmp_path / "files"
    folder.mkdir()
    report = calibrate_model(compiled, folder, 3, tokens=[5, 6, 7], variants=VARIANTS[:2])
    assert [task.task_id for task in report.tasks] == [t.task_id for t in compiled.manifest.tasks]
    assert all(task.calibrations for task in report.tasks)
    given = np.load(folder / "variant0" / "client0.npz")["port0"]
    assert len(given) == 3 and len({row.tobytes() for row in given}) == 3


def test_a_tolerance_file_has_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "tolerance.json"
    for text in ("", "[]", '{"tasks": {"x": []}}', "[" * 10**5):
        path.write_text(text)
        with pytest.raises(InvalidInput, match="splitup-deploy calibrate"):
            load_tolerances(path)
    with pytest.raises(InvalidInput, match="cannot read"):
        load_tolerances(tmp_path / "missing.json")


def test_a_text_model_gets_one_text() -> None:
    manifest = build(str(EXAMPLE), 10**9).manifest
    rows = make_steps(manifest, 5, [7, 8], seed=1)
    names = [port.name for port in manifest.inputs]
    tokens = [np.frombuffer(row[names.index("tokens")], np.int32)[0] for row in rows]
    places = [np.frombuffer(row[names.index("layout")], np.int32)[0] for row in rows]
    assert tokens[:2] == [7, 8] and places == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidInput, match="lower --steps"):
        make_steps(manifest, 10**6, [], seed=1)


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    arguments = ["calibrate", str(tmp_path / "missing"), "--target-vram", "1MB", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "error" in json.loads(result.stdout)


def test_equal_models_have_equal_ids_by_default() -> None:
    """Only the class that most machines have makes vectors, which are part of the id."""
    code = "from splitup_deploy.calibration.tolerances import makes_vectors; print(makes_vectors())"
    assert makes_vectors() == (is_supported() and select_device().renderer == "X86")
    environment = {**os.environ, "DEV": "CPU:CLANG"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "False\n" or "asks for clang" in done.stderr, done.stderr
