"""When each run's inputs came, and when it started, ended and was sent: the client's timeline."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from splitup.core import limits
from splitup.messages.progress import Span, Trace

# task, step, and four times in nanoseconds; tuples would take six times the memory
_SPAN: Final = struct.Struct("<HIQQQQ")


class Spans:
    """The times of all runs of one execution at one node."""

    def __init__(self) -> None:
        self._packed = bytearray()

    def __len__(self) -> int:
        """Return of how many runs there are times."""
        return len(self._packed) // _SPAN.size

    def add(self, task: int, step: int, times: tuple[int, int, int, int]) -> None:
        """Remember when a run's inputs arrived, when it started, ended, and was sent (in ns)."""
        if len(self._packed) < limits.MAX_SPANS * _SPAN.size:
            self._packed += _SPAN.pack(task, step, *times)

    def make_traces(self, execution_id: str, node: str) -> Iterator[tuple[int, Trace]]:
        """Yield the spans in traces that fit into a frame, with the number of traces to come."""
        size = limits.SPANS_PER_FRAME * _SPAN.size
        starts = range(0, len(self._packed), size) or range(1)
        for index, start in enumerate(starts):
            spans = tuple(
                Span(
                    task=task,
                    step=step,
                    received_ns=str(received),
                    started_ns=str(started),
                    ended_ns=str(ended),
                    sent_ns=str(sent),
                )
                for task, step, received, started, ended, sent in _SPAN.iter_unpack(
                    self._packed[start : start + size]
                )
            )
            remaining = len(starts) - 1 - index
            yield remaining, Trace(execution_id=execution_id, node=node, spans=spans)
