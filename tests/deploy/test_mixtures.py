"""Routers, shared experts and compressed attention, from Hugging Face directories and GGUF files.

Their logits are those of Hugging Face's own models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends.model import Sizes
from splitup_deploy.reference import load_reference

from tests.deploy.checkpoints import (
    GOLDEN,
    TOKENS,
    compute_checkpoint_digest,
    save_checkpoint,
)
from tests.deploy.ggufs import save_mixture
from tests.deploy.llamas import relative_error
from tests.deploy.mixtures import CASES
from tests.deploy.steps import feed

BOUND = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "mixture_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("name", CASES)
def test_logits_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    case = CASES[name]
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(case), "run make_golden.py"
    save_checkpoint(tmp_path, case)
    given = feed(load_reference(str(tmp_path), Sizes(context=case.context)), TOKENS)
    assert relative_error(given, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


@pytest.mark.parametrize("name", [name for name in CASES if name != "deepseek-v2-groups"])
def test_files_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    save_mixture(tmp_path / "m.gguf", CASES[name])
    given = feed(load_reference(str(tmp_path / "m.gguf")), TOKENS, rows=4)
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


def test_files_with_one_expansion_agree(golden: dict[str, Any], tmp_path: Path) -> None:
    save_mixture(tmp_path / "m.gguf", CASES["moonlight"], split=False)
    given = feed(load_reference(str(tmp_path / "m.gguf")), TOKENS, rows=4)
    assert relative_error(given, golden["moonlight/prefill"]) <= BOUND
