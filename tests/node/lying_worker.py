"""A worker that returns wrong numbers: what a dishonest node would run in place of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from splitup_node.audit import SESSION
from splitup_node.ipc import RunAnswer, RunRequest
from splitup_node.worker import Worker, main


class LyingWorker(Worker):
    """Tells the truth while its own daemon tries it, for otherwise it would get no work."""

    def run(self, request: RunRequest) -> RunAnswer:
        self.is_tried = request.session == SESSION
        return super().run(request)

    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        outputs = super().compute(program, state, inputs)
        if self.is_tried:
            return outputs
        return [(np.frombuffer(data, np.float32) + 1).tobytes() for data in outputs]


if __name__ == "__main__":
    main(worker_class=LyingWorker)
