"""What a layer with attention remembers: rows of keys and values, of all positions or a window's.

A layer that sees all positions keeps a row for each of them (``FullCache``). A layer that sees a
window of W positions keeps R = W - 1 + C + B rows in a ring (``Ring``): position p stands in row
p mod R. C is the chunk. B is the number of steps back: a step may start up to B positions before
the furthest start of the steps since one that started at 0. So a step's C new rows overwrite
nothing that a later step within this bound can see. A text model's manifest states the bound.

A step that goes further back sees only what is left: rows that were overwritten count as positions
that it does not see. So its result follows from the execution's steps alone, as everything does.

Rows of a ring are read in the order of positions, from the first one on that the reading row sees.
So a row's sums do not depend on how the steps were divided, nor on where in the ring the rows stand
(``docs/adr/0005-state-is-functional.md``).

Rows have the dtype that ``choose_cache_dtype`` returns; or int8, by choice, with a second state of
the float32 steps that each row's heads are multiples of (``Step.find_steps``). They are rounded
before they are written, and what reads them computes in float32: so the step that writes a row sees
what later ones see.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final, Protocol

from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from splitup.backend.tinygrad_types import get_dtype_name
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.tracing import Tracer
from splitup_deploy.frontends.weight_sources import WeightSource

_CHUNKS_BACK: Final = 2  # a speculative decoder's steps ahead go back by less
_VECTORS: Final = 32  # the number of positions that a row reads is a multiple of this


def choose_cache_dtype(source: WeightSource) -> str:
    """Return the dtype of keys and values in the cache: that of a weight, or of its scales.

    Where a model's own numbers have two bytes, its publisher computes with such caches as well. The
    scales of quantised blocks are float16 unless the encoding names others.
    """
    if not source.encoding:
        return source.spec.dtype
    kind = source.encoding.rpartition("_")[2].lower()
    return {"f32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}.get(kind, "float16")


def count_steps_back(config: DecoderConfig, chunk: int) -> int | None:
    """Return how far steps may go back behind the furthest start; None if there is no bound."""
    layers = () if config.local is None else config.local.layers
    is_bounded = any(count_ring_rows(config, layer, chunk) for layer in layers)
    return _CHUNKS_BACK * chunk if is_bounded else None


def count_ring_rows(config: DecoderConfig, layer: int, chunk: int) -> int:
    """Return the rows of a layer's ring, 0 where the layer keeps all positions."""
    if config.local is None or layer not in config.local.layers:
        return 0
    rows = config.local.window - 1 + (1 + _CHUNKS_BACK) * chunk
    return rows if rows < config.context else 0


class Layout:
    """The columns of a step's input ``layout``, int32 [rows, 2 + 2 chunk]."""

    def __init__(self, tracer: Tracer, layout: Tensor, rows: UOp | int, chunk: int) -> None:
        self._tracer, self.chunk, self._rows = tracer, chunk, rows
        self._layout = layout

    def _take(self, rows: UOp | int, start: int, count: int) -> Tensor:
        return self._layout.shrink(((0, rows), (start, start + count)))

    @property
    def positions(self) -> Tensor:
        """Return the rows' positions: int32 [rows]."""
        return self._take(self._rows, 0, 1).reshape(self._rows)

    def get_start(self, context: int) -> Tensor:
        """Return the number of valid cache rows, which the first row holds: int32 [1]."""
        return self._take(1, 1, 1).reshape(1).maximum(0).minimum(context)

    @property
    def sources(self) -> Tensor:
        """Return the new rows that each row sees, numbered from 1: int32 [rows, chunk]."""
        return self._take(self._rows, 2, self.chunk)

    @property
    def shifts(self) -> Tensor:
        """Return by how many rows each of the last valid cache rows moves back: int32 [chunk].

        The values are not bounded here.
        """
        return self._take(1, 2 + self.chunk, self.chunk).reshape(self.chunk)

    def find_slots(self, context: int) -> Tensor:
        """Return the place of the key that a row sees at each position: int32 [rows, context].

        Before the start it is the cache row with that number; from the start on the row's columns
        name a new row, numbered from 1. Where the row sees nothing, it is ``-context``.
        """
        start = self.get_start(context)
        place = self._tracer.iota(context)
        sources = self.sources.permute(1, 0)  # [chunk, rows]
        source = self._tracer.lookup(sources, place - start).permute(1, 0)  # [rows, context]
        place, start = place.reshape(1, context), start.reshape(1, 1)
        is_named = (source > 0) & (source <= self.chunk)
        fresh = is_named.where(source, 0) + start - 1
        return (place < start).where(place, is_named.where(fresh, -context))

    def find_shifts(self, place: Tensor, context: int) -> Tensor:
        """Return by how many rows the rows at these positions move back: int32, as ``place``.

        The last chunk of rows before the start have shifts, in the first row's columns.
        """
        last = place - (self.get_start(context) - self.chunk)
        return self._tracer.lookup(self.shifts, last).maximum(0).minimum(self.chunk)


