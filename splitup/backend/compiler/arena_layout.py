"""The order of a compiled task's kernels, and the offsets of its values in one arena.

They replace tinygrad's own order and memory planner, so that the task takes the memory that the
compiler predicted by the same rules (``splitup.graph.memory``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.compiler.lowering import Lowered
from splitup.graph.memory import LiveRange, place_buffers, round_up


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The kernel calls in order, on views of the arena."""

    calls: tuple[UOp, ...]
    views: dict[UOp, tuple[UOp, int]]  # the arena, and the offset in bytes
    buffers: tuple[dict[UOp, UOp], ...]  # of every call: its arguments, and the buffers of each
    outputs: tuple[UOp, ...]


def plan_memory(linear: UOp, lowered: Lowered) -> MemoryPlan:
    """Give every value its offset. Inputs, weights and states stay buffers of their own."""
    writers: dict[UOp, int] = {}
    held = {*lowered.inputs, *lowered.weights, *lowered.states}
    operands = [
        tuple(source for source in call.src[1:] if source.op is Ops.BUFFER) for call in linear.src
    ]
    for index, buffers in enumerate(operands):
        for buffer in buffers:  # the first call that mentions a value is the one that writes it
            if buffer not in held:
                writers.setdefault(buffer, index)
    times = _order_calls(lowered.values, operands, writers)
    order = sorted(times, key=lambda index: times[index])
    apart = held | set(lowered.updates)
    spans: dict[UOp, tuple[int, int]] = {}
    for index in order:
        time = times[index][0]
        for buffer in operands[index]:
            if buffer not in apart:
                spans[buffer] = (spans.get(buffer, (time, time))[0], time)
    end = len(lowered.values)
    outputs = set(lowered.outputs)
    ranges = [
        LiveRange(first, end if buffer in outputs else last, round_up(int(buffer.nbytes())))
        for buffer, (first, last) in spans.items()
    ]
    offsets, size = place_buffers(ranges)
    moved: dict[UOp, UOp] = {}
    views: dict[UOp, tuple[UOp, int]] = {}
    if spans:
        arena = UOp.new_buffer(next(iter(spans)).device, size, dtypes.int8)
        for buffer, offset in zip(spans, offsets, strict=True):
            view = arena[offset : offset + int(buffer.nbytes())]
            moved[buffer] = view.bitcast(buffer.dtype)
            views[moved[buffer]] = arena, offset
    linear = linear.replace(src=tuple(linear.src[index] for index in order))
    placed = tuple(moved.get(buffer, buffer) for buffer in lowered.outputs)
    # within one call no two buffers lie in one place
    buffers = tuple({moved.get(b, b): b for b in operands[index]} for index in order)
    calls = linear.substitute(moved, name="memory plan", walk=True).src
    return MemoryPlan(calls, views, buffers, placed)


def _order_calls(
    values: Sequence[UOp], operands: Sequence[Sequence[UOp]], writers: dict[UOp, int]
) -> dict[int, tuple[int, int]]:
    """Return every call's time and position: the calls that a value needs come just before it."""
    times: dict[int, tuple[int, int]] = {}
    for time, value in enumerate(values):
        pending = [writers[value]] if value in writers else []
        while pending:
            index = pending[-1]
            needed = [writers[buffer] for buffer in operands[index] if buffer in writers]
            missing = [other for other in needed if other != index and other not in times]
            if missing and index not in times:
                pending.extend(missing)
                continue
            times.setdefault(index, (time, len(times)))
            pending.pop()
    return times
