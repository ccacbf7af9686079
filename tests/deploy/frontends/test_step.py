"""The promises of the step function, on whole models: one artefact for every kind of decoding.

Rows of logits are compared bit for bit, wherever a row saw the same sequence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.buffers import make_writer
from splitup.backend.devices.device_choice import select_device
from splitup.backend.launching import NativeCall
from splitup.backend.runtime import State, TaskProgram
from splitup.core.tensors import TensorSpec
from splitup.cpu.native_kernels import is_supported
from splitup.decode.step import (
    StepInput,
    make_block_step,
    make_causal_step,
    make_tree_step,
)
from tests.deploy.checkpoints import CASES, save_checkpoint
from tests.deploy.execution import CutModel
from tests.deploy.ggufs import save_gguf
from tests.deploy.llamas import EXAMPLE, compute_logits, load_example, relative_error
from tests.deploy.moes import QWEN3_MOE, save_moe
from tests.deploy.steps import check_merged, check_together, feed, run_step, step_inputs

# experts and their gates are in test_moe.py and test_mixtures.py, too
MODELS = (
    *(pytest.param(name, marks=pytest.mark.long) for name in ("packages-4m", "qwen3-moe")),
    "gemma3",
)
LENGTH = 15  # twice gemma3's window of 6, and within the context of 16 of the smallest
_EXTREMES = (0, 1, -1, 2, 5, 63, 64, 65, 255, 256, 2**31 - 1, -(2**31), 2**30, -7)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    save_checkpoint(directory / "gemma3", CASES["gemma3"])
    save_moe(directory / "qwen3-moe", QWEN3_MOE)
    return {
        "packages-4m": EXAMPLE,
        "gemma3": directory / "gemma3",
        "qwen3-moe": directory / "qwen3-moe",
    }


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Path:
    return paths[request.param]


@pytest.fixture(scope="module")
def program(path: Path) -> TaskProgram:
    return load_reference(str(path))


def draw_tokens(program: TaskProgram, count: int = LENGTH, seed: int = 5) -> list[int]:
    vocab = program.outputs[0].shape[1]
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def prefill(program: TaskProgram, tokens: list[int]) -> State:
    state = program.new_state()
    run_step(program, state, make_causal_step(tokens, 0))
    return state


def continue_one_by_one(
    program: TaskProgram, state: State, tokens: list[int], start: int, kept: tuple[int, ...] = ()
) -> bytes:
    """Return the logits of single rows; ``kept`` are the rows that stay of the step before."""
    rows = []
    for place, token in enumerate(tokens, start):
        step = make_tree_step([token], [-1], place, kept=kept if place == start else ())
        rows.append(run_step(program, state, step))
    return np.concatenate(rows).tobytes()


def test_chunks_of_every_size_give_the_same_bytes(program: TaskProgram) -> None:
    tokens = draw_tokens(program)
    wanted = feed(program, tokens, rows=1)
    for rows in (2, 7, LENGTH):
        np.testing.assert_array_equal(feed(program, tokens, rows), wanted)
    assert program.allocated_bytes <= program.vram_bytes


@pytest.mark.long  # in small: chunks of every size above
def test_a_chunk_of_one_row_needs_no_symbols(path: Path, program: TaskProgram) -> None:
    single = load_reference(str(path), Sizes(chunk=1))
    assert not any(spec.rows for spec in (*single.inputs, *single.outputs))
    tokens = draw_tokens(program)[:6]
    given, wanted = feed(single, tokens), feed(program, tokens)
    assert relative_error(given, wanted) <= 1e-5  # other kernels: not bit for bit


def draw_plan(program: TaskProgram, seed: int) -> list[StepInput]:
    """Return sequences, trees with rows kept, blocks and steps back, with random rows wanted."""
    rng = np.random.default_rng(seed)
    plan: list[StepInput] = []
    start, kept, last = 0, tuple[int, ...](), 0
    for _ in range(14):
        rows = int(rng.integers(1, 5))
        tokens, kind = draw_tokens(program, rows, int(rng.integers(99))), rng.random()
        outputs = [int(row) for row in rng.integers(0, rows, rng.integers(1, 3))]
        if kind < 0.4 or start + rows > LENGTH - 1:
            start = min(start, LENGTH - 5)
            step = make_tree_step(tokens, [*range(-1, rows - 1)], start, outputs)
        elif kind < 0.8:
            parents = [int(rng.integers(-1, row)) if row else -1 for row in range(rows)]
            step = make_tree_step(tokens, parents, start, outputs, kept)
        else:
            step = make_block_step(tokens, start, outputs)
        plan.append(step)
        kept = tuple(step.sees[int(rng.integers(rows))]) if 0.4 <= kind < 0.8 else ()
        last, start = start, start + (len(kept) or int(rng.integers(rows + 1)))
        if rng.random() < 0.1:
            start, kept = last, ()
    return plan


@pytest.mark.skipif(select_device().renderer != "X86", reason="other devices take single steps")
def test_consecutive_steps_in_one_pass_equal_single_steps(program: TaskProgram) -> None:
    for seed in range(3):
        check_merged(program, draw_plan(program, seed))


def test_only_the_wanted_rows_come_back_in_any_order(program: TaskProgram) -> None:
    tokens = draw_tokens(program)
    wanted = feed(program, tokens, rows=1)
    given = run_step(program, program.new_state(), make_causal_step(tokens, 0, (9, 0, 9)))
    np.testing.assert_array_equal(given, wanted[[9, 0, 9]])


def test_a_tree_and_then_keep_equal_the_sequence(program: TaskProgram) -> None:
    """The accepted path lies scattered in the tree; its rows, and all that follows, are equal."""
    tokens = draw_tokens(program)
    wanted = feed(program, tokens, rows=1)
    start, wrong = 7, 3
    a, b, c, d = tokens[start : start + 4]
    #        0  1      2  3      4      5  6      7
    tree = [a, wrong, b, wrong, wrong, c, wrong, d]
    parents = [-1, 0, 0, 1, 2, 2, -1, 5]
    path = (0, 2, 5, 7)
    state = prefill(program, tokens[:start])
    given = run_step(program, state, make_tree_step(tree, parents, start))
    np.testing.assert_array_equal(given[list(path)], wanted[start : start + 4])
    rest = continue_one_by_one(program, state, tokens[start + 4 :], start + 4, kept=path)
    assert rest == wanted[start + 4 :].tobytes()


def test_a_shorter_path_is_kept_as_well(program: TaskProgram) -> None:
    tokens = draw_tokens(program)
    wanted = feed(program, tokens, rows=1)
    state = prefill(program, tokens[:5])
    tree = [9, tokens[5], 9, tokens[6], 9]
    run_step(program, state, make_tree_step(tree, [-1, -1, 1, 1, 3], 5))
    rest = continue_one_by_one(program, state, tokens[7:], 7, kept=(1, 3))
    assert rest == wanted[7:].tobytes()


def test_rejected_rows_leave_no_trace(program: TaskProgram) -> None:
    tokens = draw_tokens(program)
    wanted = feed(program, tokens, rows=1)
    state = prefill(program, tokens[:6])
    for seed in (1, 2):
        noise = draw_tokens(program, 8, seed)
        run_step(program, state, make_tree_step(noise, [-1, 0, 0, 1, 1, 2, 2, -1], 6))
        run_step(program, state, make_block_step(noise, 6))
    assert continue_one_by_one(program, state, tokens[6:], 6) == wanted[6:].tobytes()
    # going back behind what counted before is allowed too
    assert continue_one_by_one(program, state, tokens[3:], 3) == wanted[3:].tobytes()


def test_windows_of_lookahead_equal_sequences(program: TaskProgram) -> None:
    """A column sees the first level up to itself, then its own levels."""
    tokens = draw_tokens(program)
    state = prefill(program, tokens[:4])
    base, columns = draw_tokens(program, 3, 8), draw_tokens(program, 3, 9)
    rows = [tokens[4], *base, *columns]
    sees = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 4), (0, 1, 2, 5), (0, 1, 2, 3, 6)]
    positions = (4, 5, 6, 7, 6, 7, 8)
    step = StepInput(tuple(rows), positions, 4, tuple(sees), tuple(range(7)))
    given = run_step(program, state, step)
    for row, seen in enumerate(sees):
        sequence = tokens[:4] + [rows[other] for other in seen]
        np.testing.assert_array_equal(given[row], feed(program, sequence)[-1])


@pytest.mark.long  # in small: test_block_diffusion.py
def test_blocks_that_see_themselves_equal_numpy(paths: dict[str, Path]) -> None:
    """Block diffusion: a prompt, two blocks that are each denoised twice, the first one kept."""
    program = load_reference(str(paths["packages-4m"]), Sizes(chunk=8))
    tokens = draw_tokens(program, 13)
    config, weights = load_example()
    state = prefill(program, tokens[:5])
    for start in (5, 9):
        block = tokens[start : start + 4]
        run_step(program, state, make_block_step([7, 8, 9, block[3]], start))  # a first guess
        given = run_step(program, state, make_block_step(block, start))
        seen = np.tri(start + 4, dtype=bool)
        for first in range(5, start + 4, 4):
            seen[first : first + 4, first : first + 4] = True
        wanted = compute_logits(config, weights, tokens[: start + 4], seen, "float16")[start:]
        assert relative_error(given, wanted) <= 5e-5


def test_a_local_layer_sees_its_window_of_positions_in_a_tree(paths: dict[str, Path]) -> None:
    """Deeper than the window of 6, so that rows of the same step fall out of it."""
    program = load_reference(str(paths["gemma3"]))
    tokens = draw_tokens(program, 12)
    wanted = feed(program, tokens, rows=1)
    tree = [token for pair in zip(tokens[2:], reversed(tokens[2:]), strict=True) for token in pair]
    parents = [-1, -1, *(2 * (row // 2) - 2 for row in range(2, len(tree)))]
    given = run_step(program, prefill(program, tokens[:2]), make_tree_step(tree, parents, 2))
    np.testing.assert_array_equal(given[::2], wanted[2:])


def test_cut_equals_whole_in_every_kind_of_step(path: Path, program: TaskProgram) -> None:
    target = {"packages-4m": 3_000_000, "gemma3": 90_000, "qwen3-moe": 60_000}[path.name]
    cut = CutModel(build(str(path), target))
    assert len(cut.manifest.tasks) > 3
    states, state = cut.new_states(), program.new_state()
    tokens = draw_tokens(program)
    steps = [
        make_causal_step(tokens[:5], 0),
        make_tree_step(tokens[5:10], [-1, 0, 0, 2, -1], 5),
        make_tree_step([tokens[7]], [-1], 8, kept=(0, 2, 3)),
        make_block_step(tokens[:4], 9),
        make_block_step(tokens[4:8], 9, (3,)),
        make_causal_step(tokens[:2], 13, (1, 0)),
    ]
    for step in steps:
        inputs = step_inputs(cut.inputs, step)
        (wanted,) = program.run(state, [inputs[spec.name] for spec in program.inputs])
        assert cut.step(states, inputs)["logits"] == wanted
    for task, compiled in zip(cut.manifest.tasks, cut.programs, strict=True):
        assert compiled.allocated_bytes <= task.vram_bytes


def test_a_step_sends_one_tensor_of_the_layout_to_each_attention(path: Path) -> None:
    compiled = build(str(path), 10**9)
    (task,) = compiled.manifest.tasks
    assert [port.name for port in task.inputs] == ["tokens", "layout", "outputs"]
    assert [port.rows for port in compiled.manifest.inputs] == ["T", "T", "R"]
    assert compiled.manifest.outputs[0].rows == "R"


def test_what_lies_behind_a_step_s_rows_never_matters(program: TaskProgram) -> None:
    """NaN in all memory that the step does not write first: 0 times it would be NaN again.

    The other copy of a KV cache is not among it: it is known to hold most of the rows.
    """
    tokens = draw_tokens(program)
    wanted = feed(program, tokens, rows=1)
    state = prefill(program, tokens[:5])
    start = 5
    for rows in (1, 3, 2, 1):
        for buffer in (*program._buffers["input"], *program._buffers["value"]):
            make_writer(buffer)(b"\xff" * buffer.nbytes)
        step = make_causal_step(tokens[start : start + rows], start, range(rows))
        given = run_step(program, state, step)
        assert given.tobytes() == wanted[start : start + rows].tobytes()
        start += rows


@pytest.mark.skipif(not is_supported(), reason="needs x86-64 with AVX2, FMA and F16C")
def test_no_cache_is_written_as_a_whole(program: TaskProgram) -> None:
    calls = [call for call in program._calls if isinstance(call, NativeCall)]
    writes = [call for call in calls if call.updated is not None]
    assert len(writes) == len(program.states) > 0


def test_any_integers_are_safe(program: TaskProgram) -> None:
    """Numbers from anybody select zeros or nothing; the rows that count later are not harmed."""
    rng = np.random.default_rng(3)
    specs = {spec.name: spec for spec in program.inputs}
    tokens = draw_tokens(program)
    wanted = feed(program, tokens, rows=1)
    state = program.new_state()

    def draw(spec: TensorSpec, rows: int) -> bytes:
        return rng.choice(_EXTREMES, (rows, *spec.shape[1:])).astype(np.int32).tobytes()

    for _ in range(12):
        rows, count = (int(n) for n in rng.integers(1, min(specs["tokens"].shape[0], 8) + 1, 2))
        step = [
            draw(specs["tokens"], rows),
            draw(specs["layout"], rows),
            draw(specs["outputs"], count),
        ]
        (data,) = program.run(state, step)
        assert np.isfinite(np.frombuffer(data, np.float32)).all()
    assert continue_one_by_one(program, state, tokens, 0) == wanted.tobytes()


def check_batches(program: TaskProgram) -> None:
    """Run chunks, trees with kept rows and single rows in batches of changing company."""
    tokens = draw_tokens(program)
    plans = [
        [make_causal_step(tokens[:4], 0, (3, 0)), make_tree_step(tokens[4:7], [-1, 0, 0], 4)],
        [make_causal_step(tokens[2:3], 0), make_causal_step(tokens[3:4], 1)],
        [make_tree_step(tokens[5:9], [-1, 0, -1, 2], 0), make_causal_step(tokens[:2], 2)],
        [make_block_step(tokens[6:9], 0), make_causal_step(tokens[3:5], 3, (1,))],
    ]
    plans[0].append(make_tree_step(tokens[9:10], [-1], 6, kept=(0, 2)))
    plans[2].append(make_tree_step(tokens[7:8], [-1], 4, kept=(0, 1)))
    check_together(program, plans)


def test_steps_of_several_sequences_together_equal_each_alone(program: TaskProgram) -> None:
    check_batches(program)


@pytest.mark.long  # in small: above; products in cpu/test_matmul_match.py
def test_quantised_steps_together_equal_each_alone(tmp_path: Path) -> None:
    forms = {"": "Q8_0", "attn_v": "Q4_0", "token_embd": "Q4_0", "ffn_down": "F16"}
    save_gguf(tmp_path / "m.gguf", {"intermediate_size": 64, "num_hidden_layers": 1}, forms=forms)
    check_batches(load_reference(str(tmp_path / "m.gguf")))


@pytest.mark.long  # in small: above, without norms of heads
def test_qwen3_steps_together_equal_each_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES["qwen3"])
    check_batches(load_reference(str(tmp_path)))
