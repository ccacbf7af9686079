from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
from splitup_node.committee.presence import Presence
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.tasks.placement import DemandEntry
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import Supervisor, TaskFailed, WorkerLost
from splitup_node.worker.worker_pool import Workers

from splitup.core import limits, tuning
from splitup.core.codec import compute_digest
from splitup.core.errors import SplitUpError, Unavailable
from splitup.crypto.keys import generate_identity
from splitup.graph.cost import compute_state_bytes
from splitup.graph.ir import Graph
from splitup.storage.task_cache import TaskCache
from tests.builders import HANG_S, KERNELS
from tests.node.graphs import make_accumulator
from tests.node.network import get_pids

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "0x" + "11" * 32
TASK_BYTES = 1_000_000  # what each task says that it takes


@dataclass
class LocalCache:
    """Finds tasks in a directory; stands in for the Cache of LoadedTasks."""

    directory: Path
    graphs: list[Graph]
    vram_bytes: int = TASK_BYTES
    hidden_bytes: int = 0  # of the states, that the manifest does not tell

    async def fetch_manifest(self, model_id: str) -> Any:
        tasks = [
            SimpleNamespace(
                task_id=compute_digest(graph.to_bytes()),
                label=f"task {index}",
                vram_bytes=self.vram_bytes,
                state_bytes=compute_state_bytes(graph) - self.hidden_bytes,
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """Two workers: to start them takes two seconds."""
    directory = tmp_path_factory.mktemp("workers")
    workers = Workers(
        [
            Supervisor(
                directory,
                memory_bytes=count * TASK_BYTES,
                device="CPU:X86",
                cache_directory=KERNELS,
            )
            for count in (1, 2)
        ]
    )
    await workers.start()
    yield workers
    await workers.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workers(running: Workers) -> AsyncIterator[Workers]:
    """The workers, with nothing loaded."""
    yield running
    for program in list(running._programs):
        await running.unload(program)


async def test_tasks_are_loaded_where_memory_is_free_and_again_after_a_worker_died(
    workers: Workers, tmp_path: Path
) -> None:
    cache = LocalCache(tmp_path, [make_accumulator(size) for size in (2, 3, 4, 5)])
    loaded_tasks = LoadedTasks(workers, cast(TaskCache, cache))
    programs = [await loaded_tasks.ensure(MODEL, index) for index in range(3)]
    assert sorted(workers._programs[program][0] for program in programs) == [0, 1, 1]
    assert loaded_tasks.free_bytes == 0 and loaded_tasks.used_bytes == 3 * TASK_BYTES
    with pytest.raises(Unavailable, match="are free"):
        await loaded_tasks.ensure(MODEL, 3)
    kept = {task: p for task, p in loaded_tasks.programs.items() if workers._programs[p][0] == 0}
    pid = get_pids(workers)[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(HANG_S):
        await workers.wait_lost()
    loaded_tasks.forget_programs()
    assert loaded_tasks.programs == kept and len(loaded_tasks.tasks) == 1
    await workers.restart()
    await loaded_tasks.reload()
    assert len(loaded_tasks.tasks) == 3 and kept.items() <= loaded_tasks.programs.items()
    assert sorted(workers._programs[program][0] for program in loaded_tasks.programs.values()) == [
        0,
        1,
        1,
    ]


async def test_a_task_that_cannot_be_fetched_is_announced_once(
    workers: Workers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once a second, and a full disk has no room for as many lines."""
    caplog.set_level("INFO", "splitup.node.loaded_tasks")
    cache = LocalCache(tmp_path / "missing", [make_accumulator(2)])
    loaded_tasks = LoadedTasks(workers, cast(TaskCache, cache))
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            await loaded_tasks.ensure(MODEL, 0)
    (tmp_path / "missing").mkdir()
    await loaded_tasks.ensure(MODEL, 0)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["loading", "loaded"]


@pytest.mark.parametrize(
    ("declared", "error"),
    [({"vram_bytes": 767}, "needs 768 .* 767 are"), ({"hidden_bytes": 1}, "512 .* 511 are")],
)
async def test_s04_a_task_that_declares_too_little_is_not_served(
    workers: Workers, tmp_path: Path, declared: dict[str, int], error: str
) -> None:
    cache = LocalCache(tmp_path, [make_accumulator(2)], **declared)
    loaded_tasks = LoadedTasks(workers, cast(TaskCache, cache))
    with pytest.raises(SplitUpError, match=f"task [0-9a-f]{{12}} .*{error} declared"):
        await loaded_tasks.ensure(MODEL, 0)
    assert not loaded_tasks.tasks and loaded_tasks.used_bytes == 0


def read_rss(pid: int) -> int:
    """Return the bytes of a process in memory."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


async def test_unloading_a_task_frees_its_memory(tmp_path: Path) -> None:
    """Load and unload three times, with a state: the process is as small as before."""
    size = 4_000_000  # elements, of 4 bytes each in x, y and the state
    room = 16 * size + TASK_BYTES
    workers = Workers(
        [Supervisor(tmp_path, memory_bytes=2 * room, device="CPU:X86", cache_directory=KERNELS)]
    )
    await workers.start()
    try:
        cache = LocalCache(tmp_path, [make_accumulator(n) for n in (2, size, 3)], room)
        loaded_tasks = LoadedTasks(workers, cast(TaskCache, cache))
        small = await loaded_tasks.ensure(MODEL, 0)
        (pid,) = get_pids(workers)
        assert pid is not None
        before = read_rss(pid)
        for _ in range(3):
            large = await loaded_tasks.ensure(MODEL, 1)
            task_id = loaded_tasks.tasks[1].task_id
            await run(workers, 7, large, size)
            await run(workers, 8, small, 2)
            assert read_rss(pid) > before + 2 * 4 * size
            assert loaded_tasks.free_bytes == 0 and loaded_tasks.get_room(task_id) == room
            assert await loaded_tasks.unload(task_id, lambda: True)
            assert loaded_tasks.free_bytes == room and task_id not in loaded_tasks.programs
            assert read_rss(pid) < before + size
            with pytest.raises(TaskFailed, match="holds no state"):
                await workers.digest_state(7)
        assert (await run(workers, 8, small, 2)) == np.full(2, 4.0).tolist()  # goes on
        assert await loaded_tasks.ensure(MODEL, 2) not in (small, large)
    finally:
        await workers.close()


async def test_a_task_in_use_is_not_unloaded(workers: Workers, tmp_path: Path) -> None:
    cache = LocalCache(tmp_path, [make_accumulator(size) for size in (2, 3)])
    loaded_tasks = LoadedTasks(workers, cast(TaskCache, cache))
    waited: list[bool] = []
    fetch = cache.fetch_task

    async def fetch_task(model_id: str, index: int) -> tuple[Path, Path | None]:
        waited.append(loaded_tasks.is_waited_for)
        return await fetch(model_id, index)

    cache.fetch_task = fetch_task  # type: ignore[method-assign]
    async with loaded_tasks.use(MODEL, 0) as program, loaded_tasks.use(MODEL, 0) as same:
        assert waited == [True] and not loaded_tasks.is_waited_for
        (task,) = loaded_tasks.tasks
        assert same == program and loaded_tasks.used == {task.task_id}
        assert not await loaded_tasks.unload(task.task_id, lambda: True)
    assert not loaded_tasks.used
    assert not await loaded_tasks.unload(task.task_id, lambda: False)
    assert loaded_tasks.programs == {task.task_id: program}
    leaving = asyncio.create_task(loaded_tasks.unload(task.task_id, lambda: True))
    async with loaded_tasks.use(MODEL, 0) as kept:  # asked for first, so it is not unloaded
        assert kept == program and not await leaving
    assert await loaded_tasks.unload(task.task_id, lambda: True) and not loaded_tasks.tasks
    async with loaded_tasks.use(MODEL, 0) as again:
        assert again != program and loaded_tasks.used_bytes == TASK_BYTES
    pid = get_pids(workers)[workers._programs[again][0]]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(HANG_S):
        await workers.wait_lost()
    with pytest.raises(WorkerLost):
        await loaded_tasks.unload(task.task_id, lambda: True)
    loaded_tasks.forget_programs()
    await workers.restart()
    await loaded_tasks.reload()
    assert (
        loaded_tasks.tasks == () and loaded_tasks.used_bytes == 0
    )  # given up, so not loaded again


class StuckCache(LocalCache):
    """One task's files do not come."""

    stuck = 0

    async def fetch_task(self, model_id: str, index: int) -> tuple[Path, Path | None]:
        if index == self.stuck:
            await asyncio.Event().wait()
        return await super().fetch_task(model_id, index)


async def test_a_task_that_is_waited_for_is_loaded_before_one_that_is_not(
    workers: Workers, tmp_path: Path
) -> None:
    cache = StuckCache(tmp_path, [make_accumulator(size) for size in (2, 3)])
    loaded_tasks = LoadedTasks(workers, cast(TaskCache, cache))
    ids = [task.task_id for task in (await cache.fetch_manifest(MODEL)).tasks]

    async def place_first() -> asyncio.Task[bool]:
        placing = asyncio.create_task(loaded_tasks.place(MODEL, 0))
        while loaded_tasks.loading != ids[0]:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        return placing

    placing = await place_first()
    async with asyncio.timeout(HANG_S), loaded_tasks.use(MODEL, 1) as program:
        assert loaded_tasks.programs == {ids[1]: program}
        assert await placing is False
    placing = await place_first()
    loaded_tasks.keep_listed(set(ids))
    await asyncio.sleep(0)
    assert loaded_tasks.loading == ids[0]
    loaded_tasks.keep_listed({ids[1]})  # its model was retired
    assert await placing is False and loaded_tasks.loading == ""
    cache.stuck = 1
    assert await loaded_tasks.place(MODEL, 0) is True


@pytest.mark.long  # in small: test_placement.py
async def test_a_full_node_trades_a_well_served_task_that_is_not_in_use(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node stops offering it first; plans made until then still find it."""
    monkeypatch.setattr(tuning, "TRADE_NOTICE_S", 0.01)
    monkeypatch.setattr(tuning, "DEMAND_AGE_S", 0.01)
    cache = LocalCache(tmp_path, [make_accumulator(size) for size in (2, 3, 4, 5, 6)])
    loaded_tasks = LoadedTasks(workers, cast(TaskCache, cache))
    for index in range(3):
        await loaded_tasks.ensure(MODEL, index)
    ids = [task.task_id for task in (await cache.fetch_manifest(MODEL)).tasks]
    used = {ids[0]}  # by an execution
    planned: list[str] = []  # on the first task that the node withdraws, before it knows
    offers: list[tuple[str, ...]] = []

    async def beat() -> None:
        """Answer as a committee that sees four other nodes, with what this one has told it."""
        offers.append(presence._get_offers())
        missing = set(ids[:3]) - set(offers[-1])
        if not planned and missing:
            planned.append(next(iter(missing)))
            used.add(planned[0])
        presence._demand = tuple(
            make_entry(index, task_id, 4 if index < 3 else 0) for index, task_id in enumerate(ids)
        )
        presence._demand_changed.set()

    presence = make_presence(loaded_tasks, used)
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", 0.01)
    monkeypatch.setattr(presence, "_send_heartbeat", beat)
    monkeypatch.setattr(presence._trader, "is_due", lambda now_s: True)
    working = [
        asyncio.create_task(presence.place_tasks()),
        asyncio.create_task(presence.send_heartbeats()),
    ]
    async with asyncio.timeout(HANG_S):
        while not presence.trades:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
        while len(loaded_tasks.programs) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    (left,) = set(ids[1:3]) - set(planned)
    trade = presence.trades[0]
    assert len(presence.trades) == 1 and trade["given"] == left
    assert set(loaded_tasks.programs) == {ids[0], *planned, trade["wanted"]}
    assert trade["wanted"] in ids[3:]
    before = offers[: next(i for i, offer in enumerate(offers) if left not in offer)]
    assert any(planned[0] not in offer for offer in before)  # withdrawn, and offered again
    assert planned[0] in presence._get_offers()


async def test_s04_a_task_that_fails_again_is_tried_later_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    presence = make_presence(cast(Any, None), set())
    entry = make_entry(0, "11" * 32, 0)
    waits = []
    for _ in range(tuning.LOAD_RETRY_DOUBLINGS + 2):
        presence._note_failure(entry, TaskFailed("it was given up"))
        waits.append(presence._unloadable[entry.key] - 1000.0)
    longest = tuning.LOAD_RETRY_S * 2**tuning.LOAD_RETRY_DOUBLINGS
    assert waits[:3] == [tuning.LOAD_RETRY_S * factor for factor in (1, 2, 4)]
    assert waits[-2:] == [longest, longest]
    presence._demand = (entry, make_entry(1, "22" * 32, 0))
    (problem,) = presence.list_problems()
    assert (problem["task"], problem["reason"]) == (0, "it was given up")
    assert problem["is_refused"]


def make_presence(loaded_tasks: LoadedTasks, used: set[str]) -> Presence:
    return Presence(
        generate_identity(),
        cast(Any, None),
        cast(Any, SimpleNamespace(table=SimpleNamespace(list_used=lambda: used))),
        loaded_tasks,
        cast(Any, None),
        cast(Any, SimpleNamespace(trouble="")),
        get_committee=lambda: pytest.fail("nobody is asked"),
        get_determinism=lambda: "",
        is_leaving=lambda: pytest.fail("nobody is asked"),
    )


def make_entry(index: int, task_id: str, holders: int) -> DemandEntry:
    return DemandEntry(
        model_id=MODEL,
        task=index,
        task_id=task_id,
        vram_bytes=TASK_BYTES,
        weights_bytes=0,
        price_nano_usdc=1,
        holders=holders,
        operators=holders,
    )


async def run(workers: Workers, session: int, program: int, size: int) -> list[float]:
    """Run one step of an accumulator on ones; return the two first sums."""
    answer: asyncio.Future[Sequence[RunAnswer | SplitUpError]]
    answer = asyncio.get_running_loop().create_future()
    ones = np.ones(size, np.float32).tobytes()
    workers.run_together([RunRequest(session, program, [ones])], answer.set_result)
    async with asyncio.timeout(HANG_S):
        (found,) = await answer
    assert isinstance(found, RunAnswer), found
    return np.frombuffer(found.outputs[0], np.float32)[:2].tolist()
