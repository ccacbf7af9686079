"""Which rules of verification keep the target's distribution: enumerated, and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from splitup.decode.sampler import Sampler
from tests.decode.classic_rules import (
    Chances,
    Drawn,
    Rule,
    accept_any_branch,
    draw_independent,
    draw_without_replacement,
    normalise,
    take_largest,
    verify_deterministic,
    verify_independent,
    verify_without_replacement,
)

VOCAB = 5
# 99.9 % of chi-squared with VOCAB - 1 degrees of freedom
CHI_SQUARED = 18.47

Draw = Callable[[Chances, int], Iterator[Drawn]]


def make_pair(seed: int, temperature: float = 1.0) -> tuple[Chances, Chances]:
    """Return a target's and a drafter's distribution, which resemble each other."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 1.5, VOCAB)
    errors = random.normal(0, 0.7, VOCAB)
    return normalise(np.exp(logits / temperature)), normalise(np.exp(logits + errors))


def enumerate_result(rule: Rule, draw: Draw, p: Chances, q: Chances, count: int) -> Chances:
    """Return the exact distribution of the resulting token, over all drafts."""
    outcomes = [chance * rule(p, q, drawn) for chance, drawn in draw(q, count)]
    return np.sum(outcomes, axis=0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        (verify_independent, draw_independent),
        (verify_without_replacement, draw_without_replacement),
        (verify_deterministic, take_largest),
    ],
)
def test_each_rule_keeps_the_distribution_for_its_own_siblings(
    rule: Rule, draw: Draw, count: int
) -> None:
    for seed in range(20):
        p, q = make_pair(seed)
        np.testing.assert_allclose(enumerate_result(rule, draw, p, q, count), p, atol=1e-12)


def test_accepting_any_branch_does_not_keep_the_distribution() -> None:
    errors = {}
    for count in (1, 2, 3):
        errors[count] = [
            0.5
            * np.abs(enumerate_result(accept_any_branch, draw_independent, p, q, count) - p).sum()
            for p, q in map(make_pair, range(50))
        ]
    assert max(errors[1]) < 1e-12, "with one child it is the right rule"
    assert min(errors[2]) > 1e-3 and np.mean(errors[2]) > 0.05
    assert np.mean(errors[3]) > np.mean(errors[2])


def test_a_rule_for_other_siblings_is_wrong() -> None:
    for rule, draw in (
        (verify_independent, draw_without_replacement),
        (verify_independent, take_largest),
        (verify_without_replacement, draw_independent),
    ):
        pairs = map(make_pair, range(20))
        errors = [np.abs(enumerate_result(rule, draw, p, q, 2) - p).sum() for p, q in pairs]
        assert max(errors) > 1e-2


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_noise_draws_from_the_same_distribution(temperature: float) -> None:
    """SplitUp's rule needs no acceptance test, because its token is a draw from p itself."""
    random = np.random.default_rng(3)
    logits = random.normal(0, 1.0, VOCAB).astype(np.float32)
    p = normalise(np.exp(logits.astype(np.float64) / temperature))
    draws = 4_000
    sampler = Sampler(temperature, seed=11)
    found = np.bincount([sampler.choose(logits, at) for at in range(draws)], minlength=VOCAB)
    assert compute_chi_squared(found, draws * p) < CHI_SQUARED


def test_sampled_verification_agrees_with_the_enumeration() -> None:
    p, q = make_pair(5)
    random, draws = np.random.default_rng(9), 4_000
    found = np.zeros(VOCAB)
    for _ in range(draws):
        siblings = random.choice(VOCAB, 2, replace=False, p=q)
        found[random.choice(VOCAB, p=verify_without_replacement(p, q, siblings))] += 1
    assert compute_chi_squared(found, draws * p) < CHI_SQUARED
    wrong = enumerate_result(accept_any_branch, draw_independent, p, q, 2)
    assert compute_chi_squared(draws * wrong, draws * p) > CHI_SQUARED, "the test can tell"


def compute_chi_squared(found: Chances, expected: Chances) -> float:
    return float(((found - expected) ** 2 / expected).sum())
