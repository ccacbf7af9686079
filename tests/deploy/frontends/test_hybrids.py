"""Families with recurrent layers: the logits of Hugging Face's own models, in every kind of step.

A span is 8 or 4 positions with these chunks, so that texts of 20 and 30 tokens cross several
borders.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from tokenizers import Tokenizer
from tokenizers.models import BPE

from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.client.text.generation import generate_tokens
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.lookahead import LookaheadOptions, make_lookahead_decoder
from splitup.decode.step import (
    Decoder,
    StepInput,
    check_path,
    make_block_step,
    make_causal_step,
    make_tree_step,
)
from splitup.graph.manifest import Manifest
from tests.deploy.checkpoints import (
    GOLDEN,
    TOKENS,
    VOCAB,
    compute_checkpoint_digest,
    save_checkpoint,
)
from tests.deploy.execution import CutModel
from tests.deploy.frontends import test_step as promises
from tests.deploy.hybridggufs import save_hybrid
from tests.deploy.hybrids import CASES
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import check_merged, check_together, feed, run_step, step_inputs
from tests.parameters import some_of

BOUND = 1e-5
CHUNK = 8
CHUNKS = {"qwen3.5": CHUNK, "kimi-linear": 4}  # of the compiled families
# in small: both by the reference, and one layer below; kernels of others in test_step.py
COMPILED = [pytest.param(name, marks=pytest.mark.long) for name in ("qwen3.5", "kimi-linear")]
Programs = Callable[[str], TaskProgram]
CONTEXT = 32


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "hybrid_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Files of families with kernels of their own, compiled once for all tests."""
    directory = tmp_path_factory.mktemp("hybrids")

    @functools.cache
    def compile_file(name: str) -> TaskProgram:
        save_hybrid(directory / f"{name}.gguf", CASES[name])
        return load_reference(str(directory / f"{name}.gguf"), Sizes(chunk=CHUNKS[name]))

    return compile_file


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> TaskProgram:
    """One recurrent layer; the families have others, too."""
    change = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    case, path = CASES["qwen3.5"], tmp_path_factory.mktemp("layer")
    save_checkpoint(path, replace(case, change={**case.change, **change}))
    return load_reference(str(path), Sizes(chunk=CHUNK))


SOME = some_of(CASES, "qwen3.5-moe", "kimi-linear")  # the first is qwen3.5, with experts


