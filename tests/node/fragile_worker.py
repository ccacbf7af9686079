"""A worker that breaks on demand: the first number of an input says how."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from splitup_node.worker.ipc import LoadRequest
from splitup_node.worker.process import Worker, main

CRASH, HANG, RAISE, CORRUPT, OVERFLOW = -1.0, -2.0, -3.0, -4.0, -5.0
CRASHING_WEIGHTS = b"crash"  # of a task that ends the process when it is loaded


class FragileWorker(Worker):
    runs_together = False  # it breaks single runs
    _corrupts = False

    def load(self, wanted: LoadRequest, weights: BinaryIO | None, *rest: Any) -> Any:
        if weights is not None:
            if weights.read() == CRASHING_WEIGHTS:
                os.abort()
            weights.seek(0)
        return super().load(wanted, weights, *rest)

    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        first = float(np.frombuffer(inputs[0], np.float32)[0])
        if first == CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == HANG:
            signal.pause()
        if first == OVERFLOW:
            resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
            return [bytes(2**32)]
        if first == RAISE:
            raise RuntimeError("kernel went wrong")
        if first == CORRUPT:  # from the next step on the cache is wrong, the output is not
            self._corrupts = True
            return [bytes(len(inputs[0]))]
        outputs = super().compute(program, state, inputs)
        if self._corrupts:
            current = state._buffers[state._parity][0]
            view = current.as_memoryview(force_zero_copy=True).cast("B")
            view[0] ^= 1
        return outputs


if __name__ == "__main__":
    main(worker_class=FragileWorker)
