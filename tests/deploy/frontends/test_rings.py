"""Layers that keep the rows of a window give the bytes of a cache of all positions.

With a chunk of 5 and a window of 3 a ring has 17 rows; texts have 32 positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.decoder import caches
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.buffers import make_reader, make_writer
from splitup.backend.runtime import State, TaskProgram
from splitup.client.text.drafting import Speculation
from splitup.client.text.generation import make_cache_contents
from splitup.decode.cache_contents import CacheContents
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.lookahead import LookaheadOptions, make_lookahead_decoder
from splitup.decode.step import (
    Decoder,
    StepInput,
    make_block_step,
    make_causal_step,
    make_tree_step,
)
from tests.deploy.checkpoints import CASES, TOKENS, VOCAB, save_checkpoint
from tests.deploy.execution import CutModel
from tests.deploy.frontends import test_step as promises
from tests.deploy.steps import check_together, feed, run_step, step_inputs

CHUNK, WINDOW, CONTEXT = 5, 3, 32
BACK, RING = 2 * CHUNK, WINDOW - 1 + 3 * CHUNK
CASE = CASES["qwen3"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose layers see a window and all positions in turn."""
    change = {
        **CASE.change,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    }
    path = tmp_path_factory.mktemp("window")
    save_checkpoint(path, replace(CASE, change=change))
    return path


@pytest.fixture(scope="module")
def ring(directory: Path) -> TaskProgram:
    return load_reference(str(directory), Sizes(chunk=CHUNK))


@pytest.fixture(scope="module")
def full(directory: Path) -> TaskProgram:
    """Return the same model with a cache row for every position in every layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "count_ring_rows", lambda *_: 0)
        return load_reference(str(directory), Sizes(chunk=CHUNK))


def draw_steps(seed: int, count: int) -> Iterator[StepInput]:
    """Yield sequences, trees and blocks that continue, keep a path, go back, or start at 0."""
    rng = np.random.default_rng(seed)
    contents = CacheContents(steps_back=BACK)
    furthest, paths, start = 0, [()], 0
    for _ in range(count):
        path = paths[rng.integers(len(paths))]
        turn = rng.random()
        if turn < 0.3 and start:
            least = max(1, furthest - BACK)
            start, path = int(rng.integers(least, max(least, start) + 1)), ()
        elif turn < 0.34 or start + len(path) > CONTEXT - CHUNK:
            start, path = 0, ()
        start += len(path)
        furthest = max(furthest, start) if start else 0
        rows = int(rng.integers(1, CHUNK + 1))
        tokens = [int(token) for token in rng.integers(0, VOCAB, rows)]
        if rng.random() < 0.2 and not path:
            step = make_block_step(tokens, start)
            paths = [(), tuple(range(rows))]
        else:
            parents = [int(rng.integers(max(-1, row - 2), row)) for row in range(rows)]
            step = make_tree_step(tokens, parents, start, kept=path)
            paths = [(), *(tuple(seen) for seen in step.sees)]
        contents.feed(step)
        yield step


@pytest.mark.long  # in small: below, in chunks
def test_steps_of_every_kind_give_the_bytes_of_a_full_cache(
    ring: TaskProgram, full: TaskProgram
) -> None:
    assert [spec.shape[0] for spec in full.states] == [CONTEXT] * 2
    saved = 2 * (CONTEXT - RING) * 4 * int(np.prod(full.states[0].shape[1:]))
    assert saved * 0.9 < full.vram_bytes - ring.vram_bytes
    assert saved * 0.9 < full.allocated_bytes - ring.allocated_bytes
    for seed in range(6):
        states = ring.new_state(), full.new_state()
        for number, step in enumerate(draw_steps(seed, 60)):
            given, wanted = run_step(ring, states[0], step), run_step(full, states[1], step)
            assert given.tobytes() == wanted.tobytes(), (seed, number, step)


def test_chunks_of_every_size_give_the_same_bytes(ring: TaskProgram) -> None:
    wanted = feed(ring, TOKENS)
    for rows in (2, 3, CHUNK):
        np.testing.assert_array_equal(feed(ring, TOKENS, rows), wanted)


def test_memory_is_what_was_predicted(ring: TaskProgram) -> None:
    assert ring.allocated_bytes <= ring.vram_bytes
    sizes = {spec.name: spec.shape[0] for spec in ring.states}
    assert sizes == {"layers.0.furthest": 1, "layers.0.kv": RING, "layers.1.kv": CONTEXT}


def test_the_promises_of_all_models_hold(ring: TaskProgram) -> None:
    """Memory that no step wrote, and numbers from anybody."""
    promises.test_what_lies_behind_a_step_s_rows_never_matters(ring)
    promises.test_any_integers_are_safe(ring)


def read_state(program: TaskProgram, state: State, name: str) -> np.ndarray:
    place = [spec.name for spec in program.states].index(name)
    data = make_reader(state._buffers[state._parity][place])()
    return np.frombuffer(data, np.float32).reshape(program.states[place].shape)


def test_who_goes_back_too_far_gets_the_same_bytes_from_everybody(ring: TaskProgram) -> None:
    """The result follows from the execution's own steps, whatever else the program has computed."""
    steps = [make_causal_step(TOKENS[:4], start) for start in range(0, 24, 4)]
    steps += [make_causal_step([token], place) for place, token in enumerate(TOKENS[:6], 4)]
    steps += [make_tree_step(TOKENS[:3], [-1, 0, 0], 27), make_causal_step(TOKENS[:1], 28)]
    others = [make_causal_step([token], place) for place, token in enumerate(TOKENS)]
    check_together(ring, [steps, others])
    results = []
    for fill in (0x00, 0xFF):
        for buffer in (*ring._buffers["input"], *ring._buffers["value"]):
            make_writer(buffer)(bytes([fill]) * buffer.nbytes)
        state = ring.new_state()
        logits = [run_step(ring, state, step).tobytes() for step in steps]
        results.append((logits, ring.compute_state_digest(state)))
    assert results[0] == results[1]


