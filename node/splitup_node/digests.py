"""What a task consumed and produced, as running digests for the commitment."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence

from splitup import limits
from splitup.wire import EMPTY_DIGEST

Tensors = Sequence[bytes | memoryview]


class Digests:
    """SHA-256 over all steps of every input and output port of one task.

    ``state`` is that of the task's state after the last step (``Supervisor.digest_state``).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self.state = EMPTY_DIGEST
        self._inputs = [hashlib.sha256() for _ in range(inputs)]
        self._outputs = [hashlib.sha256() for _ in range(outputs)]

    def add_inputs(self, tensors: Tensors) -> None:
        """Add one step's inputs, in order."""
        for digest, data in zip(self._inputs, tensors, strict=True):
            digest.update(data)

    def add_outputs(self, tensors: Tensors) -> None:
        """Add one step's outputs, in order."""
        for digest, data in zip(self._outputs, tensors, strict=True):
            digest.update(data)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the input digests so far, 64 hexadecimal digits each."""
        return tuple(digest.hexdigest() for digest in self._inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the output digests so far, 64 hexadecimal digits each."""
        return tuple(digest.hexdigest() for digest in self._outputs)


class Recorder:
    """Adds runs to digests in their order: small ones at once, large ones on a thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Digests, Tensors, Tensors, Callable[[], None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(
        self, digests: Digests, inputs: Tensors, outputs: Tensors, on_done: Callable[[], None]
    ) -> None:
        """Account for one run, then call ``on_done``."""
        size = sum(map(len, inputs)) + sum(map(len, outputs))
        if not self._waiting and size <= limits.INLINE_TENSOR_BYTES:
            digests.add_inputs(inputs)
            digests.add_outputs(outputs)
            on_done()
            return
        self._waiting.append((digests, inputs, outputs, on_done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop, whatever waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while self._waiting:
            digests, inputs, outputs, on_done = self._waiting[0]
            await asyncio.to_thread(digests.add_inputs, inputs)
            await asyncio.to_thread(digests.add_outputs, outputs)
            self._waiting.popleft()
            on_done()
