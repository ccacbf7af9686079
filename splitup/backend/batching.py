"""Which kernels of a task can compute the rows of several executions at once.

A kernel is **shared** when row i of its output depends only on row i of its inputs and on weights.
Run once over the concatenated rows of several executions, it gives each execution the bits that it
would give alone. All other kernels run once per execution, on views that begin at its first row. So
no bit of a result depends on the other executions of a batch.

``find_spans`` says how consecutive steps of one execution run together: in which order a state is
updated matters then (``splitup.backend.merging``).

Shared kernels are found by analysing tinygrad's kernels: exactly one loop runs over the rows, and
it moves every address by exactly one row: ``index = row * stride + rest``. Neither the row nor the
number of rows occurs in the rest, in a condition or in a value. A kernel that this analysis does
not understand is not shared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinygrad.dtype import AddrSpace, InvalidType
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.compiler.lowering import Lowered
from splitup.cpu.kernel_parts import get_store
from splitup.cpu.loop_indices import NoMatch, is_buffer, refuse_if
from splitup.graph.ir import Dims
from splitup.graph.memory import get_stride
from splitup.graph.rules import CheckedGraph


@dataclass(frozen=True, slots=True)
class Rows:
    """A buffer of rows, as many as a symbol says, ``stride`` elements apart."""

    symbol: str
    stride: int


# A buffer without rows is the same for all executions, an execution's state, or its own.
BufferKind = Rows | Literal["common", "state", "own"]


def find_kinds(graph: CheckedGraph, lowered: Lowered) -> dict[UOp, BufferKind]:
    """Return the kind of every buffer that the graph has: all but temporaries."""
    kinds: dict[UOp, BufferKind] = {}
    for buffer, spec in zip(lowered.inputs, graph.inputs, strict=True):
        kinds[buffer] = _get_kind(graph.get_dims(spec)) or "own"
    kinds |= dict.fromkeys(lowered.weights, "common")
    in_memory = [
        value
        for node, value in zip(graph.nodes, graph.values, strict=True)
        if node.op == "CONTIGUOUS"
    ]
    for buffer, value in zip(lowered.values, in_memory, strict=True):
        if (rows := _get_kind(value.dims)) is not None:
            kinds[buffer] = rows
    return kinds | dict.fromkeys((*lowered.states, *lowered.updates), "state")


def _get_kind(dims: Dims) -> Rows | None:
    """Return the kind of a port or value in memory whose leading dimension is a symbol."""
    if not dims or not isinstance(dims[0], str):
        return None
    return Rows(dims[0], get_stride(math.prod(size for size in dims[1:] if isinstance(size, int))))


def classify_kernel(sink: UOp, buffers: Sequence[UOp], kinds: dict[UOp, BufferKind]) -> bool:
    """Return whether a kernel is shared; add to ``kinds`` a temporary that it writes first.

    ``buffers`` are its arguments by slot. Call it for kernels in the order in which they run.
    """
    params = [uop for uop in sink.toposort() if is_buffer(uop)]
    missing = {buffers[param.arg.slot] for param in params} - set(kinds)
    try:
        target, loops = _get_store(sink)
        refuse_if(missing - {buffers[target.src[0].arg.slot]})
        if missing:
            others = [kinds[b] for p in params if (b := buffers[p.arg.slot]) not in missing]
            kinds[missing.pop()] = _infer_kind(target, loops, others)
        return _is_shared(sink, {p: kinds[buffers[p.arg.slot]] for p in params}, loops)
    except NoMatch:
        kinds |= dict.fromkeys(missing, "own")
        return False


def _get_store(sink: UOp) -> tuple[UOp, list[UOp]]:
    """Return where a kernel writes, and its loops."""
    store, loops = get_store(sink)
    refuse_if(sink.src[0].op is not Ops.END or any(loop.op is not Ops.RANGE for loop in loops))
    return store.src[0], loops


def _infer_kind(target: UOp, loops: Sequence[UOp], others: Iterable[BufferKind]) -> BufferKind:
    """Return the kind of a temporary from the index at which the kernel writes it."""
    row_loops = [loop for loop in loops if loop.src[0].op is not Ops.CONST]
    if not row_loops:
        return "common" if all(kind == "common" for kind in others) else "own"
    if len(row_loops) > 1:
        return "own"
    row = row_loops[0]
    symbol, index = _get_symbol(row), target.src[1]
    stride = _get_factor(index, row)
    rest = index.substitute({row: row.const_like(0)}).simplify()
    if any(uop.op is Ops.INDEX for uop in rest.toposort()):
        return "own"
    return Rows(symbol, stride) if 0 <= rest.vmin and rest.vmax < stride else "own"


def _is_shared(sink: UOp, kinds: Mapping[UOp, BufferKind], loops: Sequence[UOp]) -> bool:
    if not all(kind == "common" or isinstance(kind, Rows) for kind in kinds.values()):
        return False
    symbols = {kind.symbol for kind in kinds.values() if isinstance(kind, Rows)}
    if not symbols:
        return not any(_is_symbol(uop) for uop in sink.toposort())
    row_loops = [loop for loop in loops if loop.src[0].op is not Ops.CONST]
    if len(symbols) > 1 or len(row_loops) != 1 or {_get_symbol(row_loops[0])} != symbols:
        return False
    row = row_loops[0]
    store = sink.src[0].src[0]
    if not _is_free(store.src[1], row):
        return False
    for uop in sink.toposort():
        if uop.op is not Ops.INDEX:
            if any(src in kinds for src in uop.src):
                return False
        else:
            if len(uop.src) != 2 or uop.src[0] not in kinds:
                return False
            kind = kinds[uop.src[0]]
            if _get_factor(uop.src[1], row) != (kind.stride if isinstance(kind, Rows) else 0):
                return False
    return True


def _is_symbol(uop: UOp) -> bool:
    return uop.op is Ops.PARAM and uop.addrspace is AddrSpace.ALU


def _get_symbol(loop: UOp) -> str:
    refuse_if(not _is_symbol(loop.src[0]))
    return str(loop.src[0].expr)


def _get_factor(index: UOp, row: UOp) -> int:
    """Return the distance of an index from one row to the next; NoMatch if it varies."""
    if index is row:
        return 1
    if index.op is Ops.ADD:
        return sum(_get_factor(src, row) for src in index.src)
    if index.op is Ops.MUL and index.src[1].op is Ops.CONST:
        return _get_factor(index.src[0], row) * int(index.src[1].val)
    if index.op is Ops.WHERE and _is_free(index.src[0], row):
        _, chosen, other = index.src
        if other.op is Ops.CONST and isinstance(other.arg, InvalidType):  # a guarded load
            return _get_factor(chosen, row)
    refuse_if(not _is_free(index, row))
    return 0


def _is_free(uop: UOp, row: UOp) -> bool:
    """Return whether an expression depends on the row through loaded values only."""
    pending, seen = [uop], {uop}
    while pending:
        one = pending.pop()
        if one is row or _is_symbol(one):
            return False
        if one.op is not Ops.INDEX:
            fresh = [src for src in one.src if src not in seen]
            seen.update(fresh)
            pending += fresh
    return True


# ---- consecutive steps of one execution ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """Kernels ``first`` … ``end - 1``: all are shared, or they run step after step.

    In the second case each step computes in the memory that it would have alone. ``read`` are the
    buffers that earlier kernels wrote and these mention, ``kept`` those that later ones mention.
    """

    first: int
    end: int
    is_shared: bool
    read: tuple[UOp, ...] = ()
    kept: tuple[UOp, ...] = ()


def find_spans(
    mentioned: Sequence[Sequence[UOp]],
    shared: Sequence[bool],
    kinds: Mapping[UOp, BufferKind],
    lowered: Lowered,
) -> tuple[KernelSpan, ...]:
    """Return how to run kernels for consecutive steps of one state, () if only step by step.

    ``mentioned`` are the buffers of each kernel, in the order in which kernels run. All that
    mention one state lie in one span that is not shared: there a step has done with the state
    before the next one begins. A shared kernel between them is run step by step, too.
    """
    seen = {buffer: [-1, -1] for buffer in lowered.inputs}  # where it is mentioned first and last
    for place, buffers in enumerate(mentioned):
        for buffer in buffers:
            seen[buffer] = [seen.get(buffer, [place])[0], place]
    solo = [not is_shared for is_shared in shared]
    for pair in zip(lowered.states, lowered.updates, strict=True):
        users = [seen[buffer] for buffer in pair if buffer in seen]
        if users:
            first, last = min(users)[0], max(end for _, end in users)
            solo[first : last + 1] = [True] * (last + 1 - first)
    if all(solo):
        return ()
    for buffer in lowered.outputs:
        seen[buffer] = [seen[buffer][0], len(solo)]
    held = {*lowered.weights, *lowered.states, *lowered.updates}
    spans = []
    for is_solo, group in itertools.groupby(range(len(solo)), lambda place: solo[place]):
        places = list(group)
        first, end = places[0], places[-1] + 1
        if not is_solo:
            spans.append(KernelSpan(first, end, is_shared=True))
            continue
        own = [b for b in dict.fromkeys(itertools.chain(*mentioned[first:end])) if b not in held]
        read = [buffer for buffer in own if seen[buffer][0] < first]
        kept = [buffer for buffer in own if seen[buffer][1] >= end and kinds[buffer] != "common"]
        if any(kinds[buffer] == "common" for buffer in read):
            return ()  # a step might overwrite it before the next one reads it
        spans.append(KernelSpan(first, end, False, tuple(read), tuple(kept)))
    return tuple(spans)
