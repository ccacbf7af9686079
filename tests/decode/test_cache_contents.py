"""A text that goes on behind cached tokens is the text that a fresh cache gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.client.text.generation import DecoderName, make_decoder
from splitup.core.errors import InvalidInput
from splitup.decode.cache_contents import CacheContents
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.step import make_causal_step, make_tree_step
from tests.decode.models import VOCAB, SequenceModel, decode


class Recorder:
    """A decoder whose steps are noted in the contents of a cache."""

    def __init__(self, decoder, contents: CacheContents) -> None:  # type: ignore[no-untyped-def]
        self._decoder, self._contents = decoder, contents

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._decoder, name)

    def next_step(self):  # type: ignore[no-untyped-def]
        step = self._decoder.next_step()
        if step is not None:
            self._contents.feed(step)
        return step


def make_request(prompt: list[int], seed: int, max_tokens: int, chunk: int) -> TextRequest:
    sampler = Sampler(temperature=0.7, seed=seed)
    return TextRequest(tuple(prompt), sampler, max_tokens, frozenset(), VOCAB, 128, chunk)


@pytest.mark.long  # in small: client/test_leases.py
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.tuples(
            st.sampled_from(["sequential", "lookahead"]),
            st.integers(0, 40),  # how much of the conversation so far the prompt repeats
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
            st.integers(1, 30),
        ),
        min_size=2,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
    chunk=st.integers(1, 40),
    steps_back=st.sampled_from([None, 1, 3, 60]),
)
def test_texts_on_one_cache_are_those_of_fresh_caches(
    texts: list[tuple[DecoderName, int, list[int], int]],
    seed: int,
    chunk: int,
    steps_back: int | None,
) -> None:
    shared, contents = SequenceModel(chunk), CacheContents(steps_back=steps_back)
    conversation: list[int] = []
    for name, repeated, more, max_tokens in texts:
        prompt = [*conversation[:repeated], *more][:90]
        request = make_request(prompt, seed, min(max_tokens, 128 - len(prompt)), chunk)
        wanted, _ = decode(make_decoder(name, request), SequenceModel(chunk))
        cached = contents.count_common(prompt)
        assert cached < len(prompt)
        decoder = make_decoder(name, replace(request, cached=cached))
        tokens, _ = decode(Recorder(decoder, contents), shared)
        assert tokens == wanted
        conversation = [*prompt, *tokens]


@pytest.mark.parametrize("name", ["sequential", "lookahead"])
def test_a_second_turn_feeds_only_what_is_new(name: DecoderName) -> None:
    model, contents = SequenceModel(8), CacheContents()
    first = make_request(list(range(10)), 1, 20, 8)
    said, _ = decode(Recorder(make_decoder(name, first), contents), model)
    prompt = [*first.prompt, *said, 3, 4]
    cached = contents.count_common(prompt)
    # the last token was sampled and never fed; lookahead's last step is not known to be kept
    assert cached >= len(first.prompt) + len(said) - (1 if name == "sequential" else 8)


def test_nothing_is_cached_before_the_first_step_or_for_another_text() -> None:
    contents = CacheContents()
    assert contents.count_common([1, 2, 3]) == 0
    contents.feed(make_causal_step([1, 2, 3], 0))
    assert contents.count_common([2, 2, 3]) == 0
    assert contents.count_common([1, 2, 9, 9]) == 2
    assert contents.count_common([1, 2, 3]) == 2  # one token is left to feed
    assert contents.count_common([1, 2, 3, 4]) == 3


def test_rows_of_a_tree_count_once_the_next_step_keeps_them() -> None:
    contents = CacheContents()
    contents.feed(make_causal_step([1], 0))
    contents.feed(make_tree_step([2, 7, 3, 4], [-1, -1, 0, 2], 1))
    assert contents.count_common([1, 2, 3, 4, 5]) == 2  # row 1 is another branch
    contents.feed(make_tree_step([5], [-1], 4, kept=(0, 2, 3)))
    assert contents.count_common([1, 2, 3, 4, 5, 6]) == 5


def test_a_recurrent_model_goes_on_or_starts_again() -> None:
    contents = CacheContents(is_recurrent=True)
    contents.feed(make_causal_step([1, 2, 3], 0))
    contents.feed(make_causal_step([4, 5], 3))
    assert contents.count_common([1, 2, 3, 4, 6]) == 4
    assert contents.count_common([1, 2, 3, 9]) == 3
    assert contents.count_common([1, 2, 9]) == 0
    with pytest.raises(InvalidInput, match="recurrent"):
        contents.feed(make_causal_step([9], 2))
    contents.feed(make_causal_step([9], 0))


def test_a_model_with_windows_goes_back_within_its_bound_or_starts_again() -> None:
    contents = CacheContents(steps_back=3)
    text = list(range(12))
    for start in range(0, 12, 2):
        contents.feed(make_causal_step(text[start : start + 2], start))
    assert contents.count_common([*text[:7], 50, 51]) == 7
    assert contents.count_common([*text[:6], 50, 51]) == 0
    contents.feed(make_causal_step([50], 7))
    with pytest.raises(InvalidInput, match=r"at 6, 4 before .* at most 3; start at 0"):
        contents.feed(make_causal_step([9], 6))
    contents.feed(make_causal_step([9, 8], 0))
    contents.feed(make_causal_step([8], 1))


@pytest.mark.parametrize("cached", [-1, 0, 2, 3])
def test_a_request_leaves_one_token_to_feed(cached: int) -> None:
    request = make_request([1, 2, 3], 0, 1, 4)
    if 0 <= cached < 3:
        assert replace(request, cached=cached).cached == cached
    else:
        with pytest.raises(InvalidInput, match="at least one has to be fed"):
            replace(request, cached=cached)
