from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.decode.sampler import Sampler
from splitup.decode.sequential import INACTIVE, SequentialDecoder, StepInput
from splitup.errors import InvalidInput

VOCAB = 32


class CountingModel:
    """A model whose next token is the current one plus one; keeps rows like a real one."""

    def __init__(self) -> None:
        self.cache: dict[int, int] = {}

    def run(self, step: StepInput) -> np.ndarray:
        logits = np.zeros((len(step.tokens), VOCAB), dtype=np.float32)
        for row, (token, position) in enumerate(zip(step.tokens, step.positions, strict=True)):
            if position == INACTIVE:
                continue
            assert position == len(self.cache), "rows must arrive in order, without a gap"
            self.cache[position] = token
            logits[row, (token + 1) % VOCAB] = 1.0
        return logits


def decode(decoder: SequentialDecoder, *, pipelined: bool) -> tuple[list[int], int]:
    model, tokens, waiting, steps = CountingModel(), [], [], 0
    while not decoder.finished:
        step = decoder.next_step()
        if step is not None:
            waiting.append((steps, model.run(step)))
            steps += 1
            if pipelined:
                continue
        number, logits = waiting.pop(0)
        tokens += decoder.receive_logits(number, logits)
    return tokens, steps


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    max_tokens=st.integers(1, 12),
    width=st.integers(1, 4),
    pipelined=st.booleans(),
)
def test_every_width_and_order_gives_the_same_tokens(
    prompt: list[int], max_tokens: int, width: int, pipelined: bool
) -> None:
    decoder = SequentialDecoder(
        prompt, Sampler(), max_tokens=max_tokens, eos_ids=(), vocab=VOCAB, context=100, width=width
    )
    promised = decoder.max_steps
    tokens, steps = decode(decoder, pipelined=pipelined)
    assert tokens == [(prompt[-1] + 1 + i) % VOCAB for i in range(max_tokens)]
    assert steps == promised


def test_prompt_is_handed_out_before_the_first_logits() -> None:
    decoder = SequentialDecoder(
        [5, 6, 7], Sampler(), max_tokens=2, eos_ids=(), vocab=VOCAB, context=10
    )
    steps = [decoder.next_step() for _ in range(4)]
    assert steps == [StepInput((5,), (0,)), StepInput((6,), (1,)), StepInput((7,), (2,)), None]


def test_end_token_stops_and_is_not_returned() -> None:
    decoder = SequentialDecoder([1], Sampler(), max_tokens=9, eos_ids=(4,), vocab=VOCAB, context=10)
    assert decode(decoder, pipelined=False)[0] == [2, 3]
    assert decoder.next_step() is None


def test_context_bounds_what_is_generated() -> None:
    decoder = SequentialDecoder([1, 2], Sampler(), max_tokens=9, eos_ids=(), vocab=VOCAB, context=4)
    tokens, steps = decode(decoder, pipelined=True)
    assert (len(tokens), steps) == (3, 4)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [([], 1, "no token"), ([1] * 11, 1, "positions"), ([1], 0, "max_tokens"), ([99], 1, "outside")],
)
def test_bad_requests_are_one_sentence(prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SequentialDecoder(
            prompt, Sampler(), max_tokens=max_tokens, eos_ids=(), vocab=VOCAB, context=10
        )
