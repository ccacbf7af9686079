"""Find a tolerance that separates correct results from perturbed ones. Pure functions.

A tolerance has to accept every correct output and to reject every perturbed one. It is ``MARGIN``
times below the smallest difference of a perturbation, for perturbations that were not tried differ
less. It has to be ``MARGIN`` times above the largest difference between variants, for devices that
were not measured differ more, and no stake may be taken from a correct node.

It is not nearer to what variants differ by, because few steps do not show how much that may be. A
number that is rounded to fewer bits on the way, as a cache of keys and values in float16 holds it,
is nearly in the middle of two such numbers now and then. Two devices then round it to one each, and
the outputs of that step and later ones differ a hundred times as much as in most steps.

So there is also *noise*: what the task's outputs differ by when every rounding errs by one unit
more (``splitup.graph.noise``), where more numbers are rounded the other way. Members who find an
output outside the tolerance compute with noise, too, and decide nothing if that alone moves outputs
by half the tolerance. So a tolerance has to be twice the largest difference of noise.

A difference below one rounding of one number counts as that. Every further metric is one more way
to reject a correct output: a perturbation is detected by the first metric that can, relative L2
before the others. If no metric detects some perturbation, there is no tolerance, and only equal
bytes count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from splitup.core import limits
from splitup.core.tensors import TensorSpec
from splitup.graph.compare import MANTISSA_BITS, PPB, Metrics, compute_metrics
from splitup.graph.dtypes import FLOATS
from splitup.graph.tolerances import Tolerance

MARGIN: Final = 4
NOISE_MARGIN: Final = 2  # members halve the tolerance for their own test with noise
BOUNDS: Final = tuple(name for name in Tolerance.model_fields if name != "dtype")

Spread = dict[str, int]  # by bound: the largest or the smallest that was measured


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured differences of one task and dtype, and the tolerance they allow."""

    dtype: str
    honest: Spread
    noise: Spread
    perturbations: Mapping[str, Spread]  # by name: its smallest difference
    tolerance: Tolerance | None
    reason: str  # why there is no tolerance, "" when there is one


def _get_floor(dtype: str, name: str) -> int:
    """Return the difference that one rounding of one number may make, in the bound's unit."""
    if name == "max_ulp":
        return 1
    share, rounding = 1 / limits.COMPARED_LARGEST, 2.0 ** -MANTISSA_BITS[dtype]
    size = {"relative_l2_ppb": rounding * math.sqrt(share), "mantissa_ppb": rounding * share}
    return math.ceil(PPB * size.get(name, share))


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


def calibrate(
    dtype: str, honest: Spread, noise: Spread, perturbations: Mapping[str, Spread]
) -> Calibration:
    """Return the tolerance for outputs of one dtype of a task, or why there is none."""

    def refuse(reason: str) -> Calibration:
        return Calibration(dtype, honest, noise, perturbations, None, reason)

    if dtype not in FLOATS:
        return refuse("integers have to be equal" if any(honest.values()) else "equal everywhere")
    if not perturbations:
        return refuse("no perturbation changes it, so no bound can be derived")
    least = {
        name: max(
            MARGIN * honest[name], MARGIN * _get_floor(dtype, name), NOISE_MARGIN * noise[name]
        )
        for name in BOUNDS
    }
    chosen: dict[str, int] = {}  # metric -> the smallest difference that it detects
    for perturbation, spread in perturbations.items():
        tells = [
            name
            for name in BOUNDS
            if MARGIN * least[name] < spread[name] and least[name] < limits.MAX_TOLERANCE
        ]
        if not tells:
            return refuse(f"'{perturbation}' differs too little from correct results")
        chosen[tells[0]] = min(spread[tells[0]], chosen.get(tells[0], spread[tells[0]]))
    return Calibration(
        dtype,
        honest,
        noise,
        perturbations,
        Tolerance(
            dtype=dtype,  # type: ignore[arg-type]
            **{
                name: min(limits.MAX_TOLERANCE, chosen[name] // MARGIN) if name in chosen else None
                for name in BOUNDS
            },
        ),
        "",
    )
