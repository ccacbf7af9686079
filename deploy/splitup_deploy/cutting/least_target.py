"""Say which target memory is enough, when one is too small for any cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup.graph.rules import check_graph
from splitup_deploy.cutting.partition import SMALLER_SIZES, TargetTooSmall, bound_target
from splitup_deploy.frontends.tracing import TracedModel

_TRIES: Final = 12  # of cuts, each of which may take a second
_NEAR: Final = 1.03  # the square of this factor is close enough

Bounds = tuple[int, int]
_Cut = Callable[[TracedModel, Collection[int]], Any]


def measure_bounds(whole: TracedModel) -> Bounds:
    """Return what bounds the least target of a model (``bound_target``)."""
    return bound_target(check_graph(whole.graph), whole.labels)


def check_least(bounds: Bounds, targets: Collection[int]) -> None:
    """Raise TargetTooSmall when no cut can be, before one is tried; dividing takes long."""
    least, _ = bounds
    if max(targets) < least:
        raise TargetTooSmall(
            f"however it is cut, a task needs {least} bytes of memory; the target is "
            f"{max(targets)}",
            SMALLER_SIZES,
        )


def advise_target(
    whole: TracedModel,
    bounds: Bounds,
    targets: Collection[int],
    cut: _Cut,
    error: TargetTooSmall,
) -> str:
    """Return what to do about an error of ``cut``: which target works, what else helps."""
    least = find_least_target(whole, bounds, targets, cut)
    found = "" if least is None else f"raise --target-vram to at least {write_size(least)}"
    also = error.remedy and f"{error.remedy} also helps" if found else f"try {error.remedy}"
    if found and also:
        return f"{found} ({also})"
    return found or also


def find_least_target(
    whole: TracedModel, bounds: Bounds, targets: Collection[int], cut: _Cut
) -> int | None:
    """Return about the least memory of the largest card with which ``cut`` succeeds.

    It was tried, with the other cards, on weights of which only the shapes are known. None: no
    memory is enough.
    """
    shapes, others = whole.forget_weights(), sorted(targets)[:-1]

    def works(target: int) -> bool:
        with suppress(InvalidModel):
            cut(shapes, (*others, target))
            return True
        return False

    least, largest = bounds
    low, high = max(1, *targets, least - 1), 0  # one try is often enough
    middle = round_up(int(low * _NEAR))
    for _ in range(_TRIES):
        if works(middle):
            high = middle
        else:
            low = middle
        if high and high <= _NEAR**2 * low:
            break
        middle = round_up(math.isqrt(low * high) if high else max(largest, 2 * low))
    return high or None


def round_up(nbytes: int) -> int:
    """Return the next number of bytes with three significant digits."""
    unit: int = 10 ** max(0, len(str(nbytes)) - 3)
    return -(-nbytes // unit) * unit


def write_size(nbytes: int) -> str:
    """Return a size as --target-vram takes it, exactly: 1_060_000 is "1.06MB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.10g}{name}"
    return str(nbytes)
