"""The page's noise is that of ``splitup_private.split.noise``."""

from __future__ import annotations

import numpy as np
import pytest
from gateway_tests.page.device import run_on_device
from splitup_private.split.noise import compute_epsilon, compute_sigma

CASES = [(e, n) for e in (0.01, 1.0, 8.0, 100.0, 5_000.0, 1e6) for n in (1, 50, 4_096)]
WIDTH, ROWS, LENGTH = 32, 1_000, 3.0


def test_sigma_is_the_same() -> None:
    program = "return given.map(([epsilon, rows]) => page.computeSigma(epsilon, rows));"
    found = run_on_device(program, CASES)
    assert found == pytest.approx([compute_sigma(e, 1e-6, n) for e, n in CASES], rel=1e-6)


def test_rows_are_unit_vectors_with_noise_of_the_models_length() -> None:
    rows = np.asarray(np.random.default_rng(5).normal(size=(ROWS, WIDTH)) * 7, np.float32)
    rows[7] = 0
    program = """
        const [rows, mostRows, width, length] = given;
        const noise = new page.RowNoise(500, mostRows, width, length);
        const parts = [noise.add(Float32Array.from(rows)), noise.add(Float32Array.from(rows))];
        let error = "";
        try { noise.add(Float32Array.from(rows)); } catch ({ message }) { error = message; }
        const half = new page.RowNoise(500, mostRows, width, length);
        half.add(Float32Array.from(rows));
        return [noise.sigma, half.epsilon, error, ...parts.map((part) => Array.from(part))];
    """
    given = [rows.ravel().tolist(), 2 * ROWS, WIDTH, LENGTH]
    sigma, epsilon, error, first, second = run_on_device(program, given)
    assert sigma == pytest.approx(compute_sigma(500.0, 1e-6, 2 * ROWS), rel=1e-6)
    assert epsilon == pytest.approx(compute_epsilon(sigma, 1e-6, ROWS), rel=1e-6)
    assert "is for 2000 rows, and 3000" in error
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.where(lengths > 0, lengths, 1)
    drawn = [
        (np.reshape(sent, rows.shape) / LENGTH - units).ravel() / sigma for sent in (first, second)
    ]
    for added in drawn:
        assert abs(added.mean()) < 0.03 and abs(added.std() - 1) < 0.03
        assert abs(np.mean(added**4) - 3) < 0.3
        assert abs(np.corrcoef(added[::2], added[1::2])[0, 1]) < 0.03
    assert abs(np.corrcoef(*drawn)[0, 1]) < 0.03, "noise is never used twice"
