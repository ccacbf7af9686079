"""A worker that returns wrong numbers: what a dishonest node would run in place of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from splitup_node.worker import Worker, main


class LyingWorker(Worker):
    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        outputs = super().compute(program, state, inputs)
        return [(np.frombuffer(data, np.float32) + 1).tobytes() for data in outputs]


if __name__ == "__main__":
    main(worker_class=LyingWorker)
