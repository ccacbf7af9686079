"""Gaussian noise on hidden states before they leave the device: (ε, δ) differential privacy.

A row is made a unit vector, so that replacing it by any other changes it by at most 2; Gaussian
noise of standard deviation σ is added to every element; and the sum is scaled to a length that
depends on the model alone. What nodes see of two texts of equal length then differs by (ε, δ).

The accountant is Gaussian differential privacy (Dong, Roth and Su, JRSS B 2022): n rows with noise
σ, each chosen after those before it, compose to μ = 2 √n / σ exactly, and δ(ε) is that of one
Gaussian mechanism (Balle and Wang, ICML 2018). A session's σ is computed for all rows that it may
send, so that its end cannot cost more than was asked for. Lengths and times are not hidden.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup.client.outcome import Array
from splitup.core.errors import InvalidInput

SENSITIVITY: Final = 2.0
_MOST_EPSILON: Final = 1e6  # far above it all that noise does is to cost time
_HALVINGS: Final = 200


@dataclass(frozen=True, slots=True)
class Noise:
    """What a session may tell about its text: ε, in nats, but with probability δ."""

    epsilon: float
    delta: float = 1e-6

    def __post_init__(self) -> None:
        """Raises InvalidInput for an ε or a δ that promises nothing."""
        if not (0 < self.epsilon <= _MOST_EPSILON and 0 < self.delta < 1):
            raise InvalidInput(
                f"noise needs an epsilon from above 0 to {_MOST_EPSILON:g} and a delta between 0 "
                f"and 1, not {self.epsilon} and {self.delta}"
            )


class RowNoise:
    """The noise of one session, which sends at most ``most_rows`` rows of length ``length``."""

    def __init__(self, noise: Noise, most_rows: int, length: float) -> None:
        """Compute σ; see ``compute_sigma``."""
        self.sigma = compute_sigma(noise.epsilon, noise.delta, most_rows)
        self.rows = 0  # so far
        self._noise, self._most_rows, self._length = noise, most_rows, length

    @property
    def epsilon(self) -> float:
        """The ε that the rows so far have cost, for the session's δ."""
        return compute_epsilon(self.sigma, self._noise.delta, self.rows)

    def add(self, rows: Array) -> Array:
        """Return rows float32 [n, width] as they may be sent, once each. Raises InvalidInput."""
        if self.rows + len(rows) > self._most_rows:
            raise InvalidInput(
                f"the session's noise is for {self._most_rows} rows, and {self.rows + len(rows)} "
                "would say more than epsilon allows; open a session for more rows"
            )
        self.rows += len(rows)
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        units = rows / np.where(lengths > 0, lengths, 1.0)
        noisy = units + self.sigma * draw_normal(rows.size).reshape(rows.shape)
        return np.asarray(noisy * self._length, "<f4")


def compute_sigma(epsilon: float, delta: float, rows: int) -> float:
    """Return the least σ with which this many rows are (``epsilon``, ``delta``) private."""
    low, high = 0.0, 1.0  # of μ, in which δ grows
    while compute_delta(epsilon, high) < delta:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_delta(epsilon, middle) <= delta else (low, middle)
    return SENSITIVITY * math.sqrt(rows) / low


def compute_epsilon(sigma: float, delta: float, rows: int) -> float:
    """Return the ε of this many rows."""
    mu = SENSITIVITY * math.sqrt(rows) / sigma
    low, high = 0.0, 1.0
    if compute_delta(0.0, mu) <= delta:
        return 0.0
    while compute_delta(high, mu) > delta:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_delta(middle, mu) > delta else (low, middle)
    return high


def compute_delta(epsilon: float, mu: float) -> float:
    """Return δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), of all that is μ-GDP."""
    if mu == 0:
        return 0.0
    first, second = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    tail = math.erfc(second / math.sqrt(2)) / 2
    if tail > 0:
        return math.erfc(first / math.sqrt(2)) / 2 - math.exp(epsilon + math.log(tail))
    # far out Φ(-x) is φ(x) / x to within 1 / x²; the two densities are then equal
    density = math.exp(-(first**2) / 2) / math.sqrt(2 * math.pi)
    return math.erfc(first / math.sqrt(2)) / 2 - density / second


def draw_normal(count: int) -> Array:
    """Return independent standard normal numbers, float64, from the system's secure generator."""
    pairs = (count + 1) // 2
    raw = np.frombuffer(os.urandom(16 * pairs), "<u8").reshape(2, pairs)
    uniform = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53  # in (0, 1)
    radius = np.sqrt(-2 * np.log(uniform[0]))
    angle = 2 * np.pi * uniform[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
