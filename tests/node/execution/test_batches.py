"""Sessions with a step of the same task ready at the same time run in one batch."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_node.settlement.task_replay import TaskReplay, append_output, recompute
from splitup_node.worker.ipc import RunRequest

from splitup.graph.cost import compute_state_bytes
from splitup.graph.manifest import InputSource, Manifest, OutputPort, Port, Task, TaskInput
from splitup.messages.base import CLIENT
from splitup.messages.storage import LogName
from splitup.storage.log_store import LogPatience, LogWriter
from tests.builders import HANG_S
from tests.graph.graphs import make_running_sum
from tests.node.network import Store, TestClient, TestNode, make_certificate

SIZE, MOST, SESSIONS, STEPS = 4, 8, 6, 3
GRAPH = make_running_sum(MOST, SIZE)
TASK_ID = hashlib.sha256(GRAPH.to_bytes()).hexdigest()
pytestmark = pytest.mark.asyncio


def make_one_task() -> Manifest:
    def port(name: str) -> dict[str, Any]:
        return {"name": name, "dtype": "float32", "shape": (MOST, SIZE), "rows": "T"}

    reference = b"not looked at here"
    task = Task(
        task_id=TASK_ID,
        label="running sum",
        inputs=(TaskInput(**port("x"), source=InputSource(input="x")),),
        outputs=(Port(**port("y")),),
        graph_bytes=len(GRAPH.to_bytes()),
        weights_digest="",
        weights_bytes=0,
        state_bytes=compute_state_bytes(GRAPH),
        vram_bytes=10**5,
        flops=SIZE,
        price_nano_usdc=10_000,
        reference_digest=hashlib.sha256(reference).hexdigest(),
        reference_bytes=len(reference),
    )
    return Manifest(
        version=1,
        kind="function",
        tinygrad="0.14.0",
        inputs=(Port(**port("x")),),
        outputs=(OutputPort(**port("y"), task=0, port=0),),
        tasks=(task,),
        text=None,
    )


def compute(xs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return what the task gives for every step; the numbers are small, so sums are exact."""
    total, results = np.zeros(SIZE, np.float32), []
    for x in xs:
        results.append(x * x + total)
        total = total + (x * x).sum(0)
    return results


def record_sizes(node: TestNode) -> list[int]:
    """Return a list which the sizes of the node's batches will be added to."""
    sizes: list[int] = []
    run_together = node.workers.run_together

    def record(requests: Sequence[RunRequest], handler: Any) -> None:
        sizes.append(len(requests))
        run_together(requests, handler)

    node.workers.run_together = record  # type: ignore[method-assign]
    return sizes


@pytest.mark.long  # in small: steps that wait for each other, below
async def test_ready_steps_of_several_sessions_run_in_one_batch(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    node, client, manifest = TestNode(tmp_path / "a", Store()), TestClient(), make_one_task()
    sizes = record_sizes(node)
    ready, schedule = asyncio.Event(), node.engine.step_loop.schedule

    def watch() -> None:
        schedule()
        if len(node.engine.table.queue.ready) == SESSIONS:
            ready.set()

    node.engine.step_loop.schedule = watch  # type: ignore[method-assign]
    random = np.random.default_rng(0)
    try:
        await node.start({TASK_ID: GRAPH})
        sessions = []
        for tag in range(SESSIONS):
            certificate = make_certificate(
                manifest, [node.entry], client.identity.signing_key_hex, steps=STEPS, tag=str(tag)
            )
            node.engine.start(certificate, manifest)
            sessions.append(certificate)
        results: dict[tuple[str, int], np.ndarray] = {}
        inputs = [
            [random.integers(0, 9, (1 + (tag == 0), SIZE)).astype(np.float32) for _ in range(STEPS)]
            for tag in range(SESSIONS)
        ]
        async with asyncio.timeout(HANG_S):
            for step in range(STEPS):
                node.engine.step_loop.pause()
                for certificate, xs in zip(sessions, inputs, strict=True):
                    if not step:
                        await client.connect(certificate)
                    client.send(certificate, step, xs[step], {node.identity.address})
                await ready.wait()
                ready.clear()
                node.engine.step_loop.resume()
                for _ in sessions:
                    frame = await client.outputs.get()
                    data = np.frombuffer(frame.payload, np.float32)
                    results[frame.execution_id, frame.step] = data.reshape(-1, SIZE)
        assert sizes == [SESSIONS] * STEPS
        for certificate, xs in zip(sessions, inputs, strict=True):
            execution = certificate.plan.request.execution_id
            for step, expected in enumerate(compute(xs)):
                np.testing.assert_array_equal(results[execution, step], expected)
        assert node.failed.empty()
    finally:
        await client.pool.close()
        await node.close()


async def test_steps_that_wait_for_each_other_run_in_one_pass(tmp_path: Path) -> None:
    """As when a task that was taken over catches up: all inputs are there, in any order."""
    (tmp_path / "a").mkdir()
    node, client, manifest = TestNode(tmp_path / "a", Store()), TestClient(), make_one_task()
    sizes = record_sizes(node)
    rows = (1, 1, 2, 1, 3, 3, 2, 1)  # 8 in the first pass, 6 in the second one
    random = np.random.default_rng(0)
    inputs = [random.integers(0, 9, (count, SIZE)).astype(np.float32) for count in rows]
    try:
        await node.start({TASK_ID: GRAPH})
        certificate = make_certificate(
            manifest, [node.entry], client.identity.signing_key_hex, steps=len(rows), tag="one"
        )
        execution = node.engine.start(certificate, manifest)
        await client.connect(certificate)
        loop, ready = node.engine.step_loop, asyncio.Event()
        schedule = loop.schedule

        def watch() -> None:
            schedule()
            if len(node.engine.table.queue.ready):
                ready.set()

        loop.schedule = watch  # type: ignore[method-assign]
        loop.pause()
        order = [*range(len(rows) - 1, 0, -1), 0]  # the first step comes last
        for step in order:
            client.send(certificate, step, inputs[step], {node.identity.address})
        async with asyncio.timeout(HANG_S):
            await ready.wait()
            loop.resume()
            for step, expected in enumerate(compute(inputs)):
                frame = await client.outputs.get()
                assert frame.step == step and bytes(frame.payload) == expected.tobytes()
            assert sizes == [5, 3]
            client.end(certificate, len(rows))
            finished = await node.finished.get()
        store = node.store.open(certificate, manifest, execution.executor_map)
        request = certificate.plan.request
        log = LogWriter(request.execution_id, request.client, store)
        for step, xs in enumerate(inputs):
            await append_output(log, store, LogName.of(CLIENT, 0, "", step), xs.tobytes())
        await log.finish()
        replay = TaskReplay(
            store,
            request,
            manifest,
            certificate.plan.executors(),
            0,
            len(rows),
            LogPatience(is_drawn=False),
        )
        sizes.clear()
        program = node.programs[TASK_ID]
        digests = await recompute(node.engine, node.workers, program, replay)
        own = finished.parts[0].digests
        assert (digests.inputs, digests.outputs) == (own.inputs, own.outputs)
        assert digests.state == own.state
        assert sizes == [5, 3]
        assert node.failed.empty()
    finally:
        await client.pool.close()
        await node.close()
