"""Blocks written with a cache are those of a decoder that feeds everything again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.client.text.generation import DecoderName
from splitup.client.text.generation import make_decoder as choose
from splitup.core.errors import Implausible, InvalidInput
from splitup.decode.adjusted_sampler import AdjustedSampler, Adjustments
from splitup.decode.block_diffusion import CONFIDENCES, BlockDiffusionDecoder, DiffusionOptions
from splitup.decode.cache_contents import CacheContents
from splitup.decode.prompt import Blocks, TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.step import make_block_step
from tests.decode.models import VOCAB, BlockModel, decode
from tests.decode.test_cache_contents import Recorder

MASK, CONTEXT = VOCAB - 1, 64


def make_request(
    prompt: list[int],
    max_tokens: int,
    *,
    sampler: Sampler | None = None,
    eos_ids: frozenset[int] = frozenset(),
    chunk: int = 64,
    context: int = CONTEXT,
) -> TextRequest:
    return TextRequest(
        tuple(prompt),
        sampler or Sampler(),
        max_tokens,
        eos_ids,
        VOCAB,
        context,
        chunk,
        blocks=Blocks(4, MASK),
    )


def make_decoder(
    request: TextRequest,
    size: int = 4,
    options: DiffusionOptions | None = None,
    *,
    are_shifted: bool = False,
) -> BlockDiffusionDecoder:
    blocks = Blocks(size, MASK, are_shifted)
    return BlockDiffusionDecoder(replace(request, blocks=blocks), options)


def compute_confidence(sampler: Sampler, logits: np.ndarray, token: int, kind: str) -> float:
    """Return it for a sampler without limits on tokens, from the definitions."""
    scaled = logits.astype(np.float64) / (sampler.temperature or 1.0)
    likely = np.exp(scaled - scaled.max())
    likely /= likely.sum()
    if kind == "probability":
        return float(likely[token])
    if kind == "margin":
        ordered = sorted(likely)
        return float(ordered[-1] - ordered[-2])
    return float(np.prod(likely[likely > 0] ** likely[likely > 0]))


def write_blocks(
    request: TextRequest, size: int, options: DiffusionOptions, are_shifted: bool
) -> list[int]:
    """Return the text; every iteration feeds all tokens again, from the definitions."""
    prompt, iterations = request.prompt, Counter[int]()
    limit = len(prompt) + request.max_tokens
    text: list[int | None] = [*prompt, *(None,) * request.max_tokens]
    text += (None,) * (min(-(-limit // size) * size, request.context) - limit)
    while None in text[:limit] and not _has_end(request, text):
        active = [text.index(None) // size]
        while len(active) <= options.ahead and (active[-1] + 1) * size < len(text):
            last = text[active[-1] * size : (active[-1] + 1) * size]
            if last.count(None) > len(last) / 2:
                break
            active.append(active[-1] + 1)
        fed = [MASK if token is None else token for token in text[: (active[-1] + 1) * size]]
        rows = BlockModel(CONTEXT).run(make_block_step(fed, 0, block_size=size))
        for block in active:
            start, end = block * size, min((block + 1) * size, len(text))
            known = [p for p in range(len(prompt), end) if text[p] in request.eos_ids]
            masks = [p for p in range(start, end) if text[p] is None and p < min([*known, end])]
            found = {
                p: _choose(request, rows[p - are_shifted], p, iterations[block], options)
                for p in masks
            }
            order = sorted(masks, key=lambda p: (-found[p][0], p))
            sure = [p for p in masks if are_shifted and p == start and block == active[0]]
            order = [*sure, *(p for p in order if p not in sure)]
            if options.iterations is None:
                taken = [p for p in order if p in sure or found[p][0] > options.threshold]
                taken = taken or (order[:1] if block == active[0] else [])
            else:
                more = iterations[block] < size % options.iterations
                taken = order[: max(1, size // options.iterations + more)]
            for position in taken:
                text[position] = found[position][1]
            iterations[block] += 1
    return _cut(request, text)


def _choose(
    request: TextRequest, row: np.ndarray, position: int, iteration: int, options: DiffusionOptions
) -> tuple[float, int]:
    logits = row.copy()
    logits[MASK] = -np.inf
    sampler = request.sampler
    assert isinstance(sampler, Sampler)
    token = sampler.choose(logits, position, iteration)
    return compute_confidence(sampler, logits, token, options.confidence), token


def _has_end(request: TextRequest, text: list[int | None]) -> bool:
    written = text[len(request.prompt) :]
    certain = written[: written.index(None)] if None in written else written
    return any(token in request.eos_ids for token in certain)


def _cut(request: TextRequest, text: list[int | None]) -> list[int]:
    written = text[len(request.prompt) :][: request.max_tokens]
    ends = [place for place, token in enumerate(written) if token in request.eos_ids]
    return [token for token in written[: ends[0] if ends else None] if token is not None]


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
    max_tokens=st.integers(1, 14),
    size=st.integers(1, 6),
    room=st.integers(0, 12),
    threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    confidence=st.sampled_from(CONFIDENCES),
    iterations=st.none() | st.integers(1, 8),
    ahead=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 0.8]),
    are_shifted=st.booleans(),
    ends=st.booleans(),
    pipelined=st.booleans(),
    context=st.integers(28, 30),
)
def test_the_text_is_that_of_a_decoder_without_cache(
    prompt: list[int],
    max_tokens: int,
    size: int,
    room: int,
    threshold: float,
    confidence: Any,
    iterations: int | None,
    ahead: int,
    temperature: float,
    are_shifted: bool,
    ends: bool,
    pipelined: bool,
    context: int,
) -> None:
    ahead = ahead if iterations is None else 0
    chunk = size * (1 + ahead) + room
    request = make_request(
        prompt,
        max_tokens,
        sampler=Sampler(temperature, 5),
        eos_ids=frozenset({0, 1, 2}) if ends else frozenset(),
        chunk=chunk,
        context=context,
    )
    options = DiffusionOptions(None, threshold, confidence, iterations, ahead)
    decoder = make_decoder(request, size, options, are_shifted=are_shifted)
    promised = decoder.max_steps
    tokens, steps = decode(decoder, BlockModel(chunk), pipelined=pipelined)
    assert tokens == write_blocks(request, size, options, are_shifted)
    assert steps <= promised
    assert decoder.max_steps == 0 and decoder.next_step() is None


@settings(max_examples=20, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
    max_tokens=st.integers(1, 20),
    ahead=st.integers(0, 3),
    room=st.integers(0, 30),
    are_shifted=st.booleans(),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_the_size_of_a_step_does_not_change_the_text(
    prompt: list[int],
    max_tokens: int,
    ahead: int,
    room: int,
    are_shifted: bool,
    temperature: float,
) -> None:
    """Also with blocks ahead; and a longer text begins with the shorter one."""
    options = DiffusionOptions(4, 0.5, ahead=ahead)
    chunk = 4 * (1 + ahead) + room
    texts = []
    for rows, count in ((64, max_tokens), (chunk, max_tokens), (chunk, max_tokens + 7)):
        request = make_request(prompt, count, sampler=Sampler(temperature, 3), chunk=rows)
        decoder = make_decoder(request, 4, options, are_shifted=are_shifted)
        promised = decoder.max_steps
        tokens, steps = decode(decoder, BlockModel(rows))
        assert steps <= promised
        texts.append(tokens)
    assert texts[0] == texts[1] == texts[2][:max_tokens]


def test_blocks_ahead_take_fewer_steps() -> None:
    request = make_request([1, 2, 3], 40, sampler=Sampler())
    counts = [
        decode(make_decoder(request, 4, DiffusionOptions(threshold=0.8, ahead=ahead)), model)[1]
        for ahead, model in ((0, BlockModel(sharpness=4.0)), (2, BlockModel(sharpness=4.0)))
    ]
    assert counts[1] < counts[0] < 40


def test_an_iteration_leaves_the_cache_and_a_commit_takes_no_step() -> None:
    """A model that is sure of everything: one step a block, which also commits the block before."""
    request = make_request([1, 2, 3, 4, 5], 10, chunk=8)
    decoder = make_decoder(request, 4, DiffusionOptions(threshold=0.0))
    assert decoder.max_steps == 3 + 4 + 4
    model = BlockModel(8)
    steps = []
    while not decoder.finished:
        step = decoder.next_step()
        assert step is not None and decoder.next_step() is None
        steps.append(step)
        decoder.receive_logits(len(steps) - 1, model.run(step))
    assert [(step.start, len(step.tokens)) for step in steps] == [(0, 8), (4, 8), (8, 8)]
    assert [step.tokens[-4:].count(MASK) for step in steps] == [3, 4, 4]
    assert steps[1].sees == (range(4),) * 4 + (range(8),) * 4
    assert steps[1].outputs == (4, 5, 6, 7)


def test_shifted_logits_of_the_commit_give_the_first_token_of_the_next_block() -> None:
    """It needs no confidence; what the prompt is followed by likewise."""
    request = make_request([1, 2, 3, 4], 8, chunk=8)
    decoder = make_decoder(request, 4, DiffusionOptions(threshold=1.0), are_shifted=True)
    step = decoder.next_step()
    assert step is not None and step.outputs == (3, 4, 5, 6)
    logits = BlockModel(8).run(step)
    assert decoder.receive_logits(0, logits) == [int(np.argmax(logits[0][:MASK]))]


def test_tokens_come_before_their_block_is_frozen_and_end_inside_it() -> None:
    decoder = make_decoder(make_request([1], 9, eos_ids=frozenset({5})), 4)

    def make_logits(*likely: tuple[int, float]) -> np.ndarray:
        rows = np.zeros((len(likely), VOCAB), np.float32)
        for row, (token, height) in enumerate(likely):
            rows[row, token] = height
        return rows

    assert decoder.next_step() is not None
    assert decoder.receive_logits(0, make_logits((7, 9), (8, 1), (5, 8))) == [7]
    step = decoder.next_step()  # the end is chosen, and one mask is before it
    assert step is not None and step.tokens == (1, 7, MASK, 5) and step.outputs == (2,)
    assert decoder.receive_logits(1, make_logits((8, 1))) == [8]
    assert decoder.finished and decoder.next_step() is None


def test_the_mask_is_never_chosen_and_broken_logits_are_refused() -> None:
    decoder = make_decoder(make_request([1, 2, 3], 1))
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, MASK] = 50
    decoder.next_step()
    assert decoder.receive_logits(0, logits) == [0]
    decoder = make_decoder(make_request([1, 2, 3], 1))
    decoder.next_step()
    with pytest.raises(Implausible, match="contain NaN"):
        decoder.receive_logits(0, logits * np.float32(np.nan))
    decoder = make_decoder(make_request([1, 2], 2))
    decoder.next_step()
    infinite = np.zeros((2, VOCAB), np.float32)
    infinite[0, 3] = np.inf  # no probability can be computed
    infinite[1, 4] = 2
    assert decoder.receive_logits(0, infinite) == []
    assert decoder.next_step() is not None


def test_a_mask_token_of_the_prompt_is_text() -> None:
    decoder = make_decoder(make_request([MASK, 2], 2))
    step = decoder.next_step()
    assert step is not None and step.outputs == (2, 3)


def test_a_second_turn_feeds_only_the_blocks_that_are_new() -> None:
    contents, model = CacheContents(block_size=4), BlockModel()
    first = make_request(list(range(9)), 13)
    said, _ = decode(Recorder(make_decoder(first), contents), model)
    prompt = [*first.prompt, *said, 3, 4]
    cached = contents.count_common(prompt)
    assert cached == 20  # of 22 tokens: the last block is not committed
    assert contents.count_common([*prompt[:11], 15, 15, 15]) == 8
    second = make_request(prompt, 10)
    wanted, _ = decode(make_decoder(second), BlockModel())
    rows = model.rows
    decoder = make_decoder(replace(second, cached=cached))
    assert decode(Recorder(decoder, contents), model)[0] == wanted
    assert model.rows > rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "a block of 0 tokens"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"confidence": "luck"}, "no confidence 'luck'; use one of probability, margin, entropy"),
        ({"iterations": 0}, "0 iterations"),
        ({"ahead": -1}, "-1 blocks ahead"),
        ({"ahead": 1, "iterations": 2}, "give no iterations"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        DiffusionOptions(**options)


def test_texts_without_room_and_samplers_of_sequences_are_refused() -> None:
    with pytest.raises(InvalidInput, match="after a prompt of 3 tokens there can be 61 more"):
        make_request([1, 2, 3], 62)
    make_decoder(make_request([1, 2, 3], 61))
    with pytest.raises(InvalidInput, match="3 blocks of 4 tokens take 12 rows a step"):
        make_decoder(make_request([1], 9, chunk=11), 4, DiffusionOptions(ahead=2))
    with pytest.raises(InvalidInput, match="1 blocks of 16 tokens take 16 rows"):
        make_decoder(make_request([1], 9, chunk=8), 4, DiffusionOptions(block_size=16))
    adjusted = AdjustedSampler(Sampler(), Adjustments(presence_penalty=1.0), VOCAB)
    request = replace(make_request([1], 9), sampler=adjusted)
    with pytest.raises(InvalidInput, match="penalties, biases"):
        make_decoder(request)


def test_a_model_has_its_own_decoder_and_no_other() -> None:
    blocks = make_request([1, 2, 3], 9)
    plain = replace(blocks, blocks=None)
    assert isinstance(choose(None, blocks), BlockDiffusionDecoder)
    assert isinstance(choose(None, plain), SequentialDecoder)
    names: tuple[DecoderName, ...] = ("sequential", "lookahead", "speculative")
    for name in names:
        with pytest.raises(InvalidInput, match="writes blocks of tokens, not one after the other"):
            choose(name, blocks)
        with pytest.raises(InvalidInput, match=f"'{name}' writes no blocks; 'diffusion' does"):
            choose(name, plain, diffusion=DiffusionOptions())
    with pytest.raises(InvalidInput, match="needs one that was trained for blocks"):
        choose("diffusion", plain)
    with pytest.raises(InvalidInput, match="'sequential' writes no blocks"):
        choose(None, plain, diffusion=DiffusionOptions())
