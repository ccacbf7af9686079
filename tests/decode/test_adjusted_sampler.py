"""Penalties, biases and recorded probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitup.core.errors import InvalidInput
from splitup.decode.adjusted_sampler import AdjustedSampler, Adjustments
from splitup.decode.sampler import Sampler

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def make(**values: Any) -> AdjustedSampler:
    return AdjustedSampler(Sampler(), Adjustments(**values), len(LOGITS))


def test_nothing_to_adjust_is_the_plain_sampler() -> None:
    assert Adjustments().is_empty and not Adjustments(top_logprobs=0).is_empty
    assert [make().choose(LOGITS, place) for place in range(3)] == [0, 0, 0]


def test_a_presence_penalty_counts_once_and_a_frequency_penalty_each_time() -> None:
    # 0.5 against 0.3 is 0.51 in logits, 0.3 against 0.15 is 0.69
    present = make(presence_penalty=1.0)
    assert [present.choose(LOGITS, place) for place in range(6)] == [0, 1, 0, 0, 0, 0]
    frequent = make(frequency_penalty=0.6)
    assert [frequent.choose(LOGITS, place) for place in range(6)] == [0, 1, 0, 1, 0, 2]


def test_a_repetition_penalty_counts_the_prompt_too() -> None:
    # -0.69 and -1.2, doubled where a token was seen, against -1.9
    repeated = make(repetition_penalty=2.0)
    assert [repeated.choose(LOGITS, place) for place in range(3)] == [0, 1, 0]
    raised = LOGITS + np.float32(2)  # a positive logit is divided
    again = AdjustedSampler(Sampler(), Adjustments(repetition_penalty=2.0), 4, prompt=(0, 1))
    assert again.choose(raised, 0) == 0 and again.choose(LOGITS, 1) == 0


def test_a_bias_moves_single_tokens() -> None:
    assert make(bias=((3, 100.0),)).choose(LOGITS, 0) == 3
    assert make(bias=((0, -100.0),)).choose(LOGITS, 0) == 1


def test_recorded_probabilities_are_the_models_own() -> None:
    sampler = make(bias=((3, 100.0),), top_logprobs=2)
    before = LOGITS.copy()
    sampler.choose(LOGITS, 0)
    [choice] = sampler.choices
    assert choice.token == 3 and choice.logprob == pytest.approx(np.log(0.05), abs=1e-6)
    assert [token for token, _ in choice.top] == [0, 1]
    assert choice.top[0][1] == pytest.approx(np.log(0.5), abs=1e-6)
    assert (before == LOGITS).all()


@pytest.mark.parametrize(
    "values",
    [
        {"frequency_penalty": 2.5},
        {"presence_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"bias": ((1, 101.0),)},
        {"bias": ((-1, 1.0),)},
        {"top_logprobs": 21},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Adjustments(**values)


def test_a_bias_of_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidInput, match="outside the 4 tokens"):
        make(bias=((4, 1.0),))


class Only:
    """A filter that allows one token more than the text has."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.waits = 0

    async def ready(self) -> None:
        self.waits += 1

    def get_mask(self) -> Any:
        return np.arange(len(LOGITS)) == len(self.accepted)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


async def test_a_filter_decides_which_tokens_may_follow() -> None:
    allowed = Only()
    adjustments = Adjustments(bias=((0, 100.0),), top_logprobs=4)
    sampler = AdjustedSampler(Sampler(1.0, seed=3, top_k=3), adjustments, len(LOGITS), allowed)
    for place in range(len(LOGITS)):
        await sampler.ready()
        assert sampler.choose(LOGITS, place) == place
    assert allowed.accepted == [0, 1, 2, 3] and allowed.waits == 4
    assert [entry[0] for entry in sampler.choices[2].top] == [0, 1, 2, 3], "the model's own"


def test_a_model_that_gives_no_allowed_token_a_chance_is_named() -> None:
    logits = LOGITS.copy()
    logits[0] = -np.inf
    sampler = AdjustedSampler(Sampler(1.0), Adjustments(), len(LOGITS), Only())
    with pytest.raises(InvalidInput, match="no token that the grammar allows"):
        sampler.choose(logits, 0)
