"""Devices that disappear: the worker says so and ends, and the node goes on with the others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_node.worker.ipc import LoadRequest, RunAnswer, RunRequest
from splitup_node.worker.process import Worker
from splitup_node.worker.supervisor import Supervisor
from splitup_node.worker.worker_pool import Workers

from splitup.backend.compiler.compile_process import compile_to_bytes
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import TaskProgram
from splitup.core.errors import SplitUpError
from splitup.graph.rules import load_graph
from tests.builders import HANG_S, KERNELS
from tests.node.graphs import make_accumulator
from tests.node.network import get_pids

# Its driver destroys the device when the first input begins with -1.
LOSING = """
import numpy as np
from splitup_node.worker.process import Worker, main
class Losing(Worker):
    def compute(self, program, state, inputs):
        if np.frombuffer(inputs[0], np.float32)[0] == -1:
            from tinygrad.device import Device
            from tinygrad.runtime.autogen import webgpu
            webgpu.wgpuDeviceDestroy(Device[program.device].device_res)
        return super().compute(program, state, inputs)
main(worker_class=Losing)
"""
# Its device cannot be opened while a file is there.
AWAY = """
import os
from splitup_node.worker.process import Worker, main
class Away(Worker):
    def describe(self):
        if os.path.exists({path!r}):
            raise RuntimeError("no such device")
        return super().describe()
main(worker_class=Away)
"""


async def run(
    runner: Supervisor | Workers, session: int, program: int, *values: float
) -> RunAnswer | SplitUpError:
    answer: asyncio.Future[RunAnswer | SplitUpError] = asyncio.get_running_loop().create_future()
    data = np.array(values, np.float32).tobytes()
    runner.run_together([RunRequest(session, program, [data])], lambda one: answer.set_result(*one))
    async with asyncio.timeout(HANG_S):
        return await answer


async def test_a_device_that_its_driver_takes_away_ends_the_worker_which_says_why(
    tmp_path: Path,
) -> None:
    supervisor = Supervisor(
        tmp_path,
        memory_bytes=10**8,
        device="WEBGPU",
        worker_argv=(sys.executable, "-c", LOSING),
    )
    path = tmp_path / "task.json"
    path.write_bytes(make_accumulator(2).to_bytes())
    try:
        await supervisor.start()
        program = (await supervisor.load(path, None))["program"]
        assert isinstance(await run(supervisor, 1, program, 1, 2), RunAnswer)
        assert isinstance(await run(supervisor, 1, program, -1, 0), SplitUpError)
        async with asyncio.timeout(HANG_S):
            await supervisor.wait_lost()
        assert "the device does not answer any more" in supervisor.problem
    finally:
        await supervisor.close()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that the workers' own user may look into; pytest's are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.long  # in small: a worker whose device is lost, below
async def test_a_node_computes_on_with_the_devices_that_are_left(
    tmp_path: Path, public_folder: Path
) -> None:
    mark, task = public_folder / "away", tmp_path / "task.json"
    task.write_bytes(make_accumulator(2).to_bytes())
    workers = Workers(
        [
            Supervisor(
                tmp_path,
                memory_bytes=10**7,
                device="CPU:X86",
                cache_directory=KERNELS,
                worker_argv=(sys.executable, "-c", AWAY.format(path=str(mark))),
            )
            for _ in range(2)
        ]
    )
    try:
        await workers.start()
        kept = (await workers.load(1, task, None))["program"]
        assert isinstance(await run(workers, 1, kept, 1, 2), RunAnswer)
        mark.touch()
        pid = get_pids(workers)[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            await workers.wait_lost()
        await workers.restart()
        assert "worker 0" in workers.problem and "no such device" in workers.problem
        assert workers.is_running and workers.memory_bytes == (0, 10**7)
        answer = await run(workers, 1, kept, 1, 2)
        assert isinstance(answer, RunAnswer)
        assert np.frombuffer(answer.outputs[0], np.float32).tolist() == [2, 4]
        with pytest.raises(TimeoutError):  # it is known, and no new loss
            async with asyncio.timeout(0.01):
                await workers.wait_lost()
        mark.unlink()
        await workers.restart()
        assert not workers.problem and workers.memory_bytes == (10**7, 10**7)
    finally:
        await workers.close()


def test_a_state_for_which_the_device_has_no_memory_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make_accumulator(1000).to_bytes()
    kernels = compile_to_bytes(lambda: load_graph(data), select_device().device)
    worker = Worker(10**5)
    program = worker.add(worker.load(LoadRequest(data, kernels, 10**5, None), None))["program"]

    def fail(self: TaskProgram) -> Any:
        raise MemoryError("the device is full")

    request = RunRequest(1, program, [bytes(4000)])
    with monkeypatch.context() as patch:
        patch.setattr(TaskProgram, "new_state", fail)
        for _ in range(100):
            with pytest.raises(MemoryError):
                worker.run(request)
    worker.run(request)