def test_rows_that_are_gone_are_not_seen(ring: TaskProgram) -> None:
    """With a furthest start of 20, rows from 20 + 5 - 17 = 8 on are held."""
    state = ring.new_state()
    for start in range(0, 25, 5):
        run_step(ring, state, make_causal_step(TOKENS[:5], start))
    for start, wanted in ((10, range(8, 11)), (4, [4]), (5, [5])):
        run_step(ring, state, make_causal_step([7], start))
        rows = read_state(ring, state, "layers.0.kv")
        held = [place for place in range(24) if rows[place % RING].any() and place <= start]
        assert held == list(wanted)


def test_every_decoder_keeps_the_bound(directory: Path, ring: TaskProgram) -> None:
    """All decoders say the same, text after text on one cache."""
    manifest = build(str(directory), 10**9, sizes=Sizes(chunk=CHUNK)).manifest
    assert manifest.text is not None and manifest.text.steps_back == BACK
    prompts = ([3, 9, 4, 3, 9, 4, 3], [3, 9, 4, 3, 9, 4, 3, 9, 9, 1], [3, 9, 5])

    def decode(decoder: Decoder, state: State, contents: CacheContents) -> list[int]:
        tokens: list[int] = []
        steps, waiting = 0, []
        while not decoder.finished:
            while (step := decoder.next_step()) is not None:
                contents.feed(step)
                waiting.append((steps, run_step(ring, state, step)))
                steps += 1
            tokens += decoder.receive_logits(*waiting.pop(0))
        return tokens

    made = {
        "sequential": SequentialDecoder,
        "lookahead": lambda request: make_lookahead_decoder(request, LookaheadOptions(1, 3, 2)),
        "speculative": Speculation().make_decoder,
    }
    found = {}
    for name, make in made.items():
        state, contents, texts = ring.new_state(), make_cache_contents(manifest), []
        for prompt in prompts:
            request = TextRequest(
                *(tuple(prompt), Sampler(0.0), 20, frozenset(), VOCAB, CONTEXT, CHUNK),
                cached=contents.count_common(prompt),
            )
            texts.append(decode(make(request), state, contents))
        found[name] = texts
    assert found["lookahead"] == found["speculative"] == found["sequential"]


def test_cut_equals_whole(directory: Path, ring: TaskProgram) -> None:
    cut = CutModel(build(str(directory), 45_000, sizes=Sizes(chunk=CHUNK)))
    assert len(cut.manifest.tasks) > 2
    states, state = cut.new_states(), ring.new_state()
    for step in draw_steps(3, 30):
        inputs = step_inputs(cut.inputs, step)
        (wanted,) = ring.run(state, [inputs[spec.name] for spec in ring.inputs])
        assert cut.step(states, inputs)["logits"] == wanted
    for task, compiled in zip(cut.manifest.tasks, cut.programs, strict=True):
        assert compiled.allocated_bytes <= task.vram_bytes


def test_a_window_as_long_as_the_context_needs_no_ring(directory: Path) -> None:
    compiled = build(str(directory), 10**9, sizes=Sizes(chunk=CHUNK, context=RING))
    assert compiled.manifest.text is not None and compiled.manifest.text.steps_back is None
