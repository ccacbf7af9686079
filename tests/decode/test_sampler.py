from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.errors import Implausible, InvalidInput
from splitup.decode.sampler import Sampler, _get_gumbel, compute_gumbel


def test_zero_temperature_takes_the_first_largest_logit() -> None:
    logits = np.array([0.5, 2.0, 2.0, -1.0], dtype=np.float32)
    assert Sampler().choose(logits, 7) == 1


def test_noise_is_pinned() -> None:
    # a vector: replaying a sampled text years later depends on these bits
    expected = [-0.15990158959464337, -0.029696744891447985, -1.1937469859707912]
    np.testing.assert_allclose(compute_gumbel(1, 2, 3), expected, rtol=1e-15)
    second = [0.5926452614463178, 0.1461234292263279, 1.0257845214594847]
    np.testing.assert_allclose(compute_gumbel(1, 2, 3, 1), second, rtol=1e-15)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_noise_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    noise = compute_gumbel(seed, position, 64)
    assert np.array_equal(noise, compute_gumbel(seed, position, 64))
    assert np.array_equal(noise[:16], compute_gumbel(seed, position, 16))
    assert not np.array_equal(noise, compute_gumbel(seed ^ 1, position, 64))
    assert not np.array_equal(noise, compute_gumbel(seed, position + 1, 64))
    assert np.isfinite(noise).all()


def test_sampling_follows_the_softmax() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], dtype=np.float32))
    for temperature in (1.0, 0.5):
        sampler = Sampler(temperature, seed=11)
        counts = np.bincount([sampler.choose(logits, p) for p in range(4000)], minlength=3)
        weights = np.exp(logits / temperature)
        np.testing.assert_allclose(counts / 4000, weights / weights.sum(), atol=0.03)


def test_top_k_and_then_top_p() -> None:
    logits = np.log(np.array([0.1, 0.3, 0.3, 0.2, 0.1], dtype=np.float32))

    def draw(**change: float) -> set[int]:
        sampler = Sampler(1.0, seed=3, **change)  # type: ignore[arg-type]
        return {sampler.choose(logits, position) for position in range(300)}

    assert draw() == {0, 1, 2, 3, 4}
    assert draw(top_k=1) == {1}  # of equal ones the first
    assert draw(top_k=3) == {1, 2, 3}
    assert draw(top_p=0.25) == {1} and draw(top_p=0.55) == {1, 2}
    # of the three that are left, the first two have 0.75 of the probability
    assert draw(top_k=3, top_p=0.7) == {1, 2} and draw(top_k=3, top_p=0.8) == {1, 2, 3}
    assert Sampler(0.0, top_k=2, top_p=0.1).choose(logits, 0) == 1


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 40))
def test_top_k_takes_the_first_of_equal_ones(values: list[int], count: int) -> None:
    logits = np.array(values, dtype=np.float32)
    kept = sorted(sorted(range(len(values)), key=lambda index: -values[index])[:count])
    noisy = logits + compute_gumbel(5, 9, len(values))
    expected = kept[int(np.argmax(noisy[kept]))]
    assert Sampler(1.0, seed=5, top_k=count).choose(logits, 9) == expected


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])  # nearly all are kept, some, a few
def test_top_p_keeps_the_fewest_of_many(spread: float) -> None:
    logits = np.random.default_rng(4).normal(0, spread, 4_000).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    powers = np.exp(logits[order].astype(np.float64))
    kept = order[: 1 + np.searchsorted(np.cumsum(powers), 0.9 * powers.sum())]
    noisy = logits + compute_gumbel(6, 1, logits.size)
    expected = kept[np.argmax(noisy[kept])]
    assert Sampler(1.0, seed=6, top_p=0.9).choose(logits, 1) == expected


def test_preparing_changes_no_token() -> None:
    logits = np.linspace(0, 1, 500, dtype=np.float32)
    plain = [Sampler(1.0, seed=2).choose(logits, position) for position in range(40)]
    Sampler(1.0, seed=2).prepare(7, logits.size + 1)  # of another size: of no use
    for position in range(20):
        Sampler(1.0, seed=2).prepare(position, logits.size)
        hits = _get_gumbel.cache_info().hits
        assert Sampler(1.0, seed=2).choose(logits, position) == plain[position]
        assert _get_gumbel.cache_info().hits == hits + 1
    assert len(set(plain)) > 1
    Sampler().prepare(0, logits.size)


def test_every_iteration_has_noise_of_its_own() -> None:
    noise = [compute_gumbel(3, 8, 50, iteration) for iteration in range(3)]
    assert noise[0].tobytes() == compute_gumbel(3, 8, 50).tobytes()
    assert not np.intersect1d(np.concatenate(noise[:2]), np.concatenate(noise[2:])).size
    logits = np.zeros(50, np.float32)
    for sampler in (Sampler(1.0, 3), Sampler(1.0, 3, top_k=49)):
        chosen = [sampler.choose(logits, 8, iteration) for iteration in range(3)]
        assert len(set(chosen)) > 1 and chosen[0] == sampler.choose(logits, 8)


def test_probabilities_are_those_of_what_may_be_chosen() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    np.testing.assert_allclose(Sampler().compute_probabilities(logits), [0.5, 0.3, 0.2], 1e-6)
    cold = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(Sampler(0.5).compute_probabilities(logits), cold, 1e-6)
    found = Sampler(1.0, top_k=2).compute_probabilities(logits)
    np.testing.assert_allclose(found, [0.625, 0.375, 0.0], 1e-6)
    logits[1] = np.inf
    assert np.isnan(Sampler().compute_probabilities(logits)).all()


def test_warpers_do_not_move_the_noise() -> None:
    logits = np.array([1.0, 3.0, 2.0, -1.0], dtype=np.float32)
    free, warped = Sampler(1.0, 7), Sampler(1.0, 7, top_k=2)
    for position in range(100):
        if (token := free.choose(logits, position)) in (1, 2):
            assert warped.choose(logits, position) == token


@pytest.mark.parametrize("change", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_warpers_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="top_"):
        Sampler(1.0, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf"), 1e6])
def test_impossible_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidInput, match="temperature"):
        Sampler(temperature)


def test_impossible_seed_is_refused() -> None:
    with pytest.raises(InvalidInput, match="seed"):
        Sampler(1.0, seed=2**64)


def test_nan_is_refused() -> None:
    with pytest.raises(Implausible, match="NaN"):
        Sampler(1.0).choose(np.array([0.0, np.nan], dtype=np.float32), 3)


def test_min_p_keeps_what_is_likely_enough_against_the_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.15, 0.05], dtype=np.float32))

    def draw(**change: float) -> set[int]:
        sampler = Sampler(1.0, seed=3, **change)  # type: ignore[arg-type]
        return {sampler.choose(logits, position) for position in range(300)}

    assert draw(min_p=0.5) == {1, 2} and draw(min_p=0.3) == {1, 2, 3} and draw(min_p=1.0) == {1}
    assert draw(min_p=0.3, top_k=2) == {1, 2}
    with pytest.raises(InvalidInput, match="min_p"):
        Sampler(min_p=1.5)
