"""Running a whole task again from stored logs: for a verification, or after a crash."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence

from splitup import limits
from splitup.errors import PeerFault
from splitup.graph.manifest import Manifest
from splitup.net.logs import LogStore, iter_log, read_tensor
from splitup.protocol.logs import LogReader
from splitup.protocol.queue import PortId
from splitup.protocol.routes import get_sources
from splitup.tensors import TensorSpec
from splitup.wire import CLIENT, Request
from splitup_node.digests import Digests
from splitup_node.engine import Engine
from splitup_node.supervisor import Supervisor, WorkerLost

OnOutputs = Callable[[int, Sequence[bytes | memoryview]], None]  # step, one entry per port


async def recompute(
    engine: Engine,
    supervisor: Supervisor,
    store: LogStore,
    request: Request,
    manifest: Manifest,
    executors: Sequence[str],
    task: int,
    program: int,
    steps: int,
    on_outputs: OnOutputs = lambda step, outputs: None,
) -> Digests:
    """Run ``steps`` steps of a task from zero state on what ``executors`` and the client logged.

    Runs when no live run is ready. Raises PeerFault for logs that are broken or too short,
    StorageUnavailable, TaskFailed, WorkerLost.
    """
    entry = manifest.tasks[task]
    streams = [
        _read_steps(store, request, source, executors, port.spec, steps)
        for source, port in zip(get_sources(manifest, task), entry.inputs, strict=True)
    ]
    digests = Digests(len(entry.inputs), len(entry.outputs))
    session, worker = engine.new_session(), supervisor.restarts
    try:
        for step in range(steps):
            inputs = [await anext(stream) for stream in streams]
            if supervisor.restarts != worker:  # zero state now would give other bytes
                raise WorkerLost("the worker was lost while a task was run again")
            answer = await engine.runs.run_background(session, program, inputs)
            digests.add_inputs(inputs)
            digests.add_outputs(answer.outputs)
            on_outputs(step, answer.outputs)
    finally:
        supervisor.drop([session])
        for stream in streams:
            await stream.aclose()
    return digests


async def _read_steps(
    store: LogStore,
    request: Request,
    source: PortId,
    executors: Sequence[str],
    spec: TensorSpec,
    steps: int,
) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield one port's tensors step by step, one segment in memory at a time.

    What their digest has to be, the committee compares.
    """
    author = request.client if source[0] == CLIENT else executors[source[0]]
    reader = LogReader(request.execution_id, *source, author, spec.accepts)
    ends_s = time.monotonic() + limits.LOG_LATE_S
    async for entries in iter_log(store, reader, wait=lambda: time.monotonic() < ends_s):
        for entry in entries:
            yield await read_tensor(store, reader.name, entry)
    who = "the client" if source[0] == CLIENT else f"task {source[0]}"
    raise PeerFault(f"the log of {who} ends before step {steps}; it has {reader.next_step}")
