"""Rotary position embedding (rope): its frequencies, scalings for long contexts, and its table.

Angles are computed in decimal and integer arithmetic, because libm's last bit differs between
machines and the table is part of a task's identity.
Source: RoFormer, arXiv 2104.09864, section 3.2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from decimal import Context as DecimalContext
from typing import Any, Final

import numpy as np

from splitup.core import tuning
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.weight_sources import Table

_EXACT: Final = DecimalContext(prec=60)
_TWO_PI: Final = Decimal("6.28318530717958647692528676655900576839433879875021164194988918")
_PLACES: Final = 128  # binary places of sines and cosines
_BLOCK: Final = 512  # positions


@dataclass(frozen=True, slots=True)
class Rope:
    """Radians per position of every pair of a head's elements; ``scale`` multiplies the results.

    Element i is paired with element i + pairs. A head longer than twice the pairs keeps the rest
    of its elements as they are. ``note`` says what the model's developer should know of the choice.
    """

    frequencies: tuple[Decimal, ...]
    scale: float = 1.0
    note: str = field(default="", compare=False)

    @property
    def pairs(self) -> int:
        """Return the number of rotated pairs."""
        return len(self.frequencies)

    def divide(self, divisors: Sequence[Decimal | float], scale: float = 1.0) -> Rope:
        """Return this with every frequency divided by its divisor (LongRoPE, GGUF's factors)."""
        with localcontext(_EXACT):
            rows = zip(self.frequencies, divisors, strict=True)
            frequencies = tuple(value / Decimal(divisor) for value, divisor in rows)
        return replace(self, frequencies=frequencies, scale=scale)


@dataclass(frozen=True, slots=True)
class RopeTable(Table):
    """The bytes of a rope table, computed when they are read."""

    rope: Rope
    context: int

    def read(self) -> Iterator[bytes]:
        """Yield float32 [context, 2, pairs]: cosines, then sines."""
        yield compute_rope_table(self.context, self.rope)


@dataclass(frozen=True, slots=True)
class GrowthTable(Table):
    """The bytes of factors of queries: 1 + rate ln(1 + n) for n below ``count``."""

    rate: float
    count: int

    def read(self) -> Iterator[bytes]:
        """Yield float32 [count]."""
        with localcontext(_EXACT):
            logs = [Decimal(1 + n).ln() for n in range(self.count)]
            values = [float(1 + Decimal(self.rate) * log) for log in logs]
        yield np.array(values, "<f4").tobytes()


def make_rope(theta: float, dims: int) -> Rope:
    """Return the frequencies theta^(-2i/dims) for pairs of ``dims`` elements.

    Raises InvalidModel outside the bounds within which exact arithmetic is fast enough.
    """
    if not tuning.MIN_ROPE_THETA <= theta <= tuning.MAX_ROPE_THETA:
        raise InvalidModel(
            f"rope theta {theta:g} is out of range; models use {tuning.MIN_ROPE_THETA:g} "
            f"to {tuning.MAX_ROPE_THETA:g}"
        )
    if not 0 < dims <= tuning.MAX_ROPE_DIMS:
        raise InvalidModel(
            f"{dims} rotary dimensions are out of range; a head turns 2 to {tuning.MAX_ROPE_DIMS}"
        )
    return Rope(
        tuple(
            _EXACT.power(Decimal(theta), _EXACT.divide(Decimal(-2 * pair), Decimal(dims)))
            for pair in range(dims // 2)
        )
    )


def scale_linear(rope: Rope, factor: float) -> Rope:
    """Return ``rope`` with all positions divided by ``factor`` (arXiv 2306.15595)."""
    return rope.divide([factor] * rope.pairs)


def scale_llama3(rope: Rope, factor: float, low: float, high: float, original: int) -> Rope:
    """Return ``rope`` scaled as in Llama 3.1: slow pairs by ``factor``, fast pairs not at all.

    A pair is slow below ``low`` turns in the ``original`` context and fast above ``high`` turns;
    between the two the division is blended.
    """

    def stretch(frequency: Decimal) -> Decimal:
        turns = original * frequency / _TWO_PI
        share = (turns - Decimal(low)) / (Decimal(high) - Decimal(low))
        share = min(max(share, Decimal(0)), Decimal(1))
        return frequency * ((1 - share) / Decimal(factor) + share)

    with localcontext(_EXACT):
        return Rope(tuple(stretch(frequency) for frequency in rope.frequencies), rope.scale)


def scale_yarn(
    rope: Rope,
    *,
    theta: float,
    factor: float,
    original: int,
    fast: float,
    slow: float,
    truncate: bool,
    scale: float,
) -> Rope:
    """Return ``rope`` scaled by YaRN (arXiv 2309.00071, section 3.2).

    Pairs that turn ``fast`` times in the ``original`` context stay, those that turn ``slow`` times
    are divided by ``factor``, with a ramp over the pairs between.
    """
    dims = 2 * rope.pairs

    def find_pair(turns: float) -> Decimal:
        ratio = original / (Decimal(turns) * _TWO_PI)
        return dims * ratio.ln() / (2 * Decimal(theta).ln())

    with localcontext(_EXACT):
        low, high = find_pair(fast), find_pair(slow)
        if truncate:
            low = low.to_integral_value(ROUND_FLOOR)
            high = high.to_integral_value(ROUND_CEILING)
        low, high = max(low, Decimal(0)), min(high, Decimal(dims - 1))
        if low == high:
            high += Decimal("0.001")  # as every implementation does
        frequencies = []
        for pair, frequency in enumerate(rope.frequencies):
            share = min(max((pair - low) / (high - low), Decimal(0)), Decimal(1))
            frequencies.append(frequency * (share / Decimal(factor) + 1 - share))
        return Rope(tuple(frequencies), scale)


def compute_yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's correction of attention's temperature, 0.1 weight ln(factor) + 1."""
    with localcontext(_EXACT):
        return float(Decimal(weight) * Decimal(factor).ln() / 10 + 1) if factor > 1 else 1.0


def compute_longrope_scale(factor: float, original: int) -> float:
    """Return LongRoPE's correction, sqrt(1 + ln(factor) / ln(original))."""
    with localcontext(_EXACT):
        if factor <= 1:
            return 1.0
        return float((1 + Decimal(factor).ln() / Decimal(original).ln()).sqrt())


@functools.lru_cache(maxsize=2)  # every layer reads the same one, or one of two
def compute_rope_table(context: int, rope: Rope) -> bytes:
    """Return cos and sin of position x frequency, times scale: float32 [context, 2, pairs].

    In integers of 128 binary places, each position from the one before by one rotation; beyond
    the first block, each by one rotation in float64 from a position of the first block. Products
    and sums of float64 are the same on every machine.
    """
    table: np.ndarray[Any, np.dtype[np.float32]] = np.empty((context, 2, rope.pairs), "<f4")
    blocks = -(-context // _BLOCK)
    for pair, frequency in enumerate(rope.frequencies):
        step = int(_EXACT.multiply(frequency, Decimal(1 << _PLACES)).to_integral_value())
        fine, stride = _rotate(_compute_cos_sin(step), _BLOCK)
        coarse, _ = _rotate(stride, blocks)
        (cos, sin), (cos_block, sin_block) = fine, coarse[:, :, None]
        cosines = cos_block * cos - sin_block * sin
        sines = sin_block * cos + cos_block * sin
        table[:, 0, pair] = cosines.reshape(-1)[:context] * rope.scale
        table[:, 1, pair] = sines.reshape(-1)[:context] * rope.scale
    return table.tobytes()


def _rotate(
    step: tuple[int, int], count: int
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], tuple[int, int]]:
    """Return cos and sin of 0 … count-1 rotations, float64 [2, count], and of ``count``."""
    result = np.empty((2, count))
    one = 1 << _PLACES
    cosine, sine = one, 0
    for place in range(count):
        result[:, place] = cosine / one, sine / one  # integer division is correctly rounded
        cosine, sine = (
            (cosine * step[0] - sine * step[1]) >> _PLACES,
            (sine * step[0] + cosine * step[1]) >> _PLACES,
        )
    return result, (cosine, sine)


def _compute_cos_sin(angle: int) -> tuple[int, int]:
    """Return cos and sin of a small fixed-point angle, at least 0, by their Taylor series."""
    sums = [0, 0]
    term, order = 1 << _PLACES, 0
    while term:
        sign = -1 if order % 4 >= 2 else 1
        sums[order % 2] += sign * term
        order += 1
        term = (term * angle >> _PLACES) // order
    return sums[0], sums[1]
