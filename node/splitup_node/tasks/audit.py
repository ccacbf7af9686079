"""Does this machine compute correctly? Runs tasks on seeded inputs and compares their outputs.

The outputs must be those that the task gave when its model was registered. A node tries every task
once before it serves it; ``splitup-node audit --dry-run`` tries as many as the node can hold before
there is a stake to lose. Anybody can register models, so those come first that most operators hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from splitup.chain.client import Chain
from splitup.chain.committee_reader import fetch_committee
from splitup.chain.models import RecordedModels
from splitup.chain.registered_models import collect_models
from splitup.client.inputs import format_bytes
from splitup.client.market.member_answers import fetch_latest_snapshot
from splitup.core import limits, tuning
from splitup.core.errors import (
    ConfigurationError,
    InvalidInput,
    InvalidModel,
    Refused,
    SplitUpError,
)
from splitup.core.throughput import Rate
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Task
from splitup.messages.determinism import check_own
from splitup.messages.network import Deployment
from splitup.messages.snapshots import get_operator
from splitup.net.http import SignedClient
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.task_cache import TaskCache
from splitup_node.config import NodeConfig
from splitup_node.execution.batches import has_all_rows
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import WORKER_ARGV, Supervisor, TaskFailed, WorkerLost, fulfil
from splitup_node.worker.worker_pool import Workers

if TYPE_CHECKING:  # it brings numpy, which a daemon does without until it audits
    from splitup.graph.self_test_vectors import Audit, SelfTestVectors

_log = logging.getLogger("splitup.node")
SESSION: Final = 0  # the engine counts its own from 1

Check = Callable[[Chain, Identity, NodeConfig], Awaitable[Any]]
OnProgress = Callable[[str], None]


class AuditFailed(TaskFailed):
    """This machine computes other outputs than the task has: serving it would cost the stake."""


@dataclass(frozen=True, slots=True)
class AuditedTask:
    """One row of a report; ``verdict`` is "" when the task could not be tried."""

    model_id: str
    index: int
    label: str
    verdict: str
    may_serve: bool
    detail: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The tried tasks, and ``device``: the report of the last device that tried them.

    ``least_bytes`` is the memory that the smallest task needs, 0 when none was looked at.
    """

    device: dict[str, str]
    rows: tuple[AuditedTask, ...]
    least_bytes: int


async def audit_program(
    supervisor: Supervisor | Workers,
    program: int,
    task: Task,
    vectors: SelfTestVectors,
    speed: Rate | None = None,
) -> Audit:
    """Run a loaded program on the inputs of its vectors. Raises TaskFailed, WorkerLost.

    The speed of all runs but the first is added to ``speed``.
    """
    from splitup.graph.self_test_vectors import audit, make_inputs

    inputs, outputs = [port.spec for port in task.inputs], [port.spec for port in task.outputs]
    results = []
    try:
        for step in range(len(vectors.classes[0].steps)):
            data = await asyncio.to_thread(make_inputs, inputs, vectors.seed, step, vectors.rows)
            answer = await _run(supervisor, RunRequest(SESSION, program, data))
            results.append([bytes(output) for output in answer.outputs])
            if speed is not None and step and has_all_rows(task, data):
                speed.add(task.flops, answer.ended_ns - answer.started_ns)
    finally:
        supervisor.drop([SESSION])
    determinism = supervisor.report["determinism_class"][: limits.MAX_DETERMINISM_CHARS]
    return await asyncio.to_thread(audit, vectors, determinism, results, outputs, task.tolerances)


