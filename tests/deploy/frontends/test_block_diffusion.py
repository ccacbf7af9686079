"""Models that write blocks of tokens: their configurations, their logits, and a cut one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.showing.families import list_families, render_families
from splitup_deploy.uncut_model import load_reference

from splitup.core.errors import InvalidModel
from splitup.decode.step import make_block_step
from splitup.graph.manifest import DiffusionInfo
from splitup.graph.manifest_rules import load_manifest
from tests.deploy.blocks import BLOCK, CASES, GOLDEN, MASK, SDAR, TOKENS, save_blocks
from tests.deploy.checkpoints import CASES as CHECKPOINTS
from tests.deploy.execution import CutReference
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import run_step, step_inputs


@pytest.mark.parametrize("name", CASES)
def test_blocks_give_the_logits_of_a_block_causal_mask(name: str, tmp_path: Path) -> None:
    """Two blocks of the prompt in one step, then a block that is denoised twice."""
    with np.load(GOLDEN, allow_pickle=False) as golden:
        wanted = golden[name]
    save_blocks(tmp_path, CASES[name])
    # experts, compiled, are in test_moe.py
    program = load_reference(str(tmp_path)) if name == "sdar" else load_graph(str(tmp_path))
    state = program.new_state()
    given = run_step(program, state, make_block_step(TOKENS[:8], 0, block_size=BLOCK))
    assert relative_error(given, wanted[:8]) <= 1e-5
    run_step(program, state, make_block_step([MASK] * 4, 8))  # leaves no trace
    given = run_step(program, state, make_block_step(TOKENS[8:], 8))
    assert relative_error(given, wanted[8:]) <= 1e-5


def test_a_cut_model_gives_the_bytes_of_the_whole(tmp_path: Path) -> None:
    save_blocks(tmp_path, SDAR)
    compiled = build(str(tmp_path), 45_000, sizes=Sizes(chunk=8))
    cut, whole = CutReference(compiled), load_graph(str(tmp_path), Sizes(chunk=8))
    assert len(cut.manifest.tasks) >= 4
    states, state = cut.new_states(), whole.new_state()
    for step in (
        make_block_step(TOKENS[:8], 0, (7,), block_size=BLOCK),
        make_block_step([MASK] * 4, 8),
        make_block_step(TOKENS[8:], 8),
    ):
        inputs = step_inputs(cut.inputs, step)
        (wanted,) = whole.run(state, [inputs[spec.name] for spec in whole.inputs])
        assert cut.step(states, inputs)["logits"] == wanted


def test_the_manifest_says_how_blocks_are_written(tmp_path: Path) -> None:
    save_blocks(tmp_path, SDAR)
    manifest = build(str(tmp_path), 10**9).manifest
    assert manifest.text is not None and manifest.text.diffusion is not None
    assert manifest.text.diffusion == DiffusionInfo(block_size=BLOCK, mask_id=MASK)
    assert load_manifest(manifest.to_bytes()) == manifest
    text, info = manifest.text, manifest.text.diffusion
    for change, message in (
        ({"mask_id": text.vocab}, "outside the vocabulary"),
        ({"block_size": 17}, "a block of 17 tokens does not fit a step of 16"),
    ):
        wrong = text.model_copy(update={"diffusion": info.model_copy(update=change)})
        with pytest.raises(InvalidModel, match=message):
            load_manifest(manifest.model_copy(update={"text": wrong}).to_bytes())


def test_the_families_say_what_writes_blocks() -> None:
    rows = list_families()
    assert {row["architecture"] for row in rows if row["decoder"] == "diffusion"} == {
        "SDARForCausalLM",
        "SDARMoeForCausalLM",
        "Fast_dLLM_QwenForCausalLM",
    }
    assert "SDARForCausalLM" in str(text := render_families(rows)) and "--decoder" in str(text)


def test_fast_dllm_is_a_qwen2_with_shifted_logits() -> None:
    plain = CHECKPOINTS["qwen2-yarn"].config
    config = {**plain, "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 8}
    given = parse_config({**config, "mask_token_id": 0}, None)
    info = DiffusionInfo(block_size=8, mask_id=0, are_shifted=True)
    assert given == replace(parse_config(plain, None), diffusion=info)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 40}, "mask token 40 and a vocabulary of 40"),
        ({"mask_token_id": None}, "mask token 151669 and a vocabulary of 40: write"),
        ({"block_size": 0}, "block_size = 0; a positive integer"),
        ({"block_size": 32}, "a block of 32 tokens does not fit a context of 16"),
        ({"block_length": 8}, "another block_length than block_size"),
        ({"use_regular_causal": True}, "'use_regular_causal', which means nothing"),
    ],
)
def test_wrong_blocks_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_blocks(tmp_path, SDAR)
    (tmp_path / "config.json").write_text(json.dumps({**SDAR, **change}))
    with pytest.raises(InvalidModel, match=message):
        load_reference(str(tmp_path))


def test_a_step_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    save_blocks(tmp_path, SDAR)
    with pytest.raises(InvalidModel, match="blocks of 4 tokens, which do not fit a step of 3 rows"):
        load_reference(str(tmp_path), Sizes(chunk=3))
