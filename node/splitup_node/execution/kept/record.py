"""What a node keeps of the steps that it ran in one execution: logs, digests and times."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from splitup.core import limits
from splitup.core.background import cancel
from splitup.messages.progress import Span, Trace
from splitup.protocol.execution.task_queue import Tensor
from splitup.storage.log_store import LogStore, LogWriter
from splitup_node.execution.kept.digests import Digests


class ExecutionRecord:
    """Logs for who reads later, digests for the commitment, and times for the client.

    Digests are added in order; large tensors without one are hashed on a thread. Tensors that came
    in a frame, or left in one, have a digest.
    """

    def __init__(self, execution_id: str, node: str, store: LogStore) -> None:
        self.writer = LogWriter(execution_id, node, store)
        self.spans = Spans()
        self.storing_bytes = 0  # of large tensors on their way to the store
        self._waiting: deque[tuple[Digests, _Tensors, _Tensors, Callable[[], None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(
        self, digests: Digests, inputs: _Tensors, outputs: _Tensors, on_done: Callable[[], None]
    ) -> None:
        """Add one run to the digests, then call ``on_done``."""
        unknown = 0
        for tensor in (*inputs, *outputs):
            unknown += 0 if tensor.digest else len(tensor.data)
        if not self._waiting and unknown <= limits.INLINE_TENSOR_BYTES:
            digests.add(list(map(_get_digest, inputs)), list(map(_get_digest, outputs)))
            on_done()
            return
        self._waiting.append((digests, inputs, outputs, on_done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop; runs that wait are not added, and what is not stored is not."""
        if self._task is not None:
            await cancel(self._task)
        await self.writer.close()

    async def _work(self) -> None:
        while self._waiting:
            digests, inputs, outputs, on_done = self._waiting[0]
            every = await asyncio.to_thread(list, map(_get_digest, (*inputs, *outputs)))
            digests.add(every[: len(inputs)], every[len(inputs) :])
            self._waiting.popleft()
            on_done()


_Tensors = Sequence[Tensor]


def _get_digest(tensor: Tensor) -> bytes:
    return tensor.digest or hashlib.sha256(tensor.data).digest()


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
