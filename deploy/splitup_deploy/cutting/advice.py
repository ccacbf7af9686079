"""Say when no cut fits a target, or a cut is not worth computing, and what to give instead.

Where attention's cache of a long context does not fit beside its weights, a cut goes through
attention: tasks that hold state are parted from their weights, and send each other keys, values and
scores. Such a model computes rightly and hardly at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup.graph.manifest import Manifest, TaskSource
from splitup.graph.rules import check_graph
from splitup_deploy.cutting.partition import (
    SMALLER_SIZES,
    TargetTooSmall,
    bound_target,
    round_up,
    write_size,
)
from splitup_deploy.frontends.tracing import TracedModel

# What is sent within a moment on any line: tiny models may send more than they weigh.
_LEAST_BYTES: Final = 16_000_000
_LEAST_CONTEXT: Final = 256
_TRIES: Final = 4

Rebuild = Callable[[Collection[int], int], Manifest]  # for targets and a context


def count_crossing_bytes(manifest: Manifest) -> int:
    """Return the bytes that tasks send each other in a step, each value once."""
    crossing = {
        (port.source.task, port.source.port): port.nbytes
        for task in manifest.tasks
        for port in task.inputs
        if isinstance(port.source, TaskSource)
    }
    return sum(crossing.values())


def is_wasteful(manifest: Manifest) -> bool:
    """Return whether a text model's tasks send each other more than all weights in every step."""
    weights = sum(task.weights_bytes for task in manifest.tasks)
    return manifest.text is not None and count_crossing_bytes(manifest) > max(weights, _LEAST_BYTES)


def describe_waste(manifest: Manifest, targets: Collection[int], rebuild: Rebuild) -> str:
    """Return what is wrong with a wasteful cut, and what to give instead; compiles a few others."""
    assert manifest.text is not None
    context, sent = manifest.text.context, count_crossing_bytes(manifest)
    found = []
    shorter = [context >> shift for shift in range(1, _TRIES + 1)]
    for length in (length for length in shorter if length >= _LEAST_CONTEXT):
        if _fits(rebuild, targets, length):
            found.append(f"--context {length}")
            break
    for factor in (2**shift for shift in range(1, _TRIES + 1)):
        larger = tuple(factor * target for target in targets)
        if _fits(rebuild, larger, context):
            found.append("--target-vram " + ",".join(f"{_round_mb(size)}MB" for size in larger))
            break
    advice = f": give {' or '.join(found)}" if found else ""
    return (
        f"at a context of {context} the {len(manifest.tasks)} tasks would send each other "
        f"{_round_mb(sent)} MB in every step, more than all their weights, because attention's "
        f"caches do not fit beside them{advice}"
    )


def _fits(rebuild: Rebuild, targets: Collection[int], context: int) -> bool:
    try:
        return not is_wasteful(rebuild(targets, context))
    except InvalidModel:
        return False


def _round_mb(nbytes: int) -> int:
    return -(-nbytes // 10**6)


# ---- targets that are too small ----------------------------------------------------------------

_CUTS: Final = 12  # of cuts, each of which may take a second
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
            f"however it is cut, a task needs {write_size(round_up(least))} of memory; the target "
            f"is {write_size(max(targets))}",
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
    for _ in range(_CUTS):
        if works(middle):
            high = middle
        else:
            low = middle
        if high and high <= _NEAR**2 * low:
            break
        middle = round_up(math.isqrt(low * high) if high else max(largest, 2 * low))
    return high or None
