"""The static graph gives the logits of the model that is cut for the market, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from edge_tests.export.static_runs import feed_static, open_static, run_numpy
from splitup_deploy.frontends.onnx.graph_file import read_onnx
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from splitup_edge.export.onnx_file import write_onnx

from splitup.core.errors import InvalidInput, InvalidModel
from splitup.decode.step import make_block_step, make_causal_step, make_tree_step
from tests.deploy import moes
from tests.deploy.blocks import BLOCK, SDAR, save_blocks
from tests.deploy.checkpoints import CASES, GOLDEN, TOKENS, save_checkpoint
from tests.deploy.hybrids import CASES as HYBRIDS
from tests.deploy.llamas import relative_error, save_llama
from tests.deploy.mixtures import CASES as MIXTURES
from tests.deploy.steps import run_step
from tests.deploy.variations import CASES as VARIATIONS

BOUND = 1e-5


def check_logits(
    directory: Path, wanted: np.ndarray, tokens: Sequence[int] = TOKENS, context: int = 32
) -> None:
    """Feed one row a step, and chunks of eight with a shorter last one."""
    for block in (1, 8):
        model, shape = open_static(directory, context, block)
        steps = []
        for start in range(0, len(tokens), block):
            rows = tokens[start : start + block]
            steps.append(make_causal_step(rows, start, outputs=range(len(rows))))
        given, _ = feed_static(run_numpy(model), shape, steps)
        assert relative_error(np.concatenate(given), wanted) <= BOUND


VARIED = ("olmo3", "minimax-m2")  # the only ones of these families without a part of their own
GOLDEN_LOGITS = {
    **dict.fromkeys(CASES, "logits"),
    **dict.fromkeys(("olmoe", "glm4-moe"), "mixture_logits"),
    **dict.fromkeys(VARIED, "variation_logits"),
}


@pytest.mark.parametrize("name", GOLDEN_LOGITS)
def test_every_family_gives_its_logits(name: str, tmp_path: Path) -> None:
    """Against Hugging Face's; those with experts include biases, scales and shared experts."""
    case = {**CASES, **MIXTURES, **VARIATIONS}[name]
    save_checkpoint(tmp_path, case)
    with np.load(GOLDEN / f"{GOLDEN_LOGITS[name]}.npz", allow_pickle=False) as golden:
        check_logits(tmp_path, golden[f"{name}/prefill"], context=case.context or 32)


@pytest.mark.parametrize("name", moes.CASES)
def test_experts_that_are_all_computed_count_by_their_gates(name: str, tmp_path: Path) -> None:
    """Some layers are dense; experts 0 and 1 have equal scores, and the first is chosen before."""
    config = moes.CASES[name]
    weights = moes.make_weights(config)
    for key in weights:
        if key.endswith((".mlp.gate.weight", "moe.gate.weight")):
            weights[key][1] = weights[key][0]
    moes.save_moe(tmp_path, config, weights=weights)
    tokens = moes.TOKENS
    check_logits(tmp_path, moes.compute_logits(config, weights, tokens), tokens, context=16)


@pytest.mark.long  # in small: above, the file by NumPy
def test_the_market_computes_the_file_as_it_computes_the_model(tmp_path: Path) -> None:
    """Prefill of two blocks, a block denoised twice, its commit: all in one file, by tinygrad."""
    save_blocks(tmp_path / "model", {**SDAR, "num_hidden_layers": 1})
    model, shape = open_static(tmp_path / "model", 16, 2 * BLOCK)
    file = tmp_path / "static.onnx"
    with file.open("wb") as stream:
        stream.writelines(write_onnx(model))
    again = read_onnx(file)
    assert again.graph.nodes == model.graph.nodes and again.graph.inputs == model.graph.inputs
    program = load_reference(str(file))

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = [np.ascontiguousarray(inputs[port.name]).tobytes() for port in program.inputs]
        made = program.run(program.new_state(), given)
        return {
            port.name: np.frombuffer(data, np.float32).reshape(port.shape)
            for port, data in zip(program.outputs, made, strict=True)
        }

    mask = SDAR["mask_token_id"]
    steps = [
        make_block_step([3, 17, 39, 0, 8, 8, 25, 31], 0, block_size=BLOCK),
        make_block_step([mask] * 4, 8),
        make_block_step([2, mask, 5, mask], 8),
        make_block_step([2, 9, 5, 11], 8),
        make_block_step([mask] * 4, 12),
    ]
    commits = [True, False, False, True, False]
    given, _ = feed_static(run, shape, steps, commits=commits)
    dynamic = load_reference(str(tmp_path / "model"), Sizes(context=16, chunk=2 * BLOCK))
    state = dynamic.new_state()
    for step, logits in zip(steps, given, strict=True):
        assert relative_error(logits, run_step(dynamic, state, step)) <= BOUND


def test_an_iteration_leaves_the_cache_and_trees_keep_their_rows(tmp_path: Path) -> None:
    """A tree of which one branch stays gives the logits of the sequence alone."""
    save_llama(tmp_path, {"max_position_embeddings": 16})
    model, shape = open_static(tmp_path, 16, 6)
    run = run_numpy(model)
    start = make_causal_step([5, 6, 7], 0)
    _, before = feed_static(run, shape, [start])
    _, after = feed_static(run, shape, [start, make_block_step([9] * 4, 3)], commits=[True, False])
    assert before.tobytes() == after.tobytes()
    tree = make_tree_step([8, 1, 2, 3, 4], [-1, 0, 0, 2, 1], 3)  # 8 2 3 stay
    last = make_tree_step([11], [-1], 6, kept=(0, 2, 3))
    given, _ = feed_static(run, shape, [start, tree, last])
    wanted, _ = feed_static(
        run,
        shape,
        [make_causal_step([5, 6, 7, 8, 2, 3], 0, outputs=[5]), make_causal_step([11], 6)],
    )
    assert relative_error(given[1][3:4], wanted[0]) <= BOUND
    assert relative_error(given[2], wanted[1]) <= BOUND


@pytest.mark.parametrize("name", sorted(VARIATIONS.keys() - set(VARIED)))
def test_a_part_that_the_graph_lacks_is_refused_and_never_left_out(
    name: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, VARIATIONS[name])
    with pytest.raises(InvalidModel, match=r"^the model has .*, which a static graph does not"):
        open_static(tmp_path, 8, 4)


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    save_llama(tmp_path / "llama", {"max_position_embeddings": 16})
    model, shape = open_static(tmp_path / "llama", 8, 4)
    run = run_numpy(model)
    with pytest.raises(InvalidInput, match=r"needs 9 positions.* 8: shorten it, or .*--max-len 9"):
        feed_static(run, shape, [make_causal_step([1] * 3, 6)])
    with pytest.raises(InvalidInput, match="5 rows, and the model was exported for 4"):
        feed_static(run, shape, [make_causal_step([1] * 5, 0)], chunk=8)
    with pytest.raises(InvalidModel, match="context 17 is not possible; the model takes 1 to 16"):
        open_static(tmp_path / "llama", 17, 4)
    with pytest.raises(InvalidModel, match="block of 9 rows does not fit 8 positions"):
        open_static(tmp_path / "llama", 8, 9)
    for name, part in (("deepseek-v2", "latent attention"), ("qwen3.5", "recurrent layers")):
        save_checkpoint(tmp_path / name, {**MIXTURES, **HYBRIDS}[name])
        with pytest.raises(InvalidModel, match=f"has {part}, which a static graph does not hold"):
            open_static(tmp_path / name, 8, 4)
