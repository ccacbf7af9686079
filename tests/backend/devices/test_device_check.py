"""The task that ``splitup doctor`` runs: right on this machine, and wrong results are found."""

from __future__ import annotations

import numpy as np
import pytest

from splitup.backend.devices.device_check import check_device, make_task, run_apart
from splitup.backend.runtime import TaskProgram
from splitup.core.errors import SplitUpError
from splitup.graph.rules import check_graph


def test_the_task_is_legal_and_agrees_with_the_reference() -> None:
    graph, weights = make_task()
    assert check_graph(graph).to_bytes() == graph.to_bytes()
    assert [weight.dtype for weight in weights] == ["float16", "float32"]
    assert check_device()["device"] == run_apart("CPU:X86")["device"] == "CPU"


@pytest.mark.parametrize("error", [1e-3, np.nan])
def test_a_device_that_computes_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    run = TaskProgram.run

    def compute_wrongly(program: TaskProgram, *arguments: object) -> list[bytes]:
        values = np.frombuffer(run(program, *arguments)[0], np.float32).copy()
        values[-1] += error
        return [values.tobytes()]

    monkeypatch.setattr(TaskProgram, "run", compute_wrongly)
    with pytest.raises(SplitUpError, match="computes a task wrongly"):
        check_device()
