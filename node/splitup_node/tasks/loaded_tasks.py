"""The tasks that are loaded in the workers, their memory, and how they are loaded again.

A task is served only after it has given the outputs of its reference vectors
(``splitup_node.tasks.audit``). When a worker dies, its tasks are loaded into the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from splitup.client.inputs import format_bytes
from splitup.core.errors import InvalidModel, SplitUpError, Unavailable
from splitup.core.throughput import Rate
from splitup.graph.manifest import Task
from splitup.storage.task_cache import TaskCache
from splitup_node.tasks.audit import AuditFailed, audit_program
from splitup_node.tasks.placement import ModelTask
from splitup_node.worker.supervisor import WorkerLost
from splitup_node.worker.worker_pool import Workers

if TYPE_CHECKING:
    from splitup.graph.self_test_vectors import SelfTestVectors

_log = logging.getLogger("splitup.node.loaded_tasks")


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A task that has been loaded, and its files."""

    task: Task
    graph: Path
    weights: Path | None


class LoadedTasks:
    """Loads tasks one at a time, each into the worker with the most free memory."""

    def __init__(
        self, workers: Workers, cache: TaskCache, get_speed: Callable[[], Rate] = Rate
    ) -> None:
        """``get_speed`` returns the rate that an audit's runs are added to."""
        self._workers = workers
        self._cache = cache
        self._get_speed = get_speed
        self._lock = asyncio.Lock()
        self._tasks: dict[str, LoadedTask] = {}
        self._users: Counter[str] = Counter()  # task_id -> how many need it to stay loaded
        self._failed: dict[ModelTask, str] = {}  # why this node must not serve it
        self._places: dict[str, tuple[int, int]] = {}  # task_id -> worker, program
        self.programs: dict[str, int] = {}  # task_id -> program, of those that are served
        self.loading = ""
        self._said = ""  # the task whose loading was logged last: it is tried once a second
        self._unasked: tuple[str, asyncio.Task[int]] | None = None  # task_id, its loading

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks that can run right now."""
        return tuple(self._tasks[task_id].task for task_id in self.programs)

    @property
    def used(self) -> frozenset[str]:
        """Return the tasks that an execution or a verification needs to stay loaded."""
        return frozenset(self._users)

    @property
    def is_waited_for(self) -> bool:
        """Return whether an execution or a verification waits for a task to be loaded."""
        return any(task_id not in self.programs for task_id in self._users)

    @property
    def free_bytes(self) -> int:
        """Return the free memory of the device that has most of it."""
        return max(self._list_free())

    @property
    def used_bytes(self) -> int:
        """Return the memory that tasks take, on all devices."""
        return sum(one.task.vram_bytes for one in self._tasks.values())

    def _list_free(self) -> list[int]:
        """Return what tasks may still take of each device, of which other programs use some."""
        unused, left = self._workers.unused_bytes, self._list_left()
        return [own if u is None else min(own, u) for own, u in zip(left, unused, strict=True)]

    def _list_left(self) -> list[int]:
        left = list(self._workers.memory_bytes)
        for task_id, (worker, _) in self._places.items():
            left[worker] -= self._tasks[task_id].task.vram_bytes
        return left

    @property
    def state_limit_bytes(self) -> int:
        """Return the bytes that the states of all executions may take together.

        They may all be in one worker, so this is the room of the worker that has the least.
        """
        room = list(self._workers.memory_bytes)
        for task_id, (worker, _) in self._places.items():
            task = self._tasks[task_id].task
            room[worker] -= task.vram_bytes - task.state_bytes
        used = {worker for worker, _ in self._places.values()}
        return min((room[worker] for worker in used), default=max(room))

    def get_room(self, task_id: str) -> int:
        """Return the free memory of a loaded task's device once the task is unloaded."""
        return self._list_free()[self._places[task_id][0]] + self._tasks[task_id].task.vram_bytes

    @contextlib.asynccontextmanager
    async def use(self, model_id: str, index: int) -> AsyncIterator[int]:
        """Give the program of a task and keep it loaded meanwhile. Raises as ``ensure``."""
        task_id = (await self._cache.fetch_manifest(model_id)).tasks[index].task_id
        self._users[task_id] += 1
        try:
            program = self.programs.get(task_id)  # does not wait for another task that is loading
            if program is None:
                self._give_way({task_id})
            yield await self.ensure(model_id, index) if program is None else program
        finally:
            self._users[task_id] -= 1
            self._users += Counter()  # drops the zero counts

    async def place(self, model_id: str, index: int) -> bool:
        """Load a task that nobody waits for. Raises as ``ensure``.

        Returns False when it gave way: an execution or a verification waits for another task, or
        ``keep_listed`` found that its model is gone.
        """
        task_id = (await self._cache.fetch_manifest(model_id)).tasks[index].task_id
        loading = asyncio.create_task(self.ensure(model_id, index))
        self._unasked = task_id, loading
        try:
            await asyncio.wait({loading})
        finally:
            self._unasked = None
            loading.cancel()
        if loading.cancelled():
            return False
        loading.result()
        return True

    def keep_listed(self, listed: Collection[str]) -> None:
        """Stop loading a task that nobody waits for and that is not ``listed`` any more."""
        if self._unasked is not None and self._unasked[0] not in listed:
            self._give_way(listed)

    def _give_way(self, wanted: Collection[str]) -> None:
        if self._unasked is None:
            return
        task_id, loading = self._unasked
        if task_id not in wanted and task_id not in self._users and not loading.done():
            _log.info("%s gives way to a task that is waited for", task_id[:12])
            loading.cancel()

    async def prepare(self, model_id: str, index: int) -> None:
        """Download all files of a task, so that loading it later takes seconds only.

        Raises as ``ensure`` does, except for lack of memory.
        """
        task = (await self._cache.fetch_manifest(model_id)).tasks[index]
        if (model_id, task.task_id) in self._failed:
            raise AuditFailed(self._failed[model_id, task.task_id])
        await self._cache.fetch_task(model_id, index)
        await self._cache.fetch_vectors(model_id, index)

    async def unload(self, task_id: str, is_idle: Callable[[], bool]) -> bool:
        """Unload a task unless it is needed by now; return whether it was unloaded.

        ``is_idle`` is called right before, with no task switch in between. Raises TaskFailed when
        the worker refuses, and WorkerLost; the task is not loaded again then.
        """
        async with self._lock:
            if task_id in self._users or task_id not in self.programs or not is_idle():
                return False
            _log.info("unloading %s (%s)", self._tasks[task_id].task.label, task_id[:12])
            await self._unload(task_id)
            return True

    async def ensure(self, model_id: str, index: int) -> int:
        """Return the program of a task, downloaded, loaded and audited if it is not loaded yet.

        Raises Unavailable (no memory, worker lost), InvalidModel, StorageUnavailable, PeerFault,
        AuditFailed (this machine would be slashed for the task; it is not tried again).
        """
        task = (await self._cache.fetch_manifest(model_id)).tasks[index]
        async with self._lock:
            if task.task_id in self.programs:
                return self.programs[task.task_id]
            if (model_id, task.task_id) in self._failed:
                raise AuditFailed(self._failed[model_id, task.task_id])
            if task.vram_bytes > (free := self.free_bytes):
                others = ", as other programs use the device" * (free < max(self._list_left()))
                raise Unavailable(
                    f"task {index} ({task.label}) needs {task.vram_bytes} bytes of memory; "
                    f"{free} of {max(self._workers.memory_bytes)} are free{others}"
                )
            self.loading = task.task_id
            if self._said != task.task_id:
                _log.info(
                    "loading %s (%s, %s)",
                    task.label,
                    task.task_id[:12],
                    format_bytes(task.vram_bytes),
                    extra={"in_place": True},
                )
                self._said = task.task_id
            try:
                graph, weights = await self._cache.fetch_task(model_id, index)
                vectors = await self._cache.fetch_vectors(model_id, index)
                program = await self._load(LoadedTask(task, graph, weights))
                if vectors is not None:
                    await self._try(model_id, task, program, vectors)
            finally:
                self.loading = ""
            if task.task_id not in self._places:  # its worker died during the audit
                raise WorkerLost(
                    f"the worker died right after it loaded {task.label}; it is loaded again later"
                )
            self.programs[task.task_id] = program
            self._said = ""
            _log.info("loaded %s (%s)", task.label, task.task_id[:12])
            return program

    async def reload(self) -> None:
        """Load the tasks of a worker that died into its successor; forget those that fail."""
        async with self._lock:
            self.forget_programs()
            for loaded in list(self._tasks.values()):
                task_id = loaded.task.task_id
                if task_id in self._places:
                    continue
                del self._tasks[task_id]  # it stays deleted if loading it kills the worker
                try:
                    self.programs[task_id] = await self._load(loaded)
                except WorkerLost:
                    raise
                except SplitUpError as error:
                    _log.error("task %s cannot be loaded again: %s", loaded.task.label, error)

    def forget_programs(self) -> None:
        """Stop to serve the tasks of a lost worker until they are loaded again."""
        for task_id, (_, program) in list(self._places.items()):
            if not self._workers.is_loaded(program):
                self.programs.pop(task_id, None)
                del self._places[task_id]

    async def _try(self, model_id: str, task: Task, program: int, vectors: SelfTestVectors) -> None:
        key = model_id, task.task_id  # another model may have stored other outputs of the task
        try:
            audit = await audit_program(self._workers, program, task, vectors, self._get_speed())
        except WorkerLost:
            del self._tasks[task.task_id], self._places[task.task_id]  # the task may kill workers
            raise
        except asyncio.CancelledError:  # another task is wanted more
            await self._unload(task.task_id)
            raise
        except SplitUpError as error:
            self._failed[key] = f"the audit of {task.label} failed: {error}"
            await self._unload(task.task_id)
            raise AuditFailed(self._failed[key]) from error
        if not audit.may_serve:
            self._failed[key] = (
                f"{task.label} is not served, because this machine would be slashed for it: "
                f"{audit.detail}; see which others it may serve: splitup-node audit"
            )
            await self._unload(task.task_id)
            raise AuditFailed(self._failed[key])
        _log.info("audit of %s: %s", task.label, audit.verdict.value)

    async def _load(self, wanted: LoadedTask) -> int:
        """Load a task into the worker with the most free memory; return its program."""
        task, free = wanted.task, self._list_free()
        worker = free.index(max(free))
        if task.vram_bytes > free[worker]:
            raise Unavailable(f"no device has {task.vram_bytes} free bytes for {task.label}")
        loaded = await self._workers.load(
            worker, wanted.graph, wanted.weights, task.vram_bytes, task.gate
        )
        if loaded["task_id"] != task.task_id:
            raise InvalidModel(f"{wanted.graph} is not task {task.task_id}; delete the file")
        program: int = loaded["program"]
        if loaded["state_bytes"] > task.state_bytes:
            await self._workers.unload(program)
            raise InvalidModel(
                f"task {task.task_id[:12]} ({task.label}) keeps {loaded['state_bytes']} bytes of "
                f"state for an execution; {task.state_bytes} are declared for it"
            )
        self._tasks[task.task_id] = wanted
        self._places[task.task_id] = (worker, program)
        return program

    async def _unload(self, task_id: str) -> None:
        del self._tasks[task_id]
        self.programs.pop(task_id, None)  # no run of it begins from here on
        place = self._places.pop(task_id, None)
        if place is not None:  # None: its worker died, which freed the memory
            await self._workers.unload(place[1])
