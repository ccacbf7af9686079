"""Routers, shared experts and compressed attention: the logits of Hugging Face's own models."""

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
