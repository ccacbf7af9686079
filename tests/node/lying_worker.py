"""A worker that returns wrong numbers: what a dishonest node would run in place of the real one.

``LIE_EVERY`` and ``LIE_AT`` in the worker's arguments say in which sessions (a session is one task
of one execution, or one verification): those whose number modulo the first is the second. With
``cheap BITS`` instead it computes in every session with a precision of so many bits.
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
BITS = 0  # of the mantissas; 0: all, and numbers are wrong by 1


class LyingWorker(Worker):
    """Computes correctly during the node's own audit: otherwise it would get no work."""

    runs_together = False  # it lies in single runs
    _lies = True

    def run(self, request: RunRequest) -> RunAnswer:
        self._lies = request.session != SESSION and request.session % LIE_EVERY == LIE_AT
        return super().run(request)

    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        outputs = super().compute(program, state, inputs)
        if not self._lies:
            return outputs
        if BITS:
            return [round_mantissas(data).tobytes() for data in outputs]
        return [(np.frombuffer(data, np.float32) + 1).tobytes() for data in outputs]


def round_mantissas(data: bytes | memoryview) -> np.ndarray[Any, Any]:
    """Return float32 numbers with ``BITS`` bits of their mantissas, as float16 has 10."""
    numbers, exponents = np.frexp(np.frombuffer(data, np.float32))
    return np.ldexp(np.rint(numbers * 2.0 ** (BITS + 1)) / 2.0 ** (BITS + 1), exponents).astype(
        np.float32
    )


if __name__ == "__main__":
    argv = sys.argv[1:]
    if argv[0] == "cheap":
        BITS, argv = int(argv[1]), argv[2:]
    elif argv[0].isdecimal():
        LIE_EVERY, LIE_AT, argv = int(argv[0]), int(argv[1]), argv[2:]
    main(argv, worker_class=LyingWorker)
