"""Rows of wrong drafts give n-grams of the target; they are drafts where the text says the same."""

from __future__ import annotations

import numpy as np
import pytest
from splitup_speculation.remote import RemoteChoice

from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.speculation import target_ngrams
from splitup.decode.speculation.target_ngrams import TargetNgramRates, TargetNgrams
from splitup.decode.speculation.tree import TreeNode

VOCAB = 32
RATES = TargetNgramRates()
LONG, MIDDLE, SHORT = RATES.by_length.values()


def make_pool(sampler: Sampler | RemoteChoice | None = None) -> TargetNgrams:
    request = TextRequest((1, 2), sampler or Sampler(), 9, frozenset({31}), VOCAB, 64, 16)
    return TargetNgrams(request, RATES)


def make_path(text: list[int], drafts: list[int]) -> list[TreeNode]:
    """Return the nodes of a path behind a text, from its root on."""
    nodes = [TreeNode(text[-1], len(text) - 1)]
    for token in drafts:
        nodes[-1].add_drafts(SHORT, (token,), frozenset())
        nodes.append(nodes[-1].children[token])
    return nodes


def say(*tokens: int) -> np.ndarray:
    """Return logits whose largest are these tokens."""
    return np.eye(VOCAB, dtype=np.float32)[list(tokens)]


def find_drafts(pool: TargetNgrams, text: list[int]) -> list[tuple[object, tuple[int, ...]]]:
    root = TreeNode(text[-1], len(text) - 1)
    pool.draft(text, root, [root])
    assert root.seen_by == [pool]
    return list(root.drafts)


def test_the_text_goes_on_as_behind_a_wrong_draft() -> None:
    pool = make_pool()
    # behind 1 2 the draft 5 6 is wrong, since the target says 4; behind 5 and 6 it says 7 and 8
    pool.learn([1, 2], make_path([1, 2], [5, 6]), say(4, 7, 8))
    assert find_drafts(pool, [1, 2, 4, 5]) == [(SHORT, (7,))]
    assert find_drafts(pool, [9, 5, 6]) == [(MIDDLE, (8,))]
    assert find_drafts(pool, [2, 5, 6]) == [(LONG, (8,))]
    assert find_drafts(pool, [1, 2, 4]) == []


def test_the_last_guess_counts_and_rows_off_the_text_are_read() -> None:
    pool = make_pool()
    nodes = make_path([1, 2], [5, 6])
    pool.learn([1, 2], nodes, say(4, 7, 8))
    # the text went on with 5; what is behind it was sent before
    nodes[1].parent = None
    pool.learn([1, 2, 5], nodes[2:], say(9))
    assert find_drafts(pool, [2, 5, 6]) == [(LONG, (9,))]


def test_logits_that_say_nothing_are_left_out() -> None:
    pool = make_pool()
    pool.learn([1, 2], make_path([1, 2], []), np.full((1, VOCAB), np.nan, np.float32))
    assert find_drafts(pool, [1, 2]) == []
    remote = make_pool(RemoteChoice())  # its target worker sends tokens
    remote.learn([1, 2], make_path([1, 2], []), np.array([[5]], np.float32))
    assert find_drafts(remote, [1, 2]) == []


def test_old_ngrams_make_room() -> None:
    pool, most = make_pool(), target_ngrams._MOST_NGRAMS
    for first in range(most + 1):
        text = [100 + first, 2]
        pool.learn(text, make_path(text, []), say(5))
    assert find_drafts(pool, [100, 2]) == [(SHORT, (5,))]
    assert find_drafts(pool, [101, 2]) == [(MIDDLE, (5,))]


def test_of_a_wide_step_the_likeliest_rows_are_read() -> None:
    pool, most = make_pool(), target_ngrams._MOST_ROWS
    drafts = [3 + place % 2 for place in range(most - 1)] + [7]
    pool.learn([1, 2], make_path([1, 2], drafts), say(*(9 for _ in range(most + 1))))
    assert find_drafts(pool, [1, drafts[-2]]) == [(SHORT, (9,))]
    assert find_drafts(pool, [1, drafts[-1]]) == []


def test_ranking_is_bounded_where_the_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_ngrams, "_MOST_LOGITS", 2 * VOCAB + 1)
    pool = make_pool()
    pool.learn([1, 2], make_path([1, 2], [5, 6]), say(4, 7, 8))
    assert find_drafts(pool, [9, 5]) == [(SHORT, (7,))]
    assert find_drafts(pool, [9, 6]) == []
