"""Workers that hostile code has taken over. ``hostile_worker.py poison …`` or ``TARGET …``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from splitup_node.worker.process import Worker, main

from tests.sandbox.attempts import try_all


class HostileWorker(Worker):
    """Tries to reach something when it should compute, and answers with what it reached."""

    runs_together = False  # it attacks in single runs

    def compute(
        self, program: Any, state: Any, inputs: Sequence[bytes | memoryview]
    ) -> Sequence[bytes]:
        return [json.dumps(try_all(json.loads(sys.argv[1]))).encode()]


class PoisoningWorker(Worker):
    """Compiles a product where a task says sum, in every way that a worker could."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        from splitup.backend.compiler import compile_process, schedule
        from splitup.graph.rules import load_graph

        def compile_another(graph: Any, device: str, **options: Any) -> Any:
            other = graph.to_bytes().replace(b'"ADD"', b'"MUL"')
            return compile_graph(load_graph(other), device, **options)

        compile_graph = schedule.compile_graph
        for module in (schedule, compile_process):
            module.__dict__["compile_graph"] = compile_another


if __name__ == "__main__":
    main(sys.argv[2:], PoisoningWorker if sys.argv[1] == "poison" else HostileWorker)
