"""The input ``layout`` of a step: the position of each row, and which keys it sees."""

from __future__ import annotations

from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from splitup_deploy.frontends.tracing import Tracer


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
