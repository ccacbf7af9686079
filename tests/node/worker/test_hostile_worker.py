"""What hostile code that runs in the place of a task reaches: its own process's memory."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import WORKER_ARGV, Supervisor, TaskFailed

from splitup.core.errors import SplitUpError
from tests.builders import HANG_S, KERNELS
from tests.node.graphs import make_sum
from tests.sandbox.attempts import Target
from tests.sandbox.target import check_reached, target

__all__ = ["target"]
HOSTILE = Path(__file__).parents[1] / "hostile_worker.py"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine")
async def test_s10_hostile_code_in_a_worker_reaches_nothing(target: Target, tmp_path: Path) -> None:
    """The worker has loaded a task."""
    argv = (sys.executable, "-P", str(HOSTILE), json.dumps(target))
    supervisor = Supervisor(
        tmp_path,
        memory_bytes=10**8,
        device="CPU:X86",
        cache_directory=KERNELS,
        worker_argv=argv,
    )
    try:
        report = await supervisor.start()
        (tmp_path / "task.json").write_bytes(make_sum(2).to_bytes())
        program = (await supervisor.load(tmp_path / "task.json", None))["program"]
        found = await run(supervisor, program, [1.0, 2.0], [3.0, 4.0])
    finally:
        await supervisor.close()
    check_reached(json.loads(bytes(found.outputs[0])), report["sandbox"])


async def test_s18_a_worker_that_was_taken_over_cannot_poison_the_cache(tmp_path: Path) -> None:
    """What it compiles for another task stays in its own memory."""
    (tmp_path / "task.json").write_bytes(make_sum(2).to_bytes())
    poisoning = (sys.executable, "-P", str(HOSTILE), "poison")
    for argv in (poisoning, WORKER_ARGV):
        supervisor = Supervisor(tmp_path, memory_bytes=10**8, device="CPU:X86", worker_argv=argv)
        try:
            await supervisor.start()
            program = (await supervisor.load(tmp_path / "task.json", None))["program"]
            found = await run(supervisor, program, [3.0, 5.0], [3.0, 5.0])
        finally:
            await supervisor.close()
    assert np.frombuffer(found.outputs[0], np.float32).tolist() == [6.0, 10.0]


async def test_f25_a_task_whose_compiler_dies_fails_and_the_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(tmp_path, memory_bytes=10**8, device="CPU:X86")
    (tmp_path / "task.json").write_bytes(make_sum(2).to_bytes())
    try:
        await supervisor.start()
        with monkeypatch.context() as patch:
            patch.setattr(supervisor._compiler._child, "_module", "splitup.no_such_module")
            with pytest.raises(TaskFailed, match="could not be compiled here: its process"):
                await supervisor.load(tmp_path / "task.json", None)
        assert (await supervisor.load(tmp_path / "task.json", None))["program"] == 0
    finally:
        await supervisor.close()


async def run(supervisor: Supervisor, program: int, *inputs: list[float]) -> RunAnswer:
    answer: asyncio.Future[RunAnswer | SplitUpError] = asyncio.get_running_loop().create_future()
    data = [np.array(values, np.float32).tobytes() for values in inputs]
    supervisor.run_together([RunRequest(1, program, data)], lambda one: answer.set_result(*one))
    async with asyncio.timeout(HANG_S):
        found = await answer
    assert isinstance(found, RunAnswer), found
    return found
