"""Lookahead decoding gives the sequential decoder's tokens, in fewer steps where text repeats."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.client.text.generation import make_decoder
from splitup.core.errors import InvalidInput
from splitup.decode.lookahead import TRIAL_STEPS, LookaheadDecoder, LookaheadOptions, NgramPool
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from tests.decode.models import VOCAB, SequenceModel, decode


def make_request(
    prompt: list[int], sampler: Sampler, max_tokens: int = 60, *, chunk: int = 64, **change: object
) -> TextRequest:
    values = {"eos_ids": frozenset(), "vocab": VOCAB, "context": 128, **change}
    return TextRequest(tuple(prompt), sampler, max_tokens, chunk=chunk, **values)  # type: ignore[arg-type]


def decode_both(
    request: TextRequest, options: LookaheadOptions | None = None, memory: int = 2
) -> tuple[int, int]:
    """Check that the tokens are equal; return how many, and in how many steps of lookahead."""
    models = [SequenceModel(request.chunk, memory) for _ in range(2)]
    wanted, _ = decode(SequentialDecoder(request), models[0])
    decoder = LookaheadDecoder(request, options)
    promised = decoder.max_steps
    tokens, steps = decode(decoder, models[1])
    assert tokens == wanted and steps <= promised and decoder.next_step() is None
    return len(tokens), steps


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    columns=st.integers(0, 4),
    length=st.integers(2, 5),
    chunk=st.integers(1, 40),
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=1),
    max_tokens=st.integers(1, 40),
    room=st.integers(0, 40),
)
def test_tokens_are_those_of_sequential_decoding(
    prompt: list[int],
    seed: int,
    temperature: float,
    top_k: int,
    columns: int,
    length: int,
    chunk: int,
    eos: set[int],
    max_tokens: int,
    room: int,
) -> None:
    request = make_request(
        prompt,
        Sampler(temperature, seed, top_k),
        min(max_tokens, room + 1),
        chunk=chunk,
        eos_ids=frozenset(eos),
        context=len(prompt) + room,
    )
    decode_both(request, LookaheadOptions(columns, length, 3))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_text_that_repeats_takes_fewer_steps(temperature: float) -> None:
    tokens, steps = decode_both(make_request([3, 1], Sampler(temperature, 9), 100), memory=1)
    assert tokens == 100 and tokens / steps > 1.5


def test_guesses_that_never_come_true_are_given_up() -> None:
    """The model remembers too much for any n-gram to come again: two trials in 100 tokens."""
    request = make_request([3, 1], Sampler(), 100, vocab=512)
    model = SequenceModel(request.chunk, memory=8, vocab=512)
    tokens, steps = decode(LookaheadDecoder(request), model)
    assert len(tokens) == 100
    widest = 3 * (7 + 7)  # rows beyond one: the window's and the guesses'
    assert 0 < model.rows - steps <= 2 * TRIAL_STEPS * widest


def test_the_pool_keeps_the_newest_continuations() -> None:
    pool = NgramPool(2)
    for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 2, 2)]:
        pool.add(ngram)
    assert pool.get_guesses(1) == [(6, 7), (2, 3)]
    assert pool.get_guesses(9) == []


@pytest.mark.parametrize("options", [(-1, 4, 7), (7, 1, 7), (7, 4, 0)])
def test_impossible_options(options: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInput, match="not possible"):
        LookaheadOptions(*options)


def test_options_that_the_model_has_no_room_for() -> None:
    request = make_request([3, 1], Sampler(), chunk=8)
    make_decoder("lookahead", request)  # the default makes do with the room there is
    make_decoder("lookahead", request, LookaheadOptions(columns=6, length=2, guesses=7))
    for options, why in (
        (LookaheadOptions(columns=7, length=2), "takes 9 rows a step .* the model takes 8"),
        (LookaheadOptions(columns=2, length=4), "takes 10 rows"),
        (LookaheadOptions(columns=10**9, length=10**9), "fewer columns or shorter n-grams"),
        (LookaheadOptions(columns=0, length=2, guesses=8), "8 guesses"),
    ):
        with pytest.raises(InvalidInput, match=why):
            make_decoder("lookahead", request, options)


def test_options_belong_to_lookahead() -> None:
    with pytest.raises(InvalidInput, match="'sequential' has no window"):
        make_decoder("sequential", make_request([3], Sampler()), LookaheadOptions())
