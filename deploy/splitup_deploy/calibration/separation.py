"""Find a tolerance that separates correct results from perturbed ones. Pure functions.

A tolerance has to accept every correct output and to reject every perturbed one. It is in the
middle (the geometric mean) of the largest difference between variants and the smallest difference
of a perturbation, at least ``MARGIN`` times away from both: devices that were not measured may
differ more, perturbations that were not tried less, and no stake may be taken from a correct node.
A difference below one rounding counts as one rounding. Every further metric is one more way to
reject a correct output, so a metric is added only for a perturbation that the metrics before it do
not detect, relative L2 first. If no metric detects some perturbation, there is no tolerance, and
only equal bytes count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from splitup.core import limits
from splitup.core.tensors import TensorSpec
from splitup.graph.compare import MANTISSA_BITS, PPB, Metrics, Tolerance, compute_metrics
from splitup.graph.dtypes import FLOATS

MARGIN: Final = 4
BOUNDS: Final = tuple(name for name in Tolerance.model_fields if name != "dtype")

Spread = dict[str, int]  # by bound: the largest or the smallest that was measured


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured differences of one task and dtype, and the tolerance they allow."""

    dtype: str
    honest: Spread
    perturbations: Mapping[str, Spread]  # by name: its smallest difference
    tolerance: Tolerance | None
    reason: str  # why there is no tolerance, "" when there is one


def _get_floor(dtype: str, name: str) -> int:
    """Return the difference that a single rounding may make, in the bound's unit."""
    if name == "max_ulp":
        return 1
    share = 1 / limits.COMPARED_LARGEST if name == "exponent_ppb" else 2.0 ** -MANTISSA_BITS[dtype]
    return math.ceil(PPB * share)


def measure_step(
    ports: Sequence[TensorSpec], claimed: Sequence[bytes], recomputed: Sequence[bytes]
) -> dict[str, list[Metrics]]:
    """Return the metrics of one step's outputs, by dtype; ports of equal bytes are left out."""
    found: dict[str, list[Metrics]] = {}
    for port, one, other in zip(ports, claimed, recomputed, strict=True):
        if one != other:
            found.setdefault(port.dtype, []).append(compute_metrics(port.dtype, one, other))
    return found


def take_largest(metrics: Iterable[Metrics]) -> Spread:
    """Return the largest of every bounded metric; what is not finite counts as the largest."""
    spread = dict.fromkeys(BOUNDS, 0)
    for item in metrics:
        for name in BOUNDS:
            value = limits.MAX_TOLERANCE + 1 if item.nonfinite else item.measure(name)
            spread[name] = max(spread[name], value)
    return spread


def take_smaller(one: Spread | None, other: Spread) -> Spread:
    """Return the smaller of every metric: a perturbation's smallest difference."""
    if one is None:
        return other
    return {name: min(one[name], other[name]) for name in BOUNDS}


def calibrate(dtype: str, honest: Spread, perturbations: Mapping[str, Spread]) -> Calibration:
    """Return the tolerance for outputs of one dtype of a task, or why there is none."""

    def refuse(reason: str) -> Calibration:
        return Calibration(dtype, honest, perturbations, None, reason)

    if dtype not in FLOATS:
        return refuse("integers have to be equal" if any(honest.values()) else "equal everywhere")
    if not perturbations:
        return refuse("no perturbation changes it, so no bound can be derived")
    least = {name: max(honest[name], _get_floor(dtype, name)) for name in BOUNDS}
    chosen: dict[str, int] = {}  # metric -> the smallest difference that it detects
    for perturbation, spread in perturbations.items():
        tells = [
            name
            for name in BOUNDS
            if MARGIN * MARGIN * least[name] < spread[name] and least[name] < limits.MAX_TOLERANCE
        ]
        if not tells:
            return refuse(f"'{perturbation}' differs too little from correct results")
        used = next((name for name in tells if name in chosen), tells[0])
        chosen[used] = min(spread[used], chosen.get(used, spread[used]))
    return Calibration(
        dtype,
        honest,
        perturbations,
        Tolerance(
            dtype=dtype,  # type: ignore[arg-type]
            **{
                name: min(limits.MAX_TOLERANCE, math.isqrt(least[name] * chosen[name]))
                if name in chosen
                else None
                for name in BOUNDS
            },
        ),
        "",
    )
