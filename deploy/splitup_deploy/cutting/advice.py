"""Say when a cut is not worth computing, and which one is.

Where attention's cache of a long context does not fit beside its weights, a cut goes through
attention: tasks that hold state are parted from their weights, and send each other keys, values and
scores. Such a model computes rightly and hardly at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from splitup.core.errors import InvalidModel
from splitup.graph.manifest import Manifest, TaskSource

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
