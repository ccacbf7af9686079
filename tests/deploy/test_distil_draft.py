"""The draft model of ``examples/distil_draft.py``: its gradients, its table, and what is saved."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends.source_model import Sizes, SourceText
from splitup_deploy.uncut_model import load_reference

from splitup.core.tensors import array_to_bytes
from splitup.decode.step import make_arrays, make_causal_step

ROOT = Path(__file__).parents[2]
TOKENIZER = (ROOT / "examples/packages-4m/tokenizer.json").read_bytes()
VOCAB, CONTEXT, CHUNK = 2048, 64, 16


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "examples/distil_draft.py"
    spec = importlib.util.spec_from_file_location("distil_draft", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")  # which the script sets, for its process
        patch.setitem(sys.modules, "distil_draft", module)
        spec.loader.exec_module(module)
    return module


def make_draft(script: ModuleType, rng: np.random.Generator) -> Any:
    config = script.make_config(SourceText(TOKENIZER, (0,), VOCAB, CONTEXT), 2, 64)
    config["num_key_value_heads"] = 1
    table = rng.normal(size=(VOCAB, 64)).astype(np.float32)
    weights = script.make_weights(config, table, rng)
    for each in weights.values():
        if each.ndim == 1:
            each += rng.normal(size=each.shape) / 4
    return script.Draft(config, weights)


def test_gradients_are_those_of_differences(script: ModuleType) -> None:
    rng = np.random.default_rng(1)
    draft = make_draft(script, rng)
    draft.weights |= {name: each.astype(np.float64) for name, each in draft.weights.items()}
    tokens, direction = rng.integers(0, VOCAB, (2, 9)), rng.normal(size=(2, 9, 64))

    def compute() -> float:
        return float((draft.compute(tokens)[0] * direction).sum())

    draft.compute(tokens)[1](direction)
    gradients = dict(draft.gradients)
    assert set(gradients) == set(draft.weights) - {script.TABLE}
    for name, gradient in gradients.items():
        weight, step = draft.weights[name], 1e-5
        change = step * rng.normal(size=weight.shape)
        weight += change
        more = compute()
        weight -= 2 * change
        less = compute()
        weight += change
        assert (more - less) / 2 == pytest.approx((gradient * change).sum(), rel=1e-3), name


def test_a_saved_draft_gives_the_logits_that_it_was_trained_for(
    script: ModuleType, tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    draft = make_draft(script, rng)
    draft.save(tmp_path / "draft", TOKENIZER)
    tokens = rng.integers(0, VOCAB, 12)
    program = load_reference(str(tmp_path / "draft"), Sizes(context=CONTEXT, chunk=CHUNK))
    arrays = make_arrays(make_causal_step(tokens.tolist(), 0, range(12)), CHUNK)
    inputs = [array_to_bytes(spec, arrays[spec.name]) for spec in program.inputs]
    [data] = program.run(program.new_state(), inputs)
    found = np.frombuffer(data, np.float32).reshape(12, VOCAB)
    rows, _ = draft.compute(tokens[None])
    assert found == pytest.approx(rows[0] @ draft.table.T, abs=0.02 * float(np.abs(found).max()))


def test_a_table_of_fewer_dimensions_gives_the_nearest_logits(script: ModuleType) -> None:
    rng = np.random.default_rng(3)
    table, hidden = (
        rng.normal(size=(300, 24)),
        rng.normal(size=(1000, 24)) @ rng.normal(size=(24, 24)),
    )
    covariance = hidden.T @ hidden
    logits = hidden @ table.T
    logits -= logits.mean(1, keepdims=True)
    _, lengths, _ = np.linalg.svd(logits, full_matrices=False)
    for width in (24, 8):
        small = script.reduce_table(table, covariance, width).astype(np.float64)
        best = logits @ np.linalg.pinv(small.T) @ small.T
        lost = ((logits - best) ** 2).sum()
        assert lost == pytest.approx((lengths[width:] ** 2).sum(), rel=1e-3, abs=1e-3)
