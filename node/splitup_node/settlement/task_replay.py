"""Running a whole task again from stored logs: for a verification, or after a crash."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from splitup.core import limits, tuning
from splitup.core.background import cancel
from splitup.graph.manifest import Manifest
from splitup.graph.step_groups import StepGroup
from splitup.messages.plans import Request
from splitup.messages.storage import LogName
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.routes import get_sources
from splitup.storage.log_store import LogObject, LogPatience, LogStore, LogWriter, iter_tensors
from splitup_node.execution.engine import Engine
from splitup_node.execution.kept.digests import Digests
from splitup_node.worker.ipc import RunAnswer, RunRequest
from splitup_node.worker.supervisor import WorkerLost
from splitup_node.worker.worker_pool import Workers

# step, one entry per port
OnOutputs = Callable[[int, Sequence[bytes | memoryview]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TaskReplay:
    """A task of an execution that is to be run again, and the logs of its inputs.

    ``patience`` says for how long these may still grow.
    """

    store: LogStore
    request: Request
    manifest: Manifest
    executors: Sequence[str]  # of every task, since each wrote its own log
    task: int
    steps: int
    patience: LogPatience


async def append_output(
    writer: LogWriter, store: LogStore, name: LogName, data: bytes | memoryview
) -> None:
    """Log the output of step ``name.number``; store at once what is too large for a frame."""
    digest = hashlib.sha256(data).digest()
    is_large = len(data) > limits.INLINE_TENSOR_BYTES
    if is_large:
        await store.write([LogObject(name, data, digest, len(data))])
    entry = LogEntry(name.number, digest, len(data), None if is_large else data)
    writer.append(name.task, name.port, entry)
    writer.settle()


async def recompute(
    engine: Engine,
    workers: Workers,
    program: int,
    replay: TaskReplay,
    on_outputs: OnOutputs | None = None,
) -> Digests:
    """Run all steps of a task from zero state, and return their digests.

    Consecutive steps take one pass where the program's kernels allow it; the next ones are read
    meanwhile. A pass begins when no live run is ready. Raises PeerFault for logs that are damaged
    or too short, InvalidInput, StorageUnavailable, TaskFailed, WorkerLost.
    """
    task, steps, manifest = replay.task, replay.steps, replay.manifest
    entry = manifest.tasks[task]
    streams = [
        iter_tensors(
            replay.store,
            replay.request,
            source,
            replay.executors,
            port.spec,
            steps,
            replay.patience,
        )
        for source, port in zip(get_sources(manifest, task), entry.inputs, strict=True)
    ]
    specs = [port.spec for port in entry.inputs], [port.spec for port in entry.outputs]
    merges, has_executions = workers.merges(program), engine.step_loop.has_executions

    def make_group() -> StepGroup:
        most = tuning.MERGE_STEPS_BUSY if has_executions() else tuning.MERGE_STEPS
        return StepGroup(*specs, entry.gate, most if merges else 1)

    group = make_group()
    passes = _Passes(engine, workers, program, Digests(*map(len, specs)), on_outputs)
    try:
        for _ in range(steps):
            inputs = [await anext(stream) for stream in streams]
            if not group.add(inputs):
                await passes.start(group)
                group = make_group()
                group.add(inputs)
        await passes.start(group)
        await passes.finish()
        if entry.state_bytes and steps:
            passes.digests.state = await workers.digest_state(passes.session)
    finally:
        await passes.close()
        for stream in streams:
            await stream.aclose()
    return passes.digests


class _Passes:
    """Runs one group of steps after the other in a session of its own."""

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        program: int,
        digests: Digests,
        on_outputs: OnOutputs | None,
    ) -> None:
        self.digests, self.session = digests, engine.table.new_session()
        self._engine, self._workers, self._program = engine, workers, program
        self._on_outputs = on_outputs
        self._worker = workers.restarts
        self._step = 0
        self._running: asyncio.Task[None] | None = None

    async def start(self, group: StepGroup) -> None:
        """Start a group once the one before it is done."""
        await self.finish()
        self._running = asyncio.create_task(self._run(group))

    async def finish(self) -> None:
        """Wait for the group that runs, if any; raise what it raises."""
        if self._running is not None:
            await self._running
            self._running = None

    async def close(self) -> None:
        """Give up what still runs, and the session."""
        if self._running is not None:
            await cancel(self._running)
        self._workers.drop([self.session])

    async def _run(self, group: StepGroup) -> None:
        requests = [RunRequest(self.session, self._program, one) for one in group.to_run]
        results: list[RunAnswer] = []
        if requests:
            if self._workers.restarts != self._worker:  # the new one would begin with zero state
                raise WorkerLost("the worker died while a task was recomputed")
            results = await self._engine.step_loop.run_background(requests)
        for inputs, outputs in group.pop([answer.outputs for answer in results]):
            self.digests.add(
                *([hashlib.sha256(data).digest() for data in group] for group in (inputs, outputs))
            )
            if self._on_outputs is not None:
                await self._on_outputs(self._step, outputs)
            self._step += 1
