"""The decoder uses drafts where they pay, whichever pair of models it meets, at any round trip."""

from __future__ import annotations

import pytest

from splitup.decode.speculation.rates import Pace, StepTimes
from tests.decode.pairs import compare

PLAIN_S = 0.1


def make_pace(plain_s: tuple[float, ...] = (PLAIN_S, PLAIN_S)) -> Pace:
    pace = Pace()
    pace.learn(2, 1.5 * PLAIN_S, PLAIN_S)
    for seconds in plain_s:
        assert pace.is_paused, "it finds out what steps without drafts take"
        pace.learn(1, seconds, PLAIN_S)
    assert not pace.is_paused
    return pace


def count_rounds(pace: Pace, tokens: int, seconds: float, step_s: float = PLAIN_S) -> int:
    """Return how many such rounds it takes until drafts are paused."""
    rounds = 0
    while not pace.is_paused:
        pace.learn(tokens, seconds, step_s)
        rounds += 1
    return rounds


@pytest.mark.parametrize(
    ("acceptance", "round_trip_ms"),
    [(0.1, 0), (0.5, 0), (0.9, 0), (0.2, 20), (0.1, 80), (0.8, 80)],
)
def test_it_loses_little_against_the_better_fixed_choice(
    acceptance: float, round_trip_ms: int
) -> None:
    plain_s, always_s, decided_s = compare(acceptance, round_trip_ms / 1e3, 4, 3).sum(axis=0)
    assert decided_s < 1.05 * min(plain_s, always_s)


def test_drafts_that_lose_much_are_given_up_after_few_rounds() -> None:
    """As with a mixture of experts: a step without drafts takes a sixth of a step of a tree."""
    pace = make_pace()
    assert count_rounds(pace, 3, 6 * PLAIN_S) <= 2
    tokens = 0
    while pace.is_paused:  # and tried again, seldom
        pace.learn(1, PLAIN_S, PLAIN_S)
        tokens += 1
    assert 200 < tokens < 2_000


def test_drafts_that_gain_go_on_through_unlucky_rounds() -> None:
    """1.6 tokens a round trip, of which the first rounds have one each."""
    pace = make_pace()
    for tokens in [1] * 6 + [2, 2, 1, 2, 1] * 20:
        pace.learn(tokens, 1.1 * PLAIN_S, PLAIN_S)
        assert not pace.is_paused


@pytest.mark.parametrize(("plain_s", "step_s"), [(40 * PLAIN_S, PLAIN_S), (PLAIN_S, 3 * PLAIN_S)])
def test_one_wrong_time_of_steps_without_drafts_does_not_hide_what_these_lose(
    plain_s: float, step_s: float
) -> None:
    """A late round, or a line over rows that is none, as with a mixture of experts."""
    pace = make_pace((PLAIN_S, plain_s))
    assert count_rounds(pace, 1, 1.5 * PLAIN_S, step_s) < 8


def test_what_a_row_takes_is_learnt_from_few_steps() -> None:
    """Where a row takes a fifth of a step, as SmolLM2's on a CPU without a round trip."""
    times = StepTimes()
    for rows in (1, 1, 5, 8, 4, 7):
        times.learn(rows, 0.013 + 0.0034 * rows)
    constant_s, row_s = times.line
    assert row_s == pytest.approx(0.0034, rel=0.2) and constant_s == pytest.approx(0.013, rel=0.3)
