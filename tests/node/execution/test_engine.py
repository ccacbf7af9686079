from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from splitup_node.worker.ipc import RunRequest

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, Unavailable
from splitup.messages.base import CLIENT
from splitup.messages.completions import End
from splitup.messages.frames import FrameKind, make_order
from splitup.messages.plans import PlanCertificate
from splitup.net.signed_frames import seal_frame, seal_frames
from splitup.protocol.execution.ends import check_order, sign_end
from splitup.protocol.execution.task_queue import Tensor
from tests.builders import HANG_S, make_tensor_frame
from tests.node.fragile_worker import CRASH, RAISE
from tests.node.network import (
    Store,
    TestClient,
    TestNode,
    compute_reference,
    make_certificate,
    make_manifest,
    read_log,
)

FRAGILE = (sys.executable, str(Path(__file__).parents[1] / "fragile_worker.py"))
pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZE, TASKS = 4, 4
MANIFEST, GRAPHS = make_manifest(SIZE, tasks=TASKS)


class Pair:
    """Two nodes, a store and a client."""

    def __init__(self, nodes: list[TestNode], store: Store, client: TestClient) -> None:
        self.nodes, self.store, self.client = nodes, store, client

    def plan(self, *executors: int, steps: int = 8) -> PlanCertificate:
        """Return a new execution's plan."""
        entries = [self.nodes[index].entry for index in executors]
        key = self.client.identity.signing_key_hex
        tag = secrets.token_hex(8)
        return make_certificate(MANIFEST, entries, key, steps=steps, tag=tag)

    async def run(self, certificate: PlanCertificate, xs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send all inputs at once, return the outputs in order of steps."""
        executors = certificate.plan.executors()
        for step, x in enumerate(xs):
            self.client.send(certificate, step, x, {executors[0], executors[-1]})
        results = {}
        async with asyncio.timeout(HANG_S):
            while len(results) < len(xs):
                frame = await self.client.outputs.get()
                results[frame.step] = np.frombuffer(frame.payload, np.float32)
        return [results[step] for step in range(len(xs))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[TestNode]]:
    """Two nodes with one store."""
    root, store, opened = tmp_path_factory.mktemp("nodes"), Store(), list[TestNode]()
    async with contextlib.AsyncExitStack() as stack:
        for name in "ab":
            (root / name).mkdir()
            opened.append(TestNode(root / name, store, FRAGILE))
            stack.push_async_callback(opened[-1].close)
        await asyncio.gather(*(node.start(GRAPHS) for node in opened))
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def pair(nodes: list[TestNode]) -> AsyncIterator[Pair]:
    """Two nodes that all tests share, and a client of the test's own."""
    client = TestClient()
    yield Pair(nodes, nodes[0].store, client)
    await client.pool.close()
    nodes[0].store.down = False
    for node in nodes:
        for queue in (node.finished, node.failed):
            while not queue.empty():
                queue.get_nowait()


def make_inputs(steps: int) -> list[np.ndarray]:
    return [np.random.default_rng(step).random(SIZE, np.float32) for step in range(steps)]


async def test_execution_over_two_nodes_equals_the_reference_and_is_logged(pair: Pair) -> None:
    certificate = pair.plan(0, 1, 0, 1)
    for node in pair.nodes:
        node.engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    xs = make_inputs(5)
    results = await pair.run(certificate, xs)
    for result, expected in zip(results, compute_reference(xs, TASKS), strict=True):
        assert np.array_equal(result, expected)
    pair.client.end(certificate, 5)
    async with asyncio.timeout(HANG_S):
        finished = [await node.finished.get() for node in pair.nodes]
    completions = [
        execution.claims.make_completions(lambda: bytes(32))[0] for execution in finished
    ]
    entries = {entry.task: entry for completion in completions for entry in completion.tasks}
    for task in range(1, TASKS - 1):
        assert entries[task].inputs == entries[task - 1].outputs
    last = entries[TASKS - 1]
    assert last.inputs == (entries[0].inputs[0], entries[TASKS - 2].outputs[0])
    execution_id = certificate.plan.request.execution_id
    assert pair.client.totals[execution_id, 4] == last.outputs[0], "the last frame signs all steps"
    author = certificate.plan.executors()[-1]
    stored = await read_log(pair.store, execution_id, TASKS - 1, 0, author)
    assert stored == [result.tobytes() for result in results]
    traces = [await pair.client.traces.get() for _ in pair.nodes]
    spans = {(span.task, span.step) for trace in traces for span in trace.spans}
    assert spans == {(task, step) for task in range(TASKS) for step in range(5)}
    for trace in traces:
        for span in trace.spans:
            times = (span.received_ns, span.started_ns, span.ended_ns, span.sent_ns)
            assert list(map(int, times)) == sorted(map(int, times))


async def test_an_ended_execution_keeps_no_outputs(pair: Pair) -> None:
    certificate = pair.plan(0, 1, 0, 1)
    for node in pair.nodes:
        node.engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    xs = make_inputs(3)
    await pair.run(certificate, xs)
    execution = pair.nodes[1].engine.table.by_id[certificate.plan.request.execution_id]
    assert (
        len(execution.outbox.frames) == len(xs) and execution.outbox.nbytes
    )  # for who connects again
    pair.client.end(certificate, len(xs))
    async with asyncio.timeout(HANG_S):
        for node in pair.nodes:
            await node.finished.get()
    assert all(FrameKind(sealed[4]) is FrameKind.TRACE for sealed in execution.outbox.frames)
    assert execution.outbox.nbytes == sum(map(len, execution.outbox.frames))


async def test_frames_that_come_before_the_plan_are_kept(pair: Pair) -> None:
    certificate = pair.plan(0, 1, 0, 1)
    with contextlib.ExitStack() as stack:
        for node in pair.nodes:  # has checked the plan, and not begun the execution
            stack.enter_context(node.engine.table.parties.expect(certificate))
        await pair.client.connect(certificate)
        xs = make_inputs(2)
        running = asyncio.create_task(pair.run(certificate, xs))
        pair.nodes[0].engine.start(certificate, MANIFEST)
        await asyncio.sleep(0)
        pair.nodes[1].engine.start(certificate, MANIFEST)
    assert np.array_equal(await running, compute_reference(xs, TASKS))


async def test_s38_tensors_of_one_execution_do_not_fail_another(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, other = (pair.plan(0, 0, 1, 0) for _ in range(2))
    for certificate in (greedy, other):
        for node in pair.nodes:
            node.engine.start(certificate, MANIFEST)
    node, execution_id = pair.nodes[0], greedy.plan.request.execution_id
    queue = node.engine.table.queue
    xs = make_inputs(2)
    monkeypatch.setattr(queue, "_max_bytes", 4 * xs[0].nbytes)
    with contextlib.suppress(Unavailable):
        for step in range(1, 9):  # without the first one, all of them wait
            data = xs[0].tobytes()
            queue.offer(
                execution_id, (CLIENT, 0), step, Tensor(hashlib.sha256(data).digest(), data)
            )
    await pair.client.connect(other)
    assert np.array_equal(await pair.run(other, xs), compute_reference(xs, TASKS))
    assert "fill the node's buffers" in node.engine.table.by_id[execution_id].life.failure


async def test_executions_of_one_node_interleave_with_separate_states(pair: Pair) -> None:
    certificates = [pair.plan(0, 0, 1, 0) for _ in range(3)]
    for certificate in certificates:
        for node in pair.nodes:
            node.engine.start(certificate, MANIFEST)
        await pair.client.connect(certificate)
        xs = make_inputs(3)
        assert np.array_equal(await pair.run(certificate, xs), compute_reference(xs, TASKS))


async def test_a_verification_runs_only_when_no_step_of_an_execution_is_ready(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifications wait at every moment of a generation; none is begun before a ready step."""
    node, steps = pair.nodes[0], 32
    engine, start = node.engine, node.workers.run_together
    started: list[tuple[int, int]] = []  # session, steps of executions that waited

    def record(requests: Sequence[RunRequest], handle: Any) -> None:
        started.append((requests[0].session, len(engine.table.queue.ready)))
        start(requests, handle)

    monkeypatch.setattr(node.workers, "run_together", record)
    checking, program = engine.table.new_session(), node.programs[MANIFEST.tasks[0].task_id]
    x, is_over = np.ones(SIZE, np.float32).tobytes(), asyncio.Event()

    async def verify() -> None:
        while not is_over.is_set():
            await engine.step_loop.run_background([RunRequest(checking, program, [x])])

    verifying = [asyncio.create_task(verify()) for _ in range(8)]
    certificate = pair.plan(0, 0, 0, 0, steps=steps)
    engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    xs = make_inputs(steps)
    assert np.array_equal(await pair.run(certificate, xs), compute_reference(xs, TASKS))
    is_over.set()
    await asyncio.gather(*verifying)
    node.supervisor.drop([checking])
    assert {waiting for session, waiting in started if session == checking} == {0}
    assert sum(session != checking for session, _ in started) == TASKS * steps
    assert 0 < engine.step_loop.live.compute_ns and 0 < engine.step_loop.background.runs


async def test_client_that_connects_again_gets_its_outputs_again(pair: Pair) -> None:
    certificate = pair.plan(0, 0, 0, 0)
    pair.nodes[0].engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    xs = make_inputs(2)
    first = await pair.run(certificate, xs)
    again = TestClient(pair.client.identity)
    await again.connect(certificate)
    async with asyncio.timeout(HANG_S):
        frames = [await again.outputs.get() for _ in xs]
    await again.pool.close()
    for frame in frames:
        assert np.array_equal(np.frombuffer(frame.payload, np.float32), first[frame.step])


async def test_failed_step_is_reported_to_the_client_by_task_and_node(pair: Pair) -> None:
    certificate = pair.plan(0, 1, 0, 1)
    for node in pair.nodes:
        node.engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    x = np.array([RAISE, 0, 0, 0], np.float32)
    pair.client.send(certificate, 0, x, {pair.nodes[0].identity.address})
    async with asyncio.timeout(HANG_S):
        failure = await pair.client.failures.get()
    assert (failure.task, failure.step) == (0, 0)
    assert failure.node == pair.nodes[0].identity.address
    assert "kernel went wrong" in failure.reason
    assert (await pair.nodes[0].failed.get()).life.failure


async def test_f25_a_worker_crash_fails_only_executions_that_had_begun(pair: Pair) -> None:
    node = pair.nodes[0]
    begun, fresh = pair.plan(0, 0, 0, 0), pair.plan(0, 0, 0, 0)
    crashing = pair.plan(0, 0, 0, 0)
    for certificate in (begun, fresh, crashing):
        node.engine.start(certificate, MANIFEST)
        await pair.client.connect(certificate)
        if certificate is begun:
            await pair.run(begun, make_inputs(1))
    address = {node.identity.address}
    pair.client.send(crashing, 0, np.array([CRASH, 0, 0, 0], np.float32), address)
    async with asyncio.timeout(HANG_S):
        await node.supervisor.wait_lost()
        node.programs.clear()
        node.engine.on_worker_lost("the worker process ended")
        failed = set[str]()  # those of other tests fail, too
        while not failed >= {c.plan.request.execution_id for c in (begun, crashing)}:
            failed.add((await node.failed.get()).id)
    assert fresh.plan.request.execution_id not in failed
    await node.supervisor.restart()
    await node.load(GRAPHS)
    node.engine.resume()
    xs = make_inputs(2)
    await pair.client.connect(fresh)
    assert np.array_equal(await pair.run(fresh, xs), compute_reference(xs, TASKS))


async def test_a_bundle_carries_frames_of_several_executions_and_of_one_without_a_plan(
    pair: Pair,
) -> None:
    first, second = pair.plan(0, 1, 0, 1), pair.plan(0, 1, 0, 1)
    for node in pair.nodes:
        node.engine.start(first, MANIFEST)
    stack = contextlib.ExitStack()
    for node in pair.nodes:
        stack.enter_context(node.engine.table.parties.expect(second))
    for certificate in (second, first):  # results come over either's own connection
        await pair.client.connect(certificate)
    ids = [certificate.plan.request.execution_id for certificate in (first, second)]
    xs = make_inputs(2)
    frames = [make_tensor_frame(i, CLIENT, 0, 0, x.tobytes()) for i, x in zip(ids, xs, strict=True)]
    [bundle] = seal_frames(pair.client.identity, frames)
    for link in pair.client.links:
        link.send(bundle)
    results = {}
    async with asyncio.timeout(HANG_S):
        for certificate in (None, second):
            if certificate is not None:
                for node in pair.nodes:
                    node.engine.start(certificate, MANIFEST)
            frame = await pair.client.outputs.get()
            results[frame.execution_id] = np.frombuffer(frame.payload, np.float32)
    stack.close()
    for execution_id, x in zip(ids, xs, strict=True):
        assert np.array_equal(results[execution_id], compute_reference([x], TASKS)[0])


async def start_mallory(node: TestNode) -> tuple[TestClient, PlanCertificate]:
    """A client with an execution of its own, as others are not let in."""
    mallory = TestClient()
    own = make_certificate(
        MANIFEST,
        [node.entry] * TASKS,
        mallory.identity.signing_key_hex,
        steps=1,
        tag=secrets.token_hex(8),
    )
    node.engine.start(own, MANIFEST)
    await mallory.connect(own)
    return mallory, own


async def test_a_bundle_counts_only_for_its_signer(pair: Pair) -> None:
    certificate = pair.plan(0, 0, 0, 0)
    node = pair.nodes[0]
    node.engine.start(certificate, MANIFEST)
    mallory, own = await start_mallory(node)
    x = np.ones(SIZE, np.float32).tobytes()
    ids = [plan.plan.request.execution_id for plan in (own, certificate)]
    frames = [make_tensor_frame(i, CLIENT, 0, 0, x) for i in ids]
    [bundle] = seal_frames(mallory.identity, frames)
    [link] = mallory.links
    link.send(bundle)
    async with asyncio.timeout(HANG_S):
        assert await mallory.closed.get() is link
    assert isinstance(link.error, PeerFault)
    await mallory.pool.close()
    assert not node.engine.table.by_id[ids[1]].record.spans


async def test_forged_frames_close_the_link_and_change_nothing(pair: Pair) -> None:
    certificate = pair.plan(0, 0, 0, 0)
    node = pair.nodes[0]
    node.engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    mallory, _ = await start_mallory(node)
    [link] = mallory.links
    execution_id = certificate.plan.request.execution_id
    x = np.ones(SIZE, np.float32).tobytes()
    link.send(seal_frame(mallory.identity, make_tensor_frame(execution_id, CLIENT, 0, 0, x)))
    async with asyncio.timeout(HANG_S):
        assert await mallory.closed.get() is link
    assert isinstance(link.error, PeerFault)
    await mallory.pool.close()
    xs = make_inputs(1)
    assert np.array_equal(await pair.run(certificate, xs), compute_reference(xs, TASKS))


@pytest.mark.parametrize(
    ("task", "port", "size"),
    [(CLIENT, 1, SIZE), (CLIENT, 0, SIZE + 1), (0, 0, SIZE), (99, 0, SIZE)],
)
async def test_tensors_without_a_reader_on_this_node_are_faults(
    pair: Pair, task: int, port: int, size: int
) -> None:
    certificate = pair.plan(0, 0, 0, 0)
    pair.nodes[0].engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    execution_id = certificate.plan.request.execution_id
    frame = make_tensor_frame(execution_id, task, port, 0, bytes(4 * size))
    (link,) = pair.client.links
    link.send(seal_frame(pair.client.identity, frame))
    async with asyncio.timeout(HANG_S):
        assert await pair.client.closed.get() is link
    assert isinstance(link.error, PeerFault)


async def test_store_that_is_down_fails_the_execution_before_anything_is_committed(
    pair: Pair,
) -> None:
    certificate = pair.plan(0, 0, 0, 0)
    pair.nodes[0].engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    await pair.run(certificate, make_inputs(1))
    pair.store.down = True
    pair.client.end(certificate, 1)
    async with asyncio.timeout(HANG_S):
        failure = await pair.client.failures.get()
    assert "log cannot be stored" in failure.reason
    assert pair.nodes[0].finished.empty()


async def test_an_execution_fails_at_its_deadline_and_is_forgotten_after_the_grace_period(
    pair: Pair,
) -> None:
    certificate = pair.plan(0, 0, 0, 0)
    engine = pair.nodes[0].engine
    execution = engine.start(certificate, MANIFEST)
    engine.sweep(execution.deadline_s - 1)
    assert not execution.life.failure
    engine.sweep(execution.deadline_s + 1)
    assert "deadline" in execution.life.failure
    engine.sweep(execution.life.ended_at_s + limits.EXECUTION_GRACE_S + 1)
    assert execution.id not in engine.table.by_id and engine.table.is_known(execution.id)


async def test_a_refused_execution_is_explained_to_the_client_when_it_connects(pair: Pair) -> None:
    certificate = pair.plan(0, 0, 0, 0)
    pair.nodes[0].engine.refuse(certificate, "the node was restarted and lost its state")
    await pair.client.connect(certificate)
    async with asyncio.timeout(HANG_S):
        failure = await pair.client.failures.get()
    assert "restarted" in failure.reason
    other = TestClient(pair.client.identity)  # of the same client, for another execution
    another = pair.plan(0, 0, 0, 0)
    pair.nodes[0].engine.start(another, MANIFEST)
    await other.connect(another)
    other.probe(another)
    async with asyncio.timeout(HANG_S):
        await other.progress.get()
    assert other.failures.empty()
    await other.pool.close()


async def test_plan_with_a_task_that_is_not_loaded_is_refused(pair: Pair) -> None:
    programs = pair.nodes[0].programs
    loaded = dict(programs)
    programs.clear()
    with pytest.raises(Unavailable, match="not loaded"):
        pair.nodes[0].engine.start(pair.plan(0, 0, 0, 0), MANIFEST)
    programs.update(loaded)


async def test_a_node_stops_for_a_client_that_never_acknowledges(pair: Pair) -> None:
    """What it computes for nothing is bounded, and the rest waits."""
    certificate = pair.plan(0, 0, 0, 0, steps=100)
    pair.client.acknowledge = lambda *arguments: None  # type: ignore[method-assign]
    execution = pair.nodes[0].engine.start(certificate, MANIFEST)
    await pair.client.connect(certificate)
    xs = make_inputs(limits.INTERIM_STEPS + 6)
    results = await pair.run(certificate, xs[: limits.INTERIM_STEPS])
    assert len(results) == limits.INTERIM_STEPS
    for step in range(limits.INTERIM_STEPS, len(xs)):
        pair.client.send(certificate, step, xs[step], set(certificate.plan.executors()))
    pair.client.probe(certificate)
    async with asyncio.timeout(HANG_S):
        progress = await pair.client.progress.get()
    assert {task.steps for task in progress.tasks} == {limits.INTERIM_STEPS}
    pair.nodes[0].engine.sweep(execution.deadline_s - 1)
    async with asyncio.timeout(HANG_S):
        assert await pair.nodes[0].finished.get() is execution
    completions = execution.claims.make_completions(lambda: bytes(32))
    assert [completion.steps for completion in completions] == list(range(16, 0, -1))
    assert all(completion.end.is_count for completion in completions)
    assert execution.claims.order is not None
    assert check_order(make_order(execution.claims.order), certificate.plan) == len(xs)
    none = End(execution_id=execution.id, steps=0, inputs=())  # what else it says changes nothing
    execution.claims.end = sign_end(pair.client.identity, none)
    completions = execution.claims.make_completions(lambda: bytes(32))
    assert [completion.steps for completion in completions] == list(range(16, 0, -1))


async def test_what_was_computed_is_committed_to_though_no_end_comes(pair: Pair) -> None:
    """Shortly before the deadline; the client is told, and a late end changes nothing."""
    certificate = pair.plan(0, 1, 0, 1, steps=100)
    executions = [node.engine.start(certificate, MANIFEST) for node in pair.nodes]
    await pair.client.connect(certificate)
    await pair.run(certificate, make_inputs(39))
    pair.client.probe(certificate)
    async with asyncio.timeout(HANG_S):
        for _ in executions:
            await pair.client.progress.get()  # and they have what was sent before
    for node, execution in zip(pair.nodes, executions, strict=True):
        node.engine.sweep(execution.deadline_s - tuning.STOP_MARGIN_S - 1)
        assert not execution.life.ended_at_s, "there is time for an end"
        node.engine.sweep(execution.deadline_s - tuning.STOP_MARGIN_S + 1)
        async with asyncio.timeout(HANG_S):
            while await node.finished.get() is not execution:
                pass  # those of earlier tests end, too
    reason = (await pair.client.failures.get()).reason
    assert reason.startswith("its deadline is near") and reason.endswith("paid, are 39")
    pair.client.end(certificate, 39)
    entries = {}
    for execution in executions:
        completions = execution.claims.make_completions(lambda: bytes(32))
        assert [completion.steps for completion in completions] == [*range(39, 32, -1), 32, 16]
        assert [completion.end.is_count for completion in completions] == 7 * [True] + 2 * [False]
        assert not any(completion.end.end.final for completion in completions)
        entries |= {entry.task: entry for entry in completions[0].tasks}
    assert entries[1].inputs == entries[0].outputs
    assert entries[TASKS - 1].outputs == (pair.client.totals[executions[0].id, 38],)


async def test_a_producer_that_sends_more_steps_keeps_nobody_from_the_end(pair: Pair) -> None:
    """Nobody ordered them; they come before the client's end."""
    certificate = pair.plan(0, 0, 0, 1)
    first, second = [node.engine.start(certificate, MANIFEST) for node in pair.nodes]
    await pair.client.connect(certificate)
    await pair.run(certificate, make_inputs(2))
    tensor = np.ones(SIZE, np.float32).tobytes()
    link = next(link for link in pair.client.links if link.peer == pair.nodes[1].entry.node)
    for step in (2, 3):
        frame = make_tensor_frame(first.id, TASKS - 2, 0, step, tensor)
        link.send(seal_frame(pair.nodes[0].identity, frame))
    pair.client.end(certificate, 2)
    async with asyncio.timeout(HANG_S):
        for node, execution in zip(pair.nodes, (first, second), strict=True):
            assert await node.finished.get() is execution
    [completion] = second.claims.make_completions(lambda: bytes(32))
    assert completion.steps == 2 and completion.end.end.final
    assert first.claims.ordered == second.claims.ordered == 2
    [before] = first.claims.make_completions(lambda: bytes(32))
    assert completion.tasks[0].inputs[1:] == before.tasks[-1].outputs
    assert completion.tasks[0].outputs == (pair.client.totals[first.id, 1],)
