"""Noise that is as large as it says, and never less than a session's ε needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from splitup_private.split.noise import (
    Noise,
    RowNoise,
    compute_delta,
    compute_epsilon,
    compute_sigma,
    draw_normal,
)

from splitup.core.errors import InvalidInput

WIDTH, LENGTH = 32, 3.0
RNG = np.random.default_rng(5)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.1, 0.3), (1.0, 0.5), (3.0, 2.0), (30.0, 6.0)])
def test_delta_is_what_two_gaussians_differ_by(epsilon: float, mu: float) -> None:
    x = np.linspace(-40, 40, 2_000_001)
    one, other = (np.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi) for mean in (mu, 0))
    wanted = np.trapezoid(np.maximum(0, one - math.exp(epsilon) * other), x)
    assert compute_delta(epsilon, mu) == pytest.approx(wanted, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 100.0, 5_000.0, 1e6])
@pytest.mark.parametrize("rows", [1, 50, 4_096])
def test_a_session_costs_what_was_asked_for_and_no_more(epsilon: float, rows: int) -> None:
    sigma = compute_sigma(epsilon, 1e-6, rows)
    assert compute_epsilon(sigma, 1e-6, rows) == pytest.approx(epsilon, rel=1e-6)
    assert compute_epsilon(sigma, 1e-6, rows) <= epsilon * (1 + 1e-9)
    assert compute_epsilon(sigma, 1e-6, max(1, rows // 2)) <= epsilon * (1 + 1e-9)
    assert compute_epsilon(sigma / 2, 1e-6, rows) > epsilon
    assert compute_sigma(epsilon, 1e-6, 4 * rows) == pytest.approx(2 * sigma)
    assert compute_epsilon(sigma, 1e-6, 0) == 0.0
    if rows == 1 and epsilon <= 1:  # the classic bound (Dwork and Roth 2014) needs more noise
        assert sigma < 2 * math.sqrt(2 * math.log(1.25e6)) / epsilon


def test_rows_are_unit_vectors_with_noise_of_the_models_length() -> None:
    noise = RowNoise(Noise(500.0), 2_000, LENGTH)
    rows = np.asarray(RNG.normal(size=(1_000, WIDTH)) * RNG.uniform(0.1, 50, (1_000, 1)), "<f4")
    rows[7] = 0
    sent = noise.add(rows)
    assert sent.dtype == np.dtype("<f4") and sent.shape == rows.shape
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    added = (sent / LENGTH - rows / np.where(lengths > 0, lengths, 1)) / noise.sigma
    assert abs(added.mean()) < 0.03 and abs(added.std() - 1) < 0.03
    assert abs(np.mean(added**4) - 3) < 0.3
    assert 0 < noise.epsilon < 500.0
    again = noise.add(rows)
    assert not np.allclose(sent, again), "noise is never used twice"
    assert noise.epsilon == pytest.approx(500.0)
    with pytest.raises(InvalidInput, match="is for 2000 rows, and 2001"):
        noise.add(rows[:1])


def test_numbers_are_normal() -> None:
    drawn = draw_normal(200_001)
    assert len(drawn) == 200_001 and np.isfinite(drawn).all()
    assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
    assert abs((np.abs(drawn) < 1).mean() - math.erf(1 / math.sqrt(2))) < 0.01
    assert abs(np.corrcoef(drawn[:100_000], drawn[100_000:200_000])[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0, 1e-6), (-1, 1e-6), (math.nan, 1e-6), (math.inf, 0.1), (1, 0), (1, 1)]
)
def test_a_promise_of_nothing_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidInput, match="noise needs an epsilon"):
        Noise(epsilon, delta)
