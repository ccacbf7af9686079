"""Running a whole task again from stored logs: for a verification, or after a crash."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from splitup.core import limits
from splitup.graph.gates import shut
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Request
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.storage_keys import LogName
from splitup.storage.log_store import LogObject, LogStore, LogWriter, iter_tensors
from splitup_node.execution.digests import Digests
from splitup_node.execution.engine import Engine
from splitup_node.worker.supervisor import WorkerLost
from splitup_node.worker.worker_pool import Workers

# step, one entry per port
OnOutputs = Callable[[int, Sequence[bytes | memoryview]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TaskReplay:
    """A task of an execution that is to be run again, and the logs of its inputs.

    ``is_drawn`` says that all executors have committed: only the client's log may still grow.
    """

    store: LogStore
    request: Request
    manifest: Manifest
    executors: Sequence[str]  # of every task, since each wrote its own log
    task: int
    steps: int
    is_drawn: bool = False


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


async def recompute(
    engine: Engine,
    workers: Workers,
    program: int,
    replay: TaskReplay,
    on_outputs: OnOutputs | None = None,
) -> Digests:
    """Run all steps of a task from zero state, and return their digests.

    A step runs when no live run is ready. Raises PeerFault for logs that are damaged or too short,
    StorageUnavailable, TaskFailed, WorkerLost.
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
            is_drawn=replay.is_drawn,
        )
        for source, port in zip(get_sources(manifest, task), entry.inputs, strict=True)
    ]
    digests = Digests(len(entry.inputs), len(entry.outputs))
    specs = [port.spec for port in entry.inputs], [port.spec for port in entry.outputs]
    session, worker = engine.new_session(), workers.restarts
    try:
        for step in range(steps):
            inputs = [await anext(stream) for stream in streams]
            if (zeros := shut(*specs, entry.gate, inputs)) is not None:
                digests.add_inputs(zeros[0])
                digests.add_outputs(zeros[1])
                if on_outputs is not None:
                    await on_outputs(step, zeros[1])
                continue
            if workers.restarts != worker:  # the new worker would begin with zero state
                raise WorkerLost("the worker died while a task was recomputed")
            answer = await engine.step_loop.run_background(session, program, inputs)
            digests.add_inputs(inputs)
            digests.add_outputs(answer.outputs)
            if on_outputs is not None:
                await on_outputs(step, answer.outputs)
        if entry.state_bytes and steps:
            digests.state = await workers.digest_state(session)
    finally:
        workers.drop([session])
        for stream in streams:
            await stream.aclose()
    return digests