async def audit_node(
    config: NodeConfig,
    models: Sequence[str] = (),
    check: Check | None = None,
    worker_argv: Sequence[str] = WORKER_ARGV,
    on_progress: OnProgress = lambda text: None,
) -> AuditReport:
    """Try every task of ``models``, by name or id, that fits the node's memory.

    Without ``models``, as many tasks of the market as it can hold (``_Trial.try_market``). Every
    device tries them; with several devices a row's detail names the device. ``check`` is called
    before the first task, with the chain; without it no stake is needed. Raises InvalidInput (no
    such model), ChainUnavailable, StorageUnavailable, Unavailable (the worker, the members).
    """
    identity = config.load_identity()
    deployment = Deployment.load(config.deployment)
    async with SignedClient(identity) as http:
        gateway = GatewayClient(config.gateway_urls, identity, http=http)
        chain = await Chain.connect(config.rpc_url, deployment)
        recorded = RecordedModels(chain)
        cache = TaskCache(config.data_dir / "cache", gateway, http.session, recorded.check)
        try:
            if check is not None:
                await check(chain, identity, config)
            chosen = await _find_models(chain, models)
            operators = {} if models else await _count_operators(chain, http)
            rows: list[AuditedTask] = []
            least_bytes = 0  # memory that the smallest of all tasks needs
            shares = config.device_shares
            for name, memory_bytes in shares:
                supervisor = Supervisor(
                    config.data_dir,
                    memory_bytes=memory_bytes,
                    device=name,
                    threads=config.threads,
                    cache_directory=config.kernel_cache,
                    worker_argv=worker_argv,
                )
                try:
                    device = await supervisor.start()
                    check_own(device["determinism_class"])
                    trial = _Trial(supervisor, cache, memory_bytes, on_progress)
                    if models:
                        await trial.try_models(list(chosen))
                    else:
                        await trial.try_market(chosen, operators)
                finally:
                    await supervisor.close()
                found, least_bytes = trial.rows, trial.least_bytes
                if len(shares) > 1:
                    found = [replace(row, detail=f"{name}: {row.detail}") for row in found]
                rows += found
        finally:
            await chain.close()
    return AuditReport(device, tuple(rows), least_bytes)


async def check_machine(
    config: NodeConfig,
    worker_argv: Sequence[str] = WORKER_ARGV,
    on_progress: OnProgress = lambda text: None,
) -> None:
    """Raise ConfigurationError when this machine cannot run any task, or would be slashed for all.

    Of tasks that fail beside others that pass it only warns: anybody can register a task that no
    machine can run.
    """
    report = await audit_node(config, worker_argv=worker_argv, on_progress=on_progress)
    rows = report.rows
    if not rows and report.least_bytes:
        raise ConfigurationError(
            f"no task of the network fits into the node's memory: the smallest needs "
            f"{report.least_bytes} bytes; nothing was staked; raise vram in {config.path}"
        )
    refused = [row for row in rows if not row.may_serve]
    if not refused:
        return
    found = (
        f"this machine ({report.device['determinism_class']}) must not serve {len(refused)} of "
        f"{len(rows)} tasks, the first of them {refused[0].label}: {refused[0].detail}; "
        f"see all with: {config.make_command('audit --dry-run')}"
    )
    if not any(row.verdict and row.may_serve for row in rows):
        raise ConfigurationError(f"{found}; nothing was staked")
    _log.warning("%s", found)


