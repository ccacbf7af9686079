from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import Supervisor, parse_device
from splitup_node.worker.worker_pool import Workers

from splitup.backend.compiler.compile_server import CompileServer
from splitup.core.errors import ConfigurationError, SplitUpError
from splitup.graph.ir import Graph, parse_graph, remove_names
from tests.builders import HANG_S
from tests.node.graphs import make_accumulator, make_sum
from tests.node.network import get_pids

pytestmark = pytest.mark.asyncio(loop_scope="module")
MEMORY = (10**6, 10**7)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """Two devices, which are both the CPU."""
    directory = tmp_path_factory.mktemp("workers")
    running = Workers(
        [
            Supervisor(
                directory,
                memory_bytes=memory_bytes,
                device=f"CPU:{number}:X86",
                threads=2,
                name=f"worker-{number}",
                cache_directory=directory / "kernels",
            )
            for number, memory_bytes in enumerate(MEMORY)
        ]
    )
    await running.start()
    yield running
    await running.close()


def write(directory: Path, graph: Graph) -> Path:
    path = directory / "task.json"
    path.write_bytes(graph.to_bytes())
    return path


async def run(workers: Workers, session: int, program: int, *inputs: list[float]) -> list[float]:
    answer: asyncio.Future[Sequence[RunAnswer | SplitUpError]]
    answer = asyncio.get_running_loop().create_future()
    data = [np.array(values, np.float32).tobytes() for values in inputs]
    workers.run_together([RunRequest(session, program, data)], answer.set_result)
    async with asyncio.timeout(HANG_S):
        (result,) = await answer
    assert isinstance(result, RunAnswer), result
    return np.frombuffer(result.outputs[0], np.float32).tolist()


async def test_programs_run_on_the_worker_that_loaded_them_with_separate_states(
    workers: Workers, tmp_path: Path
) -> None:
    assert workers.memory_bytes == MEMORY and len(set(get_pids(workers))) == 2
    path = write(tmp_path, make_accumulator(2))
    programs = [(await workers.load(number, path, None))["program"] for number in (0, 1)]
    assert [workers._programs[program][0] for program in programs] == [0, 1]
    for count in (1, 2):
        for session, program in enumerate(programs):
            value = float(session + 1)
            assert await run(workers, session, program, [value, 0]) == [value * count, 0]
    workers.drop([0, 1])
    assert await run(workers, 1, programs[1], [5, 5]) == [5, 5]


async def test_s18_workers_share_kernels_of_tasks_that_differ_in_names_alone(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles sees no names: those of one task cannot decide about another's code."""
    graph = make_sum(3)
    compiled: list[Graph] = []
    compile_once = CompileServer.compile

    async def note(self: CompileServer, graph: bytes, *told: Any, is_noisy: bool) -> bytes:
        compiled.append(parse_graph(graph))
        return await compile_once(self, graph, *told, is_noisy=is_noisy)

    monkeypatch.setattr(CompileServer, "compile", note)
    for worker, name in enumerate("vw"):
        path = write(tmp_path, replace(graph, outputs=(replace(graph.outputs[0], name=name),)))
        program = (await workers.load(worker, path, None))["program"]
        assert await run(workers, 20 + worker, program, [1, 2, 3], [4, 5, 6]) == [5, 7, 9]
    assert compiled == [remove_names(graph)]


async def test_f25_the_death_of_one_worker_does_not_affect_the_other(
    workers: Workers, tmp_path: Path
) -> None:
    path = write(tmp_path, make_accumulator(2))
    lost, kept = [(await workers.load(number, path, None))["program"] for number in (0, 1)]
    assert await run(workers, 8, kept, [1, 2]) == [1, 2]
    before = get_pids(workers)
    assert before[0] is not None
    os.kill(before[0], signal.SIGKILL)
    async with asyncio.timeout(HANG_S):
        await workers.wait_lost()
    assert workers.is_running and "worker 0" in workers.problem
    assert not workers.is_loaded(lost) and workers.is_loaded(kept)
    await workers.restart()
    assert workers.is_running and not workers.problem and workers.restarts == 1
    assert get_pids(workers)[0] != before[0] and get_pids(workers)[1] == before[1]
    assert not workers.is_loaded(lost)
    assert await run(workers, 8, kept, [1, 2]) == [2, 4]
    again = (await workers.load(0, path, None))["program"]
    assert again not in (lost, kept)
    assert await run(workers, 9, again, [1, 1]) == [1, 1]


async def test_devices_of_different_determinism_classes_are_refused() -> None:
    class Device:
        def __init__(self, determinism: str) -> None:
            self.report = {"device": "GPU", "determinism_class": determinism}

        async def start(self) -> dict[str, str]:
            return self.report

    await Workers(cast(Any, [Device("one"), Device("one")])).start()
    with pytest.raises(ConfigurationError, match="one node per kind of device"):
        await Workers(cast(Any, [Device("one"), Device("another")])).start()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", 0)),
        ("CUDA", ("CUDA", 0)),
        ("CUDA:1", ("CUDA", 1)),
        ("CPU:X86", ("CPU:X86", 0)),
        ("CPU:2:X86", ("CPU:X86", 2)),
    ],
)
async def test_a_device_name_is_split_into_renderer_and_number(
    text: str, expected: tuple[str, int]
) -> None:
    assert parse_device(text) == expected
