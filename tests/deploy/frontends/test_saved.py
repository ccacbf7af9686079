"""Checkpoints of every family as versions of Hugging Face's library save them.

They are the graphs of the checkpoints whose logits the tests of the families compare.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.source_model import Sizes

from tests.deploy.saved import CASES, SAVED, save_again, save_case
from tests.parameters import some_of

VERSIONS = json.loads(SAVED.read_text())
SIZES = Sizes(chunk=1)


SOME = some_of(CASES, "llama", "gemma3", "gemma4-moe", "qwen3.5-moe", "mixtral", "nemotron-h")


@pytest.mark.parametrize("name", SOME)
def test_every_version_s_checkpoint_is_the_same_model(name: str, tmp_path: Path) -> None:
    save_case(name, tmp_path)
    wanted = load_model(str(tmp_path), SIZES).traced.graph.to_bytes()
    found = [saved[name] for saved in VERSIONS.values() if name in saved]
    assert found, "run make_saved.py"
    for saved in found:
        save_case(name, tmp_path)
        save_again(tmp_path, saved)
        assert load_model(str(tmp_path), SIZES).traced.graph.to_bytes() == wanted