class _Trial:
    """Tries one task after the other, in a new worker whenever the memory is full."""

    def __init__(
        self, supervisor: Supervisor, cache: TaskCache, memory_bytes: int, on_progress: OnProgress
    ) -> None:
        self._supervisor = supervisor
        self._cache = cache
        self._memory_bytes = memory_bytes
        self._on_progress = on_progress
        self._used_bytes = 0
        self._tried: set[tuple[str, str]] = set()  # models and tasks
        self._passed: set[str] = set()  # tasks
        self.rows: list[AuditedTask] = []
        self.least_bytes = 0

    async def try_models(self, model_ids: Sequence[str]) -> None:
        """Try every task of these models that fits."""
        for model_id in model_ids:
            for index, task in await self._list_tasks(model_id):
                if self._used_bytes + task.vram_bytes > self._memory_bytes:
                    await self._renew()
                await self._try(model_id, index, task)

    async def try_market(
        self, models: Mapping[str, Sequence[str]], operators: Mapping[str, int]
    ) -> None:
        """Try tasks until the memory is full, or ``tuning.AUDIT_TASKS`` were tried.

        First those that most operators hold (``operators``, by task), which takes a stake. Of
        ``models``, with the ids of their tasks, that nobody holds, as many as it takes until a task
        passes: to register one takes nothing.
        """

        def count(model_id: str) -> int:
            return max((operators.get(task, 0) for task in models[model_id]), default=0)

        for model_id in sorted(models, key=count, reverse=True)[: tuning.MAX_MANIFESTS]:
            if self._passed and not count(model_id):
                return
            try:
                tasks = await self._list_tasks(model_id)
            except (InvalidModel, Refused) as error:
                self._on_progress(f"not tried: {error}")
                continue
            for index, task in tasks:
                if count(model_id) and task.task_id not in operators:
                    continue
                is_full = self._used_bytes + task.vram_bytes > self._memory_bytes
                if is_full or len(self.rows) == tuning.AUDIT_TASKS:
                    return
                await self._try(model_id, index, task)

    async def _list_tasks(self, model_id: str) -> list[tuple[int, Task]]:
        """Return a model's tasks that fit, with their places."""
        tasks = (await self._cache.fetch_manifest(model_id)).tasks
        least = min(task.vram_bytes for task in tasks)
        self.least_bytes = min(self.least_bytes or least, least)
        return [
            (index, task)
            for index, task in enumerate(tasks)
            if task.vram_bytes <= self._memory_bytes
        ]

    async def _try(self, model_id: str, index: int, task: Task) -> None:
        """Add a row, unless the task passed before, or this model's words about it failed."""
        if task.task_id in self._passed or (model_id, task.task_id) in self._tried:
            return
        self._tried.add((model_id, task.task_id))
        self._on_progress(
            f"trying task {index} of model {model_id[:10]}: "
            f"{task.label} ({format_bytes(task.weights_bytes)} of weights)"
        )
        try:
            found = await self._run(model_id, index, task)
            verdict, may_serve, detail = found.verdict.value, found.may_serve, found.detail
            if may_serve:
                self._passed.add(task.task_id)
        except _NoVectors:
            verdict, may_serve = "", True
            detail = "its model has no reference vectors to compare with"
        except SplitUpError as error:  # anybody can register a task that cannot be tried
            verdict, may_serve, detail = "", False, f"it does not run here: {error}"
            if isinstance(error, WorkerLost):
                await self._renew()
        self.rows.append(AuditedTask(model_id, index, task.label, verdict, may_serve, detail))

    async def _run(self, model_id: str, index: int, task: Task) -> Audit:
        vectors = await self._cache.fetch_vectors(model_id, index)
        if vectors is None:
            raise _NoVectors
        graph, weights = await self._cache.fetch_task(model_id, index)
        self._used_bytes += task.vram_bytes
        loaded = await self._supervisor.load(graph, weights, task.vram_bytes, task.gate)
        return await audit_program(self._supervisor, loaded["program"], task, vectors)

    async def _renew(self) -> None:
        if self._supervisor.is_running:
            self._supervisor.kill("its memory is full; the next tasks get a new worker")
        await self._supervisor.restart()
        self._used_bytes = 0


class _NoVectors(SplitUpError):
    pass


async def _find_models(chain: Chain, models: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the tasks of models by name or id; without any, of all but the retired ones."""
    events = await chain.fetch_events("models")
    found = collect_models(events)
    tasks = {
        event.args["modelId"]: tuple(
            task["taskId"].removeprefix("0x") for task in event.args["tasks"]
        )
        for event in events
        if event.name == "ModelRegistered"
    }
    if not models:
        return {one.model_id: tasks[one.model_id] for one in found if not one.is_retired}
    by_name = {one.name: one.model_id for one in found} | {
        one.model_id: one.model_id for one in found
    }
    for model in models:
        if model not in by_name:
            raise InvalidInput(
                f"there is no model {model!r} on this network; leave --model out to try those "
                "that others hold"
            )
    return {by_name[model]: tasks[by_name[model]] for model in models}


async def _count_operators(chain: Chain, http: SignedClient) -> Counter[str]:
    """Return how many operators hold each task, by the latest snapshot; empty before the first."""
    members = (await fetch_committee(chain)).members
    snapshot = await fetch_latest_snapshot(chain, http, members)
    entries = snapshot.entries if snapshot else ()
    held = {(get_operator(entry), task) for entry in entries for task in entry.resident}
    return Counter(task for _, task in held)


async def _run(supervisor: Supervisor | Workers, request: RunRequest) -> RunAnswer:
    future: asyncio.Future[RunAnswer] = asyncio.get_running_loop().create_future()
    supervisor.run_together([request], lambda answers: fulfil(future, answers[0]))
    return await future
