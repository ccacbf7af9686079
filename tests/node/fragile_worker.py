"""A worker that breaks on demand: the first number of an input says how."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
from splitup_node.worker import Worker, main

CRASH, HANG, RAISE = -1.0, -2.0, -3.0


class FragileWorker(Worker):
    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        first = float(np.frombuffer(inputs[0], np.float32)[0])
        if first == CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == HANG:
            signal.pause()
        if first == RAISE:
            raise RuntimeError("kernel went wrong")
        return super().compute(program, state, inputs)


if __name__ == "__main__":
    main(worker_class=FragileWorker)
