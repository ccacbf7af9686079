"""A worker that returns wrong numbers: what a dishonest node would run in place of the real one.

``LIE_EVERY`` and ``LIE_AT`` in the worker's arguments say in which sessions (a session is one task
of one execution, or one verification): those whose number modulo the first is the second. With
``cheap BITS BITS`` instead it computes with a precision of so many bits, in every other session.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from splitup_node.tasks.audit import SESSION
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.process import Worker, main

LIE_EVERY, LIE_AT = 1, 0
FLOATS = ("float32", "float16")  # other outputs stay as they are
BITS: tuple[int, ...] = ()  # of the mantissas; (): all, and numbers are wrong by 1 + LIE_AT


class LyingWorker(Worker):
    """Computes correctly during the node's own audit: otherwise it would get no work."""

    runs_together = False  # it lies in single runs
    _lies = True
    _session = 0

    def run(self, request: RunRequest) -> RunAnswer:
        self._session = request.session
        self._lies = request.session != SESSION and request.session % LIE_EVERY == LIE_AT
        return super().run(request)

    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        outputs = super().compute(program, state, inputs)
        if not self._lies:
            return outputs
        bits = BITS[self._session % len(BITS)] if BITS else None
        return [
            data if spec.dtype not in FLOATS else distort(np.frombuffer(data, spec.dtype), bits)
            for spec, data in zip(program.outputs, outputs, strict=True)
        ]


def distort(numbers: np.ndarray[Any, Any], bits: int | None) -> bytes:
    """Return other numbers of the same type: of so many bits, or wrong ones."""
    if bits is not None:
        exact = numbers.astype(np.float32)
        return round_mantissas(exact.tobytes(), bits).astype(numbers.dtype).tobytes()
    # liars that tell the same lie would confirm each other
    return (numbers + numbers.dtype.type(1 + LIE_AT)).tobytes()


def round_mantissas(data: bytes | memoryview, bits: int) -> np.ndarray[Any, Any]:
    """Return float32 numbers with ``bits`` bits of their mantissas: float16 has 10, bfloat16 7."""
    numbers, exponents = np.frexp(np.frombuffer(data, np.float32))
    levels = np.float32(2 ** (bits + 1))
    return np.asarray(np.ldexp(np.rint(numbers * levels) / levels, exponents), np.float32)


if __name__ == "__main__":
    argv = sys.argv[1:]
    if argv[0] == "cheap":
        BITS, argv = (int(argv[1]), int(argv[2])), argv[3:]
    elif argv[0].isdecimal():
        LIE_EVERY, LIE_AT, argv = int(argv[0]), int(argv[1]), argv[2:]
    main(argv, worker_class=LyingWorker)
