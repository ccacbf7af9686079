"""The tasks loaded in the worker: what they take, and how they get back after its death.

A task is served only after it has given what its reference vectors say
(``splitup_node.tasks.audit``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from splitup.core.errors import InvalidModel, SplitUpError, Unavailable
from splitup.core.throughput import Rate
from splitup.graph.gates import check_gate
from splitup.graph.manifest import Task
from splitup.graph.rules import load_graph
from splitup.graph.self_test_vectors import SelfTestVectors
from splitup.storage.task_cache import Cache
from splitup_node.tasks.audit import AuditFailed, audit_program
from splitup_node.worker.supervisor import WorkerLost
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.residents")


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A loaded and warmed-up task."""

    task_id: str
    label: str
    vram_bytes: int
    state_bytes: int
    graph: Path
    weights: Path | None


class LoadedTasks:
    """Loads tasks one at a time, each into the worker with the most free memory."""

    def __init__(
        self, workers: Workers, cache: Cache, get_speed: Callable[[], Rate] = Rate
    ) -> None:
        """``get_speed`` gives what a trial's runs are added to."""
        self._workers = workers
        self._cache = cache
        self._get_speed = get_speed
        self._lock = asyncio.Lock()
        self._tasks: dict[str, LoadedTask] = {}
        self._users: Counter[str] = Counter()  # task_id -> who needs it to stay
        self._failed: dict[str, str] = {}  # task_id -> why it must not be served from here
        self._places: dict[str, tuple[int, int]] = {}  # task_id -> worker, program; served or not
        self.programs: dict[str, int] = {}  # task_id -> program, of those that are served
        self.loading = ""

    @property
    def tasks(self) -> tuple[LoadedTask, ...]:
        """Return what can run right now."""
        return tuple(self._tasks[task_id] for task_id in self.programs)

    @property
    def used(self) -> frozenset[str]:
        """Return the tasks that somebody needs to stay."""
        return frozenset(self._users)

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
        for task_id, (worker, _) in self._places.items():
            free[worker] -= self._tasks[task_id].vram_bytes
        return free

    @property
    def state_limit_bytes(self) -> int:
        """Return what the states of all executions together may take, as the workers count.

        They may all lie in one worker, so the one with the least room says it.
        """
        room = list(self._workers.memory_bytes)
        for task_id, (worker, _) in self._places.items():
            room[worker] -= self._tasks[task_id].vram_bytes - self._tasks[task_id].state_bytes
        used = {worker for worker, _ in self._places.values()}
        return min((room[worker] for worker in used), default=max(room))

    def get_room(self, task_id: str) -> int:
        """Return the memory that a resident task's device would have for another in its place."""
        return self._list_free()[self._places[task_id][0]] + self._tasks[task_id].vram_bytes

    @contextlib.asynccontextmanager
    async def use(self, model_id: str, index: int) -> AsyncIterator[int]:
        """Give the program of a task, which stays resident meanwhile. Raises as ``ensure``."""
        task_id = (await self._cache.fetch_manifest(model_id)).tasks[index].task_id
        self._users[task_id] += 1
        try:
            program = self.programs.get(task_id)  # without waiting for what is being loaded
            yield await self.ensure(model_id, index) if program is None else program
        finally:
            self._users[task_id] -= 1
            self._users += Counter()  # without those at zero

    async def prepare(self, model_id: str, index: int) -> None:
        """Fetch what loading a task takes, so that its place stays empty for seconds only.

        Raises as ``ensure``, but for lack of memory.
        """
        task = (await self._cache.fetch_manifest(model_id)).tasks[index]
        if task.task_id in self._failed:
            raise AuditFailed(self._failed[task.task_id])
        graph, _ = await self._cache.fetch_task(model_id, index)
        await asyncio.to_thread(_check_gate, graph, task)
        await self._cache.fetch_vectors(model_id, index)

    async def unload(self, task_id: str, is_idle: Callable[[], bool]) -> bool:
        """Free a task's memory unless somebody needs it by now; return whether it is gone.

        ``is_idle`` is asked right before, when nothing else can come between.
        Raises TaskFailed (the worker would not), WorkerLost (then it is not loaded again, either).
        """
        async with self._lock:
            if task_id in self._users or task_id not in self.programs or not is_idle():
                return False
            _log.info("unloading %s (%s)", self._tasks[task_id].label, task_id[:12])
            await self._unload(task_id)
            return True

    async def ensure(self, model_id: str, index: int) -> int:
        """Return the program of a task, downloaded, loaded and tried if it is not resident.

        Raises Unavailable (no memory, worker lost), InvalidModel, StorageUnavailable, PeerFault,
        AuditFailed (this machine would be slashed for the task; said again without trying again).
        """
        task = (await self._cache.fetch_manifest(model_id)).tasks[index]
        async with self._lock:
            if task.task_id in self.programs:
                return self.programs[task.task_id]
            if task.task_id in self._failed:
                raise AuditFailed(self._failed[task.task_id])
            if task.vram_bytes > self.free_bytes:
                raise Unavailable(
                    f"task {index} ({task.label}) needs {task.vram_bytes} bytes of memory; "
                    f"{self.free_bytes} of {max(self._workers.memory_bytes)} are free"
                )
            self.loading = task.task_id
            try:
                graph, weights = await self._cache.fetch_task(model_id, index)
                await asyncio.to_thread(_check_gate, graph, task)
                vectors = await self._cache.fetch_vectors(model_id, index)
                resident = LoadedTask(
                    task.task_id, task.label, task.vram_bytes, task.state_bytes, graph, weights
                )
                program = await self._load(resident)
                if vectors is not None:
                    await self._try(task, program, vectors)
            finally:
                self.loading = ""
            if task.task_id not in self._places:  # nothing asks for it until it is loaded again
                raise WorkerLost(f"the worker was lost right after it loaded {task.label}")
            self.programs[task.task_id] = program
            _log.info("loaded %s (%s)", task.label, task.task_id[:12])
            return program

    async def reload(self) -> None:
        """Load what died with a worker; a task that fails now is resident no longer."""
        async with self._lock:
            self.forget_programs()
            for resident in list(self._tasks.values()):
                if resident.task_id in self._places:
                    continue
                del self._tasks[resident.task_id]  # for good, if it is what kills workers
                if resident.task_id in self._failed:
                    continue
                try:
                    self.programs[resident.task_id] = await self._load(resident)
                except WorkerLost:
                    raise
                except SplitUpError as error:
                    _log.error("task %s is gone: %s", resident.label, error)

    def forget_programs(self) -> None:
        """Advertise nothing that a lost worker had until it is loaded again."""
        for task_id, (_, program) in list(self._places.items()):
            if not self._workers.is_loaded(program):
                self.programs.pop(task_id, None)
                del self._places[task_id]

    async def _try(self, task: Task, program: int, vectors: SelfTestVectors) -> None:
        try:
            audit = await audit_program(self._workers, program, task, vectors, self._get_speed())
        except WorkerLost:
            del self._tasks[task.task_id], self._places[task.task_id]  # it may kill workers
            raise
        except SplitUpError as error:
            self._failed[task.task_id] = f"{task.label} cannot be tried: {error}"
            await self._unload(task.task_id)
            raise AuditFailed(self._failed[task.task_id]) from error
        if not audit.may_serve:
            self._failed[task.task_id] = (
                f"{task.label} is not served, because this machine would be slashed for it: "
                f"{audit.detail}; see 'splitup-node audit --dry-run'"
            )
            await self._unload(task.task_id)
            raise AuditFailed(self._failed[task.task_id])
        _log.info("%s against its reference vectors: %s", task.label, audit.verdict.value)

    async def _load(self, resident: LoadedTask) -> int:
        """Load a task, which then has its memory; returns its program."""
        free = self._list_free()
        worker = free.index(max(free))
        if resident.vram_bytes > free[worker]:
            raise Unavailable(f"no device has {resident.vram_bytes} bytes left")
        loaded = await self._workers.load(worker, resident.graph, resident.weights)
        if loaded["task_id"] != resident.task_id:
            raise InvalidModel(f"{resident.graph} is not task {resident.task_id}; delete the file")
        self._tasks[resident.task_id] = resident
        program: int = loaded["program"]
        self._places[resident.task_id] = (worker, program)
        return program

    async def _unload(self, task_id: str) -> None:
        del self._tasks[task_id]
        self.programs.pop(task_id, None)  # from here on nobody begins to run it
        place = self._places.pop(task_id, None)
        if place is not None:  # None: its worker is gone, and the memory with it
            await self._workers.unload(place[1])


def _check_gate(path: Path, task: Task) -> None:
    """Raise InvalidModel when zeros would be claimed of outputs that are none."""
    if task.gate is not None:
        check_gate(load_graph(path.read_bytes()), task.gate)
