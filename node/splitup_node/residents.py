"""The tasks loaded in the worker: what they take, and how they get back after its death."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from splitup.errors import InvalidModel, SplitUpError, Unavailable
from splitup_node.cache import Cache
from splitup_node.supervisor import WorkerLost
from splitup_node.workers import Workers

_log = logging.getLogger("splitup.node.residents")


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded and warmed-up task."""

    task_id: str
    label: str
    vram_bytes: int
    graph: Path
    weights: Path | None


class Residents:
    """Loads tasks one at a time, each into the worker with the most free memory."""

    def __init__(self, workers: Workers, cache: Cache) -> None:
        self._workers = workers
        self._cache = cache
        self._lock = asyncio.Lock()
        self._tasks: dict[str, Resident] = {}
        self._places: dict[str, int] = {}  # task_id -> worker
        self.programs: dict[str, int] = {}  # task_id -> program in the present worker
        self.loading = ""

    @property
    def tasks(self) -> tuple[Resident, ...]:
        """Return what can run right now."""
        return tuple(self._tasks[task_id] for task_id in self.programs)

    @property
    def free_bytes(self) -> int:
        """Return the memory of the device with the most that no task has been given."""
        return max(self._list_free())

    @property
    def used_bytes(self) -> int:
        """Return the memory that tasks have been given, on all devices."""
        return sum(task.vram_bytes for task in self._tasks.values())

    def _list_free(self) -> list[int]:
        free = list(self._workers.memory_bytes)
        for task_id, worker in self._places.items():
            free[worker] -= self._tasks[task_id].vram_bytes
        return free

    async def ensure(self, model_id: str, index: int) -> int:
        """Return the program of a task, downloaded and loaded if it is not resident.

        Raises Unavailable (no memory, worker lost), InvalidModel, StorageUnavailable, PeerFault.
        """
        task = (await self._cache.fetch_manifest(model_id)).tasks[index]
        async with self._lock:
            if task.task_id in self.programs:
                return self.programs[task.task_id]
            if task.vram_bytes > self.free_bytes:
                raise Unavailable(
                    f"task {index} ({task.label}) needs {task.vram_bytes} bytes of memory; "
                    f"{self.free_bytes} of {max(self._workers.memory_bytes)} are free"
                )
            self.loading = task.task_id
            try:
                graph, weights = await self._cache.fetch_task(model_id, index)
                resident = Resident(task.task_id, task.label, task.vram_bytes, graph, weights)
                await self._load(resident)
            finally:
                self.loading = ""
            _log.info("loaded %s (%s)", task.label, task.task_id[:12])
            return self.programs[task.task_id]

    async def reload(self) -> None:
        """Load what died with a worker; a task that fails now is resident no longer."""
        async with self._lock:
            self.forget_programs()
            for resident in list(self._tasks.values()):
                if resident.task_id in self.programs:
                    continue
                del self._tasks[resident.task_id]  # for good, if it is what kills workers
                try:
                    await self._load(resident)
                except WorkerLost:
                    raise
                except SplitUpError as error:
                    _log.error("task %s is gone: %s", resident.label, error)

    def forget_programs(self) -> None:
        """Advertise nothing that a lost worker had until it is loaded again."""
        for task_id, program in list(self.programs.items()):
            if not self._workers.is_loaded(program):
                del self.programs[task_id]
                del self._places[task_id]

    async def _load(self, resident: Resident) -> None:
        free = self._list_free()
        worker = free.index(max(free))
        if resident.vram_bytes > free[worker]:
            raise Unavailable(f"no device has {resident.vram_bytes} bytes left")
        loaded = await self._workers.load(worker, resident.graph, resident.weights)
        if loaded["task_id"] != resident.task_id:
            raise InvalidModel(f"{resident.graph} is not task {resident.task_id}; delete the file")
        self._tasks[resident.task_id] = resident
        self._places[resident.task_id] = worker
        self.programs[resident.task_id] = loaded["program"]