class CacheStep(Protocol):
    """What a cache reads of a step that is traced (``step_function.Step``)."""

    config: DecoderConfig
    tracer: Tracer
    layout: Layout
    rows: UOp | int


class Cache(Protocol):
    """A layer's cache in one step while it is traced. ``updates``: its new states, by name."""

    updates: dict[str, Tensor]

    def write(self, fresh: Tensor, part: str = "kv") -> Tensor:
        """Return a part of the cache: kept rows, new rows [rows, *shape of one], zeros elsewhere.

        Its state has the new rows' dtype.
        """
        ...

    def find_slots(self) -> Tensor:
        """Return the cache rows that each row sees, by position: int32 [rows, positions].

        They are negative where a row sees nothing.
        """
        ...


def open_cache(step: CacheStep, layer: int) -> Cache:
    """Return the cache that a layer's window asks for."""
    rows = count_ring_rows(step.config, layer, step.layout.chunk)
    return Ring(step, layer, rows) if rows else FullCache(step, layer)


class FullCache:
    """A row for every position of the context."""

    def __init__(self, step: CacheStep, layer: int) -> None:
        self._step, self._layer = step, layer
        self.updates: dict[str, Tensor] = {}

    def write(self, fresh: Tensor, part: str = "kv") -> Tensor:
        """Return a part of the cache."""
        step, context = self._step, self._step.config.context
        name = f"layers.{self._layer}.{part}"
        old = _open_state(step, name, context, fresh)
        place, start = step.tracer.iota(context), step.layout.get_start(context)
        kept = step.tracer.lookup(old, place + step.layout.find_shifts(place, context))
        new = step.tracer.lookup(fresh, place - start)
        return _choose_rows(self, step, name, place < start, kept, new)

    def find_slots(self) -> Tensor:
        """Return the cache rows that each row sees: int32 [rows, context]."""
        step, context, local = self._step, self._step.config.context, self._step.config.local
        slots = step.layout.find_slots(context)
        if local is None or self._layer not in local.layers or local.window >= context:
            return slots
        place = step.layout.positions.reshape(step.rows, 1)
        seen = step.tracer.iota(context).reshape(1, context)
        is_near = place < seen + local.window
        if local.aligned:
            is_near = _is_aligned(seen, place, local.window)
        return is_near.where(slots, -context)


