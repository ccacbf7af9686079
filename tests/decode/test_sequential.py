from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.step import make_causal_step
from tests.decode.models import VOCAB, SequenceModel, decode


def make_decoder(
    prompt: list[int],
    *,
    max_tokens: int,
    eos_ids: tuple[int, ...] = (),
    context: int = 100,
    chunk: int = 1,
) -> SequentialDecoder:
    request = TextRequest(
        tuple(prompt), Sampler(), max_tokens, frozenset(eos_ids), VOCAB, context, chunk
    )
    return SequentialDecoder(request)


def continue_greedily(prompt: list[int], count: int) -> list[int]:
    model, tokens = SequenceModel(), list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(model.compute_logits(tokens))))
    return tokens[len(prompt) :]


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    max_tokens=st.integers(1, 12),
    chunk=st.integers(1, 4),
    pipelined=st.booleans(),
)
def test_every_chunk_and_order_gives_the_same_tokens(
    prompt: list[int], max_tokens: int, chunk: int, pipelined: bool
) -> None:
    decoder = make_decoder(prompt, max_tokens=max_tokens, chunk=chunk)
    promised = decoder.max_steps
    tokens, steps = decode(decoder, SequenceModel(chunk), pipelined=pipelined)
    assert tokens == continue_greedily(prompt, max_tokens)
    assert steps == promised == -(-len(prompt) // chunk) + max_tokens - 1


def test_prompt_is_handed_out_before_the_first_logits() -> None:
    decoder = make_decoder([5, 6, 7], max_tokens=2, context=10, chunk=2)
    steps = [decoder.next_step() for _ in range(3)]
    assert steps == [make_causal_step([5, 6], 0), make_causal_step([7], 2), None]


def test_end_token_stops_and_is_not_returned() -> None:
    text = continue_greedily([1], 4)
    end = next(i for i in range(1, 4) if text[i] not in text[:i])
    decoder = make_decoder([1], max_tokens=9, eos_ids=(text[end],))
    assert decode(decoder, SequenceModel(1))[0] == text[:end]
    assert decoder.next_step() is None


def test_more_tokens_than_positions_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(InvalidInput, match=r"4 positions: .* 2 tokens .* 3 more, not 4.*-tokens 3"):
        make_decoder([1, 2], max_tokens=4, context=4)
    decoder = make_decoder([1, 2], max_tokens=3, context=4)
    tokens, steps = decode(decoder, SequenceModel(1), pipelined=True)
    assert (len(tokens), steps) == (3, 4)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [([], 1, "no token"), ([1] * 11, 1, "shorten"), ([1], 0, "max_tokens"), ([99], 1, "outside")],
)
def test_bad_requests_are_one_sentence(prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_decoder(prompt, max_tokens=max_tokens, context=10)
