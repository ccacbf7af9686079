"""EXP2, LOG2, SIN and POW as polynomials in float64, which give the same bytes on every machine.

All take and give float64 arrays with at least one axis.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np

from splitup.graph.arrays import Array

_SPLIT_BITS: Final = 33  # k * (33 bits of π/2) is exact in float64 for k below 2^20
_LARGE_ANGLE: Final = 2.0**20
_PI_BITS: Final = 1_200  # exact reduction of the largest float64 needs 1,024 + 53 and some


def compute_exp2(x: Array) -> Array:
    """Return 2^x in float64 by Taylor's series of e^t, |t| ≤ ln 2 / 2, to the 14th power."""
    whole = np.rint(np.clip(x, -1_200.0, 1_200.0))
    t = (np.clip(x, -1_200.0, 1_200.0) - whole) * math.log(2.0)
    value = np.full_like(t, 1.0 / math.factorial(14))
    for power in range(13, -1, -1):
        value = value * t + 1.0 / math.factorial(power)
    result = np.ldexp(value, np.where(np.isnan(whole), 0.0, whole).astype(np.int32))
    return np.where(np.isnan(x), math.nan, result)


def compute_log2(x: Array) -> Array:
    """Return log2 in float64: exponent, plus 2/ln 2 · artanh((m - 1)/(m + 1)), √½ ≤ m < √2."""
    mantissa, exponent = np.frexp(np.where((x > 0) & np.isfinite(x), x, 1.0))
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    value = np.zeros_like(s)
    for odd in range(25, 0, -2):
        value = value * square + 1.0 / odd
    result = exponent - small + value * s * (2.0 / math.log(2.0))
    result = np.where(x == 0, -math.inf, np.where(x == math.inf, math.inf, result))
    return np.where((x < 0) | np.isnan(x), math.nan, result)


def compute_sin(x: Array) -> Array:
    """Return sin in float64: the rest after multiples of π/2, then Taylor's series."""
    finite = np.where(np.isfinite(x), x, 0.0)
    small = np.where(np.abs(finite) < _LARGE_ANGLE, finite, 0.0)
    quarter = np.rint(small * (2.0 / math.pi))
    rest = small
    for part in _split_half_pi():
        rest = rest - quarter * part
    for place in zip(*np.nonzero(np.abs(finite) >= _LARGE_ANGLE), strict=True):
        quarter[place], rest[place] = _reduce_large_angle(float(finite[place]))
    square = rest * rest
    sine, cosine = np.zeros_like(rest), np.zeros_like(rest)
    for power in range(9, -1, -1):
        sign = -1.0 if power % 2 else 1.0
        sine = sine * square + sign / math.factorial(2 * power + 1)
        cosine = cosine * square + sign / math.factorial(2 * power)
    turn = np.mod(quarter, 4.0)
    value = np.where(turn % 2 == 0, sine * rest, cosine)
    value = np.where(turn >= 2, -value, value)
    return np.where(np.isfinite(x), np.where(x == 0, x, value), math.nan)


@functools.cache
def _compute_pi(bits: int) -> int:
    """Return π · 2^bits, rounded down a little, by Machin's formula."""

    def arctan_inverse(n: int) -> int:
        term = total = (1 << (bits + 32)) // n
        k, sign = 3, -1
        while term:
            term //= n * n
            total += sign * (term // k)
            k, sign = k + 2, -sign
        return total

    return (16 * arctan_inverse(5) - 4 * arctan_inverse(239)) >> 32


@functools.cache
def _split_half_pi() -> tuple[float, float, float]:
    """Return π/2 as the sum of three float64, the first two of 33 bits."""
    half, parts = _compute_pi(_PI_BITS) >> 1, []
    for _ in range(2):
        shift = half.bit_length() - _SPLIT_BITS
        parts.append(math.ldexp(float(half >> shift), shift - _PI_BITS))
        half &= (1 << shift) - 1
    shift = half.bit_length() - 53
    return parts[0], parts[1], math.ldexp(float(half >> shift), shift - _PI_BITS)


def _reduce_large_angle(x: float) -> tuple[float, float]:
    """Return the multiple of π/2 next to ``x``, modulo 4, and the rest."""
    mantissa, exponent = math.frexp(x)
    scaled = int(math.ldexp(mantissa, 53)) << (exponent - 53 + _PI_BITS)
    half = _compute_pi(_PI_BITS) >> 1
    quarter = (2 * scaled + half) // (2 * half)
    rest = scaled - quarter * half
    shift = max(0, rest.bit_length() - 60)
    return float(quarter % 4), math.ldexp(float(rest >> shift), shift - _PI_BITS)


def compute_pow(x: Array, y: Array) -> Array:
    """Return x^y; of a negative x with the sign of an odd y, NaN for one that is not whole."""
    value = compute_exp2(np.where(x == 0, np.sign(y) * -math.inf, y * compute_log2(np.abs(x))))
    odd = np.mod(np.abs(y), 2.0) == 1.0
    value = np.where((x < 0) & odd, -value, value)
    value = np.where((x < 0) & (y != np.trunc(y)) & np.isfinite(x), math.nan, value)
    return np.where((y == 0) | (x == 1), 1.0, value)