class Ring:
    """The rows of the last positions, each in the row of its position modulo the size."""

    def __init__(self, step: CacheStep, layer: int, size: int) -> None:
        self._step, self._layer, self._size = step, layer, size
        assert step.config.local is not None
        self._window, chunk = step.config.local.window, step.layout.chunk
        self._is_aligned = step.config.local.aligned
        self._start = self._mark(step.layout.get_start(step.config.context), "start")
        name = f"layers.{layer}.furthest"
        old = step.tracer.state(TensorSpec(name, "int32", (1,)))
        furthest = (self._start > 0).where(old.maximum(self._start), 0)
        furthest = self._mark(furthest, "furthest start")
        self.updates = {name: furthest}
        self._first = (furthest + (chunk - size)).maximum(0)  # the first position that is held
        end = self._start + chunk
        # the last position before the end that stands in row 0
        self._turn = self._mark(end - end % size, "turn of the ring")

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Say where each row's contents stand in the old cache, and in the new rows."""
        step, size = self._step, self._size
        row, end = step.tracer.iota(size), self._start + step.layout.chunk
        place = row + self._turn
        place = (place < end).where(place, place - size)
        source = row + step.layout.find_shifts(place, step.config.context)
        source = (source < size).where(source, source - size)
        source = self._mark((place < self._first).where(-1, source), "rows kept")
        return source, self._mark(place - self._start, "new rows by cache row")

    def write(self, fresh: Tensor, part: str = "kv") -> Tensor:
        """Return a part of the cache; rows that were overwritten become zeros."""
        step, lookup = self._step, self._step.tracer.lookup
        name = f"layers.{self._layer}.{part}"
        old = _open_state(step, name, self._size, fresh)
        source, ahead = self._places
        kept, new = lookup(old, source), lookup(fresh, ahead)
        return _choose_rows(self, step, name, ahead < 0, kept, new)

    def find_slots(self) -> Tensor:
        """Return the cache rows that each row sees, in the order of positions.

        A row at position q sees those from q - window + 1 on, and new rows behind it as well, as
        blocks that see themselves do.
        """
        step, size, window = self._step, self._size, self._window
        rows, chunk = step.rows, step.layout.chunk
        count = -(-(window - 1 + chunk) // _VECTORS) * _VECTORS
        position = step.layout.positions.maximum(0).minimum(step.config.context)
        nearest = position.reshape(rows, 1) - (window - 1)
        place = nearest + step.tracer.iota(count).reshape(1, count)
        start, first = self._start.reshape(1, 1), self._first.reshape(1, 1)
        number = step.tracer.iota(chunk).reshape(1, 1, chunk)
        ahead = (place - start).reshape(rows, count, 1)
        sources = step.layout.sources.reshape(rows, 1, chunk)
        source = (number == ahead).where(sources, 0).sum(2)
        source = self._mark(source, "new rows seen")
        is_old = place < start
        is_new = (source > 0) & (source <= chunk)
        slot = is_old.where(place, source + start - 1) - self._turn.reshape(1, 1)
        slot = (slot < 0).where(slot + size, slot)
        is_seen = (place >= first) & (is_old | is_new)
        if self._is_aligned:
            is_seen = is_seen & _is_aligned(place, position.reshape(rows, 1), window)
        return is_seen.where(slot, -size)

    def _mark(self, value: Tensor, label: str) -> Tensor:
        return self._step.tracer.mark(value, f"block {self._layer} attention: {label}")


def _is_aligned(place: Tensor, position: Tensor, window: int) -> Tensor:
    """Say which places are not before the last multiple of the window."""
    position = position.maximum(0)
    return place >= position - position % window


def _open_state(step: CacheStep, name: str, rows: int, fresh: Tensor) -> Tensor:
    row = tuple(int(size) for size in fresh.shape[1:])
    return step.tracer.state(TensorSpec(name, get_dtype_name(fresh.dtype), (rows, *row)))


def _choose_rows(
    cache: Cache, step: CacheStep, name: str, is_kept: Tensor, kept: Tensor, new: Tensor
) -> Tensor:
    is_kept = is_kept.reshape(is_kept.shape[0], *(1,) * (kept.ndim - 1))
    _, layer, part = name.split(".")
    label = "KV cache" if part == "kv" else f"KV cache's {part}"
    rows = step.tracer.mark(is_kept.where(kept, new), f"block {layer} attention: {label}")
    cache.updates[name] = rows
    return rows