@pytest.mark.parametrize("name", SOME)
def test_files_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    save_hybrid(tmp_path / "m.gguf", CASES[name])
    logits = feed(load_graph(str(tmp_path / "m.gguf"), Sizes(chunk=1)), TOKENS)
    assert relative_error(logits, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(logits, golden[f"{name}/prefill"]) <= BOUND


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_files_agree(name: str, golden: dict[str, Any], programs: Programs) -> None:
    logits = feed(programs(name), TOKENS)
    assert relative_error(logits, golden[f"{name}/steps"]) <= BOUND
    assert relative_error(logits, golden[f"{name}/prefill"]) <= BOUND


@pytest.mark.parametrize("name", SOME)
def test_directories_agree(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    case = CASES[name]
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(case), "run make_golden.py"
    save_checkpoint(tmp_path, case)
    given = feed(load_graph(str(tmp_path), Sizes(chunk=1)), TOKENS)
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


@pytest.mark.usefixtures("float32_caches")
def test_quantised_files_agree_with_what_they_stand_for(tmp_path: Path) -> None:
    logits = []
    for widened in (False, True):
        save_hybrid(tmp_path / "m.gguf", CASES["qwen3.5"], form="Q8_0", widened=widened)
        logits.append(feed(load_graph(str(tmp_path / "m.gguf"), Sizes(chunk=1)), TOKENS[:6]))
    assert relative_error(*logits) <= BOUND


@pytest.mark.parametrize("name", COMPILED)
def test_chunks_of_every_size_give_the_same_bytes(name: str, programs: Programs) -> None:
    wanted = feed(programs(name), TOKENS)
    for rows in (2, 3, CHUNKS[name]):
        np.testing.assert_array_equal(feed(programs(name), TOKENS, rows), wanted)


class Sequences:
    """The bytes of a row's logits by the sequence that it sees, one token per step."""

    def __init__(self, program: TaskProgram) -> None:
        self._program, self._known = program, dict[tuple[int, ...], bytes]()

    def compute(self, sequence: tuple[int, ...]) -> bytes:
        if sequence not in self._known:
            for end, row in enumerate(feed(self._program, sequence), 1):
                self._known[sequence[:end]] = row.tobytes()
        return self._known[sequence]


def draw_steps(seed: int, chunk: int) -> list[tuple[StepInput, tuple[int, ...]]]:
    """Return random trees, each with the text before it; a random path of each is kept."""
    rng = np.random.default_rng(seed)
    steps: list[tuple[StepInput, tuple[int, ...]]] = []
    text: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    while len(text) < CONTEXT - 4:
        rows = int(rng.integers(1, min(chunk, CONTEXT - len(text)) + 1))
        tokens = [int(token) for token in rng.integers(0, VOCAB, rows)]
        is_tree = rng.random() < 0.6
        parents = [
            int(rng.integers(max(-1, row - 3), row)) if is_tree else row - 1 for row in range(rows)
        ]
        step = make_tree_step(tokens, parents, len(text), kept=kept)
        steps.append((step, text))
        last = int(rng.integers(-1, rows))
        kept = tuple(step.sees[last]) if last >= 0 else ()
        text += tuple(tokens[row] for row in kept)
    return steps


@pytest.mark.parametrize("name", COMPILED)
def test_rows_of_random_trees_equal_sequences(name: str, programs: Programs) -> None:
    program = programs(name)
    sequences, chunk = Sequences(program), program.inputs[0].shape[0]
    for seed in range(4):
        state, last = program.new_state(), None
        for step, text in draw_steps(seed, chunk):
            check_path(step, last)
            given, last = run_step(program, state, step), step
            for row, seen in enumerate(step.sees):
                path = tuple(step.tokens[other] for other in seen)
                assert given[row].tobytes() == sequences.compute(text + path), (seed, step, row)


@pytest.mark.long  # in small: the trees above; decode/test_lookahead.py
def test_lookahead_gives_the_tokens_of_sequential_decoding(program: TaskProgram) -> None:
    def decode(decoder: Decoder) -> tuple[list[int], int]:
        state, tokens, steps = program.new_state(), [], 0
        last: StepInput | None = None
        while not decoder.finished:
            step = decoder.next_step()
            assert step is not None
            check_path(step, last)
            last = step
            tokens += decoder.receive_logits(steps, run_step(program, state, step))
            steps += 1
        return tokens, steps

    request = TextRequest(
        prompt=(3, 9, 4, 3, 9, 4, 3),
        sampler=Sampler(temperature=0.0),
        max_tokens=20,
        eos_ids=frozenset(),
        vocab=VOCAB,
        context=CONTEXT,
        chunk=CHUNK,
    )
    wanted, single = decode(SequentialDecoder(request))
    decoder = make_lookahead_decoder(request, LookaheadOptions(2, 3, 3), clock=lambda: 0.0)
    given, steps = decode(decoder)
    assert given == wanted and len(given) == 20 and steps < single


def test_the_promises_of_all_models_hold(program: TaskProgram) -> None:
    """Memory that no step wrote, and numbers from anybody."""
    promises.test_what_lies_behind_a_step_s_rows_never_matters(program)
    promises.test_any_integers_are_safe(program)


def test_several_sequences_in_one_pass_equal_each_alone(program: TaskProgram) -> None:
    plans = [
        [make_causal_step(TOKENS[:3], 0), make_tree_step(TOKENS[3:6], [-1, 0, 0], 3)],
        [make_causal_step(TOKENS[5:6], 0), make_causal_step(TOKENS[6:8], 1)],
        [make_tree_step(TOKENS[7:11], [-1, 0, -1, 2], 0), make_causal_step(TOKENS[8:9], 2)],
    ]
    plans[0].append(make_tree_step(TOKENS[9:12], [-1, 0, 1], 5, kept=(0, 2)))
    plans[2].append(make_tree_step(TOKENS[7:8], [-1], 3))
    check_together(program, plans)


@pytest.mark.skipif(select_device().renderer != "X86", reason="other devices take single steps")
def test_consecutive_trees_in_one_pass_equal_single_steps(program: TaskProgram) -> None:
    """The state of a recurrent layer lags behind, and is updated at every step."""
    check_merged(program, [step for step, _ in draw_steps(3, 3)])


def test_a_replay_gives_the_same_state(program: TaskProgram) -> None:
    """What failover and verification do: all steps again, from zero, kept rows and all."""
    digests = []
    for _ in range(2):
        state = program.new_state()
        for step, _text in draw_steps(7, CHUNK):
            run_step(program, state, step)
        digests.append(program.compute_state_digest(state))
    assert digests[0] == digests[1]


def test_a_sequence_begins_anew_at_zero(program: TaskProgram) -> None:
    state = program.new_state()
    for start in range(0, 20, 5):
        run_step(program, state, make_causal_step(TOKENS[start : start + 5], start))
    given = promises.continue_one_by_one(program, state, TOKENS, 0)
    assert given == feed(program, TOKENS).tobytes()


@pytest.mark.long  # in small: test_step.py, by other layers
def test_cut_equals_whole(programs: Programs, tmp_path: Path) -> None:
    program = programs("qwen3.5")
    save_hybrid(tmp_path / "m.gguf", CASES["qwen3.5"])
    cut = CutModel(build(str(tmp_path / "m.gguf"), 120_000, sizes=Sizes(chunk=CHUNK)))
    assert len(cut.manifest.tasks) > 2
    assert cut.manifest.text is not None and cut.manifest.text.is_recurrent
    states, state = cut.new_states(), program.new_state()
    for step, _text in draw_steps(3, CHUNK):
        inputs = step_inputs(cut.inputs, step)
        (wanted,) = program.run(state, [inputs[spec.name] for spec in program.inputs])
        assert cut.step(states, inputs)["logits"] == wanted
    for task, compiled in zip(cut.manifest.tasks, cut.programs, strict=True):
        assert compiled.allocated_bytes <= task.vram_bytes


class Blocks:
    """A decoder whose rows all see each other."""

    finished, max_steps = False, 1
    request = TextRequest(
        prompt=tuple(TOKENS[:4]),
        sampler=Sampler(),
        max_tokens=1,
        eos_ids=frozenset(),
        vocab=VOCAB,
        context=CHUNK,
        chunk=CHUNK,
    )

    def next_step(self) -> StepInput:
        return make_block_step(TOKENS[:4], 0)

    def receive_logits(self, step: int, logits: np.ndarray) -> list[int]:
        raise AssertionError("nothing was sent")


class Unused:
    """A session that nothing may be sent over."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def submit(self, arrays: dict[str, np.ndarray]) -> None:
        raise AssertionError("a step was sent")


def test_a_block_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    save_hybrid(tmp_path / "m.gguf", CASES["qwen3.5"])
    session = Unused(build(str(tmp_path / "m.gguf"), 10**9, sizes=Sizes(chunk=CHUNK)).manifest)

    async def generate(tokenizer: ModelTokenizer) -> None:
        async for _ in generate_tokens(session, Blocks(), tokenizer):  # type: ignore[arg-type]
            raise AssertionError("a token came")

    with closing(ModelTokenizer(Tokenizer(BPE()).to_str().encode(), "m")) as tokenizer:
        with pytest.raises(InvalidInput, match="no blocks that see themselves"):
            asyncio.run(generate(tokenizer))


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen3.5", "qwen35.ssm.inner_size", 47, "4 value heads of 47 in all"),
        ("qwen3.5", "qwen35.ssm.time_step_rank", 0, "0 value heads of 48"),
        ("qwen3.5", "qwen35.ssm.group_count", 3, "4 value heads on 3 key heads"),
        ("qwen3.5", "qwen35.ssm.conv_kernel", 1, "a convolution over 1 tokens"),
        ("qwen3.5", "qwen35.ssm.conv_kernel", 5, r"'blk\.0\.ssm_conv1d\.weight'.*want"),
        ("qwen3.5", "qwen35.rope.dimension_count", 18, "turns 18 of a head's 16"),
        ("qwen3.5", "qwen35.attention.head_count", 3, "3 heads of 16; its query has 64 rows"),
        ("qwen3.5", "qwen35.full_attention_interval", 3, r"no tensor 'blk\.1\.attn_qkv\.weight'"),
        ("qwen3.5", "qwen35.ssm.dt_b_c_rms", True, "which is unknown"),
        ("kimi-linear", "kimi-linear.attention.head_count_kv", [0, 2, 0], "a list of 0 and 1"),
        ("kimi-linear", "kimi-linear.attention.head_count_kv", 1, "a list of 0 and 1"),
        ("kimi-linear", "kimi-linear.attention.head_count_kv", [0, 1], "the numbers 1 to 3"),
        ("kimi-linear", "kimi-linear.kda.head_dim", 6, r"'blk\.0\.attn_q\.weight'.*want"),
        ("kimi-linear", "kimi-linear.expert_gating_func", 1, "expert_gating_func"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(
    name: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    save_hybrid(tmp_path / "m.gguf", CASES[name], {key: value})
    with pytest.raises(InvalidModel, match=message):
        load_reference(str(tmp_path / "m.gguf"), Sizes(chunk=4))
