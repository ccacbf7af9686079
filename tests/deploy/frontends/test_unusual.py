"""Fields that no published model sets mean what they mean to Hugging Face's own models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes

from splitup.core.errors import InvalidModel
from tests.deploy.checkpoints import (
    GOLDEN,
    TOKENS,
    Case,
    compute_checkpoint_digest,
    save_checkpoint,
)
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import feed
from tests.deploy.unusual import CASES
from tests.parameters import some_of

BOUND = 1e-5
FIRST = 8  # positions of Phi-MoE's first context
PHI = CASES["phimoe-longrope"]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "unusual_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("name", some_of(CASES, "qwen3.5", "phimoe-longrope"))
def test_logits_are_those_of_transformers(
    name: str, golden: dict[str, Any], tmp_path: Path
) -> None:
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(CASES[name]), "run make_golden.py"
    save_checkpoint(tmp_path, CASES[name])
    given = feed(load_graph(str(tmp_path), Sizes(chunk=1)), TOKENS)
    assert relative_error(given, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


def change_rope(change: dict[str, Any]) -> Case:
    """Return Phi-MoE with other parameters of its rope."""
    rope = {**PHI.change["rope_parameters"], **change}
    return replace(PHI, change={**PHI.change, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({"short_factor": [7.0] * 4, "short_mscale": 0.4}, None),
        ({"long_factor": [7.0] * 4, "long_mscale": 0.4}, FIRST),
    ],
)
def test_phi_moe_turns_by_the_factors_of_its_context(
    change: dict[str, Any], context: int | None, golden: dict[str, Any], tmp_path: Path
) -> None:
    """By the long ones and their correction beyond the first context, as in transformers 4."""
    save_checkpoint(tmp_path, change_rope(change))
    tokens = TOKENS[:context]
    given = feed(load_graph(str(tmp_path), Sizes(chunk=1, context=context)), tokens)
    wanted = golden["phimoe-longrope/prefill"][: len(tokens)]
    assert relative_error(given, wanted) <= BOUND


def test_long_factors_of_phi_moe_are_said(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, PHI)
    (note,) = load_model(str(tmp_path), Sizes(chunk=1)).traced.notes
    assert f"--context {FIRST}" in note and "short factors" in note
    assert not load_model(str(tmp_path), Sizes(chunk=1, context=FIRST)).traced.notes


@pytest.mark.parametrize(
    ("use", "kinds"), [(True, ["full_attention"] * 3), (False, ["sliding_attention"] * 3)]
)
def test_kinds_of_layers_that_qwen3_moe_does_not_ask_for_may_not_differ(
    use: bool, kinds: list[str]
) -> None:
    config = {**CASES["qwen3-moe-windows"].config, "use_sliding_window": use}
    with pytest.raises(InvalidModel, match="layer_types"):
        parse_config({**config, "layer_types": kinds}, None)
