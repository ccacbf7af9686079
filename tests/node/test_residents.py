from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from splitup_node.residents import Residents
from splitup_node.supervisor import Supervisor
from splitup_node.workers import Workers

from splitup.codec import compute_digest
from splitup.errors import Unavailable
from splitup.graph.ir import Graph
from splitup.net.cache import Cache
from tests.builders import HANG_S
from tests.node.graphs import make_accumulator

pytestmark = pytest.mark.asyncio
MODEL = "0x" + "11" * 32
TASK_BYTES = 1_000_000  # what each task says that it takes


@dataclass
class LocalCache:
    """Finds tasks in a directory: what Residents wants of a Cache."""

    directory: Path
    graphs: list[Graph]

    async def fetch_manifest(self, model_id: str) -> Any:
        tasks = [
            SimpleNamespace(
                task_id=compute_digest(graph.to_bytes()),
                label=f"task {index}",
                vram_bytes=TASK_BYTES,
                state_bytes=0,
                gate=None,
            )
            for index, graph in enumerate(self.graphs)
        ]
        return SimpleNamespace(tasks=tasks)

    async def fetch_task(self, model_id: str, index: int) -> tuple[Path, Path | None]:
        path = self.directory / f"{index}.json"
        path.write_bytes(self.graphs[index].to_bytes())
        return path, None

    async def fetch_vectors(self, model_id: str, index: int) -> None:
        return None


@pytest_asyncio.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    running = Workers(
        [
            Supervisor(
                tmp_path,
                memory_bytes=count * TASK_BYTES,
                device="CPU:X86",
                cache_directory=tmp_path / "kernels",
            )
            for count in (1, 2)
        ]
    )
    await running.start()
    yield running
    await running.close()


async def test_tasks_go_where_memory_is_and_come_back_after_a_loss(
    workers: Workers, tmp_path: Path
) -> None:
    cache = LocalCache(tmp_path, [make_accumulator(size) for size in (2, 3, 4, 5)])
    residents = Residents(workers, cast(Cache, cache))
    programs = [await residents.ensure(MODEL, index) for index in range(3)]
    assert sorted(workers.get_worker(program) for program in programs) == [0, 1, 1]
    assert residents.free_bytes == 0 and residents.used_bytes == 3 * TASK_BYTES
    with pytest.raises(Unavailable, match="are free"):
        await residents.ensure(MODEL, 3)
    kept = {task: p for task, p in residents.programs.items() if workers.get_worker(p) == 0}
    pid = workers.pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(HANG_S):
        await workers.wait_lost()
    residents.forget_programs()
    assert residents.programs == kept and len(residents.tasks) == 1
    await workers.restart()
    await residents.reload()
    assert len(residents.tasks) == 3 and kept.items() <= residents.programs.items()
    assert sorted(map(workers.get_worker, residents.programs.values())) == [0, 1, 1]
