"""Lookahead decoding gives the sequential decoder's tokens, in fewer steps where text repeats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.client.text.generation import make_decoder
from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.lookahead import (
    LookaheadDrafts,
    LookaheadOptions,
    make_lookahead_decoder,
)
from splitup.decode.speculation.tree import TreeNode
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
    decoder = make_lookahead_decoder(request, options, clock=lambda: 0.0)  # drafts cost nothing
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
    """The model remembers too much for any n-gram to come again, and a window costs 5 % a step."""
    request, now_s = make_request([3, 1], Sampler(), 100, vocab=512), 0.0
    decoder = make_lookahead_decoder(request, clock=lambda: now_s)
    model, wide = SequenceModel(request.chunk, memory=8, vocab=512), []
    while (step := decoder.next_step()) is not None:
        now_s += 0.09 + 2e-4 * step.rows
        decoder.receive_logits(model.steps, model.run(step))
        wide.append(step.rows >= 1 + 3 * 7)  # with the window
    assert wide[:4] == [True, True, False, False], "it finds out what steps without it take"
    assert now_s < 1.04 * 100 * (0.09 + 2e-4) and sum(wide[-30:]) < 6


def decode_window(request: TextRequest, moves: list[int]) -> list[list[list[int]]]:
    """Return the columns of a step, and of each behind so many certain tokens more."""
    drafts, root, found = LookaheadDrafts(request, LookaheadOptions(3, 3, 2)), TreeNode(1, 4), []
    for moved in (0, *moves):
        root = TreeNode(1, root.position + moved)
        columns = drafts.place_columns(root, 6)
        found.append([[node.token for node in column] for column in columns])
        for number, column in enumerate(columns):
            assert [node.position for node in column] == [
                root.position + number + n for n in (1, 2)
            ]
            assert column[0].parent is (columns[number - 1][0] if number else root)
            column[-1].logits = np.eye(VOCAB, dtype=np.float32)[10 + number]
        drafts.learn([1], [], np.zeros((0, VOCAB), np.float32))
    return found


def test_the_window_moves_with_the_text() -> None:
    request = make_request([4, 5, 6, 7, 8], Sampler())
    first, second, third = decode_window(request, [1, 2])
    assert first == [[4, 5], [5, 6], [6, 7]]
    assert second == [[5, 10], [6, 11], [7, 12]]  # a level further, by what the rows said
    assert third == [[11, 11], [12, 12], [10, 10]]  # and a column further


def test_a_window_without_room_is_left_out() -> None:
    request = make_request([4, 5, 6], Sampler(), 60, context=70)
    drafts = LookaheadDrafts(request, LookaheadOptions(3, 3, 2))
    assert drafts.place_columns(TreeNode(6, 2), 6) and not drafts.place_columns(TreeNode(6, 2), 5)
    assert drafts.place_columns(TreeNode(6, 60), 6)
    assert not drafts.place_columns(TreeNode(6, 61), 6), "the last token is not fed"
    longer = LookaheadDrafts(
        make_request([4], Sampler(), 70, context=70), LookaheadOptions(3, 3, 2)
    )
    assert longer.place_columns(TreeNode(6, 65), 6), "its last row is at position 69"
    assert not longer.place_columns(TreeNode(6, 66), 6)


@pytest.mark.parametrize(("guesses", "wanted"), [(2, [5, 2]), (4, [5, 2, 3, 10])])
def test_guesses_are_the_newest_followers_of_the_text_then_of_the_window(
    guesses: int, wanted: list[int]
) -> None:
    request = make_request([1, 2, 1, 3, 1, 2, 1, 5, 1], Sampler())
    drafts, root = LookaheadDrafts(request, LookaheadOptions(2, 2, guesses)), TreeNode(1, 8)
    for number, [node] in enumerate(drafts.place_columns(root, 2)):
        assert node.token == number + 1
        node.logits = np.eye(VOCAB, dtype=np.float32)[10 + number]
    drafts.learn([1], [], np.zeros((0, VOCAB), np.float32))
    drafts.draft(request.prompt, root, [root])
    assert list(root.children) == wanted and root.seen_by == [drafts]


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
