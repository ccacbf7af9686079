"""A worker on a broken device: one bit of its first output is wrong, which it does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitup_node.worker.process import Worker, main


class FaultyWorker(Worker):
    runs_together = False  # it breaks single runs

    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        first, *others = super().compute(program, state, inputs)
        return [bytes([first[0] ^ 1]) + first[1:], *others]


if __name__ == "__main__":
    main(worker_class=FaultyWorker)
