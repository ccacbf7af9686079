"""Running digests of a task's inputs and outputs, for the commitment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from splitup.core.tensors import NO_STEPS, StepsDigest, extend_steps
from splitup.messages.completions import EMPTY_DIGEST


class Digests:
    """The digests of all steps of every input and output port of one task.

    ``state`` is that of the task's state after the last step (``Supervisor.digest_state``).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self.state = EMPTY_DIGEST
        self._inputs = [StepsDigest() for _ in range(inputs)]
        self._outputs = [StepsDigest() for _ in range(outputs)]

    def add(self, inputs: Sequence[bytes], outputs: Sequence[bytes]) -> None:
        """Add one step by the SHA-256 of its inputs and of its outputs, in order."""
        for digest, tensor in zip(self._inputs, inputs, strict=True):
            digest.add(tensor)
        for digest, tensor in zip(self._outputs, outputs, strict=True):
            digest.add(tensor)

    @property
    def steps(self) -> int:
        """Return how many steps were added."""
        return max((one.steps for one in (*self._inputs, *self._outputs)), default=0)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the input digests so far, 64 hexadecimal digits each."""
        return tuple(digest.hexdigest() for digest in self._inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the output digests so far, 64 hexadecimal digits each."""
        return tuple(digest.hexdigest() for digest in self._outputs)

    def find(self, steps: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the inputs' and outputs' digests after so many steps, None if they are not kept.

        They are kept as in a ``StepsDigest``.
        """
        found = [[one.find(steps) for one in group] for group in (self._inputs, self._outputs)]
        inputs, outputs = (tuple(one for one in group if one is not None) for group in found)
        is_known = len(inputs) == len(self._inputs) and len(outputs) == len(self._outputs)
        return (inputs, outputs) if is_known else None

    def is_after(self, steps: int) -> bool:
        """Return whether exactly so many steps were added."""
        return all(digest.steps == steps for digest in (*self._inputs, *self._outputs))

    def forget(self, steps: int) -> None:
        """Drop the kept digests of fewer steps."""
        for digest in (*self._inputs, *self._outputs):
            digest.forget(steps)


class StepsBefore:
    """The digest of an output's earlier steps, for every step that is sent to the client.

    Large tensors are hashed on threads, so that a step may have to wait for those before it.
    """

    def __init__(self) -> None:
        self._before = NO_STEPS
        self._next = 0
        self._waiting: dict[int, tuple[bytes, asyncio.Future[bytes]]] = {}

    def add(self, step: int, digest: bytes) -> asyncio.Future[bytes]:
        """Add a step by the SHA-256 of its tensor; the result is the digest of those before it."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[step] = digest, future
        while self._next in self._waiting:
            known, ready = self._waiting.pop(self._next)
            ready.set_result(self._before)
            self._before = extend_steps(self._before, known)
            self._next += 1
        return future
