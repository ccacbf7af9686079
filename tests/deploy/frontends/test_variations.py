"""Families that vary what others have give the logits of Hugging Face's own implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.decode.step import make_causal_step, make_tree_step
from tests.deploy.checkpoints import GOLDEN, TOKENS, compute_checkpoint_digest, save_checkpoint
from tests.deploy.llamas import relative_error
from tests.deploy.steps import feed, run_step
from tests.deploy.variations import CASES, save_mxfp4

BOUND = 1e-5
CHUNK = 4


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "variation_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("name", CASES)
def test_rows_chunks_and_trees_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(CASES[name]), "run make_golden.py"
    save_checkpoint(tmp_path, CASES[name])
    program = load_reference(str(tmp_path), Sizes(chunk=CHUNK))
    wanted = feed(program, TOKENS)
    assert relative_error(wanted, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(wanted, golden[f"{name}/prefill"]) <= BOUND
    np.testing.assert_array_equal(feed(program, TOKENS, rows=CHUNK), wanted)
    state, start = program.new_state(), 11
    for place in range(0, start, 3):
        run_step(program, state, make_causal_step(TOKENS[place : min(place + 3, start)], place))
    tree = [TOKENS[start], 3, TOKENS[start + 1], TOKENS[start + 2]]
    given = run_step(program, state, make_tree_step(tree, [-1, 0, 0, 2], start))
    np.testing.assert_array_equal(given[[0, 2, 3]], wanted[start : start + 3])
    step = make_tree_step([TOKENS[start + 3]], [-1], start + 3, kept=(0, 2, 3))
    np.testing.assert_array_equal(run_step(program, state, step)[0], wanted[start + 3])


def test_experts_in_mxfp4_stay_so(golden: dict[str, Any], tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    program = load_reference(str(tmp_path), Sizes(chunk=1))
    assert relative_error(feed(program, TOKENS), golden["gpt-oss-mxfp4"]) <= BOUND
