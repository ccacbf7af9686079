"""Takeovers of tasks between real engines with real workers, over one store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import secrets
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from splitup.core import tuning
from splitup.core.errors import BadSignature, Refused, Unavailable
from splitup.messages.base import CLIENT
from splitup.messages.completions import Takeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import LogName
from splitup.net.signed_frames import seal_frame
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.protocol.settlement.proof_of_sampling import check_completion
from splitup.storage.log_store import LogWriter
from tests.builders import HANG_S, make_stored_frame, make_tensor_frame
from tests.node.fragile_worker import RAISE
from tests.node.network import (
    Store,
    StoredLogs,
    TestClient,
    TestNode,
    compute_reference,
    make_certificate,
    make_manifest,
    read_log,
)

FRAGILE = (sys.executable, str(Path(__file__).parents[1] / "fragile_worker.py"))
pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZE, TASKS, STEPS = 4, 4, 12
MANIFEST, GRAPHS = make_manifest(SIZE, tasks=TASKS)


@dataclass
class Scene:
    """Three nodes, a client, and one execution: tasks on nodes a, b, a, b; c may take any over."""

    nodes: list[TestNode]
    store: Store
    client: TestClient
    certificate: PlanCertificate
    xs: list[np.ndarray]

    @property
    def execution_id(self) -> str:
        return self.certificate.plan.request.execution_id

    def submit(self, step: int, *extra: int) -> None:
        """Send a step's input to those that read it in the plan, and to nodes by number."""
        executors = self.certificate.plan.executors()
        nodes = {executors[0], executors[-1]} | {self.nodes[n].identity.address for n in extra}
        self.client.send(self.certificate, step, self.xs[step], nodes)

    async def receive(self, step: int) -> None:
        """Wait for a step's output and check it."""
        expected = compute_reference(self.xs[: step + 1], TASKS)[step]
        async with asyncio.timeout(HANG_S):
            while True:
                frame = await self.client.outputs.get()
                assert frame.step <= step
                if frame.step == step:
                    break
        assert frame.payload == expected.tobytes()

    async def pass_steps(self, steps: range) -> None:
        """Submit one step after the other, each when the one before has come back."""
        for step in steps:
            self.submit(step)
            await self.receive(step)


@contextlib.asynccontextmanager
async def open_nodes(root: Path, count: int) -> AsyncIterator[list[TestNode]]:
    store = Store()
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for name in "abc"[:count]:
            (root / name).mkdir()
            node = TestNode(root / name, store, FRAGILE)
            stack.push_async_callback(node.close)
            nodes.append(node)
        await asyncio.gather(*(node.start(GRAPHS) for node in nodes))
        yield nodes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[TestNode]]:
    async with open_nodes(tmp_path_factory.mktemp("takeover"), 3) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def scene(nodes: list[TestNode]) -> AsyncIterator[Scene]:
    client = TestClient()
    a, b, c = (node.entry for node in nodes)
    certificate = make_certificate(
        MANIFEST,
        [a, b, a, b],
        client.identity.signing_key_hex,
        steps=STEPS,
        tag=secrets.token_hex(8),
        fallbacks=[c, a, b],
    )
    for node in nodes:
        node.engine.start(certificate, MANIFEST)
    await client.connect(certificate)
    xs = [np.random.default_rng(step).random(SIZE, np.float32) for step in range(STEPS)]
    yield Scene(nodes, nodes[0].store, client, certificate, xs)
    await client.pool.close()
    for node in nodes:
        for queue in (node.finished, node.failed):
            while not queue.empty():
                queue.get_nowait()


async def finish(scene: Scene, *nodes: int) -> None:
    """End the execution and check what the nodes that are left commit to."""
    scene.client.end(scene.certificate, STEPS)
    covered = []
    for number in nodes:
        async with asyncio.timeout(HANG_S):
            execution = await scene.nodes[number].finished.get()
        completion = execution.claims.make_completions(lambda: bytes(32))[0]
        request = scene.certificate.plan.request.model_copy(update={"steps": STEPS})
        plan = scene.certificate.plan.model_copy(update={"request": request})
        for executors in (execution.executor_map.executors, plan.executors()):
            # the draw names who was replaced if its successor does not commit
            check_completion(completion, plan, MANIFEST, completion.root(), executors)
        covered += [entry.task for entry in completion.tasks]
        for entry in completion.tasks:
            log = await read_log(scene.store, scene.execution_id, entry.task, 0, completion.node)
            assert len(log) == STEPS
            if entry.task == TASKS - 1:
                sent = scene.client.totals[scene.execution_id, STEPS - 1]
                assert sent == entry.outputs[0], "also of steps that another node sent"
    assert sorted(covered) == list(range(TASKS))


@pytest.mark.parametrize("stored", [False, True])
async def test_f26_task_goes_on_elsewhere_with_the_same_bytes(scene: Scene, stored: bool) -> None:
    await scene.pass_steps(range(6))
    if stored:  # half of what the newcomer needs is in the store, half with its producer
        await scene.nodes[0].engine.table.by_id[scene.execution_id].record.writer.finish()
        await scene.pass_steps(range(6, 8))
    first = 8 if stored else 6
    scene.client.take_over(scene.certificate, 1, 1, first)  # from b to c
    await scene.pass_steps(range(first, STEPS))
    await finish(scene, 0, 1, 2)


async def test_f26_the_new_executor_computes_the_steps_that_were_under_way(scene: Scene) -> None:
    for step in range(4):
        scene.submit(step)
    for step in range(4):
        await scene.receive(step)
    scene.client.take_over(scene.certificate, 1, 1, 4)
    scene.client.take_over(scene.certificate, 2, 1, 4)  # its reader, to the same newcomer
    for step in range(4, STEPS):
        scene.submit(step)
    for step in range(4, STEPS):
        await scene.receive(step)
    await finish(scene, 0, 1, 2)


async def test_f26_two_takeovers_in_sequence_then_one_of_a_neighbouring_task(scene: Scene) -> None:
    await scene.pass_steps(range(4))
    scene.client.take_over(scene.certificate, 1, 1, 4)  # b to c
    await scene.pass_steps(range(4, 8))
    scene.client.take_over(scene.certificate, 1, 2, 8)  # c to a, which makes its input too
    scene.client.take_over(scene.certificate, 2, 1, 8)  # a to c, which reads what a makes now
    await scene.pass_steps(range(8, STEPS))
    await finish(scene, 0, 1, 2)


async def test_f26_a_task_that_leaves_at_once_is_not_caught_up_with(scene: Scene) -> None:
    """The newcomer has not begun to read its inputs; it reads none, and raises nothing."""
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # what earlier tests left behind is not reported here
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    try:
        await scene.pass_steps(range(4))
        scene.client.take_over(scene.certificate, 1, 1, 4)  # b to c
        scene.client.take_over(scene.certificate, 1, 2, 4)  # and c to a
        await scene.pass_steps(range(4, STEPS))
        await finish(scene, 0, 1)
        gc.collect()  # what was raised and not retrieved is reported now
    finally:
        loop.set_exception_handler(None)
    assert not failures


@dataclass
class RefusingLogs(StoredLogs):
    """Refuses reads of one producer, as the gateway does once another node has its reader."""

    task: int = 0
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, name: LogName, max_bytes: int, digest: bytes | None) -> bytes:
        if name.task == self.task:
            self.refused.set()
            raise Refused(f"the key does not read port 0 of task {self.task}", status=403)
        return await super().read(name, max_bytes, digest)


def refuse_reads(scene: Scene, node: int, task: int = 0) -> RefusingLogs:
    """Let a node read no log of a producer from now on."""
    logs = RefusingLogs(scene.store, scene.execution_id, task)
    execution = scene.nodes[node].engine.table.by_id[scene.execution_id]
    object.__setattr__(execution, "store", logs)  # it is frozen
    return logs


async def test_f26_a_gateway_that_knows_of_a_takeover_first_costs_a_node_one_task(
    scene: Scene,
) -> None:
    """The next executor shows its takeover to the gateway before the client's frame is here."""
    scene.client.take_over(scene.certificate, 2, 1, 0)  # a to c
    await scene.pass_steps(range(4))
    execution = scene.nodes[2].engine.table.by_id[scene.execution_id]
    logs = refuse_reads(scene, 2)
    scene.client.take_over(scene.certificate, 1, 1, 4)  # b to c
    async with asyncio.timeout(HANG_S):
        await logs.refused.wait()
    scene.client.take_over(scene.certificate, 1, 2, 4)  # c to a
    await scene.pass_steps(range(4, STEPS))
    assert sorted(execution.parts) == [2] and not execution.life.failure
    await finish(scene, 0, 1, 2)


async def test_f26_a_refused_input_of_a_task_that_has_left_costs_no_other_task(
    scene: Scene,
) -> None:
    execution = scene.nodes[0].engine.table.by_id[scene.execution_id]
    logs = refuse_reads(scene, 0, CLIENT)
    node = scene.nodes[0].identity.address
    scene.client.send_stored(scene.certificate, 0, scene.xs[0], {node})
    async with asyncio.timeout(HANG_S):
        await logs.refused.wait()
    scene.client.take_over(scene.certificate, 0, 1, 0)  # a to c
    for step in range(STEPS):
        scene.submit(step, 2)
        await scene.receive(step)
    assert sorted(execution.parts) == [2] and not execution.life.failure
    await finish(scene, 0, 1, 2)


async def test_f25_a_node_that_may_not_read_its_inputs_fails(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "TAKEOVER_LATE_S", 0.1)
    refuse_reads(scene, 2)
    scene.client.take_over(scene.certificate, 1, 1, 0)  # b to c
    async with asyncio.timeout(HANG_S):
        failure = await scene.client.failures.get()
    assert failure.node == scene.nodes[2].identity.address and "does not read" in failure.reason


async def test_f04_frames_of_a_replaced_node_are_ignored(
    scene: Scene,
) -> None:
    scene.submit(0)
    await scene.receive(0)
    scene.client.take_over(scene.certificate, 2, 1, 1)  # a to c
    old, reader = scene.nodes[0], scene.nodes[1]
    scene.submit(1)
    await scene.receive(1)
    assert sorted(old.engine.table.by_id[scene.execution_id].parts) == [0]
    lie = make_tensor_frame(scene.execution_id, 2, 0, 2, bytes(4 * SIZE))
    old.engine.pool.open(reader.identity.address, reader.entry.endpoint).send(
        seal_frame(old.identity, lie)
    )
    await scene.pass_steps(range(2, STEPS))
    await finish(scene, 0, 1, 2)


async def test_f25_failed_task_is_reported_and_the_next_candidate_goes_on(scene: Scene) -> None:
    scene.submit(0)
    await scene.receive(0)
    scene.xs[1] = np.array([RAISE, 0, 0, 0], np.float32)
    scene.submit(1)
    async with asyncio.timeout(HANG_S):
        failure = await scene.client.failures.get()
    assert failure.node == scene.nodes[0].identity.address and failure.step == 1
    execution = scene.nodes[0].engine.table.by_id[scene.execution_id]
    assert execution.life.failure and not execution.record.writer.get_unstored(0, 0)


async def test_nodes_report_their_progress(scene: Scene) -> None:
    scene.submit(0)
    await scene.receive(0)
    scene.client.probe(scene.certificate)
    told = {}
    async with asyncio.timeout(HANG_S):
        for _ in scene.nodes:
            progress = await scene.client.progress.get()
            told[progress.node] = [(t.task, t.steps, t.ready) for t in progress.tasks]
    a, b, c = (node.identity.address for node in scene.nodes)
    assert told == {a: [(0, 1, False), (2, 1, False)], b: [(1, 1, False), (3, 1, False)], c: []}


async def test_a_candidate_that_has_not_loaded_the_task_reports_it(scene: Scene) -> None:
    node = scene.nodes[2]
    loaded = dict(node.programs)
    node.programs.clear()
    scene.client.take_over(scene.certificate, 1, 1, 0)
    async with asyncio.timeout(HANG_S):
        failure = await scene.client.failures.get()
    node.programs.update(loaded)
    assert failure.node == node.identity.address and "not loaded" in failure.reason


async def test_what_a_fallback_may_have_to_take_over_is_in_use_until_the_deadline(
    scene: Scene,
) -> None:
    engine, ids = scene.nodes[2].engine, {task.task_id for task in MANIFEST.tasks}
    assert engine.table.list_used() == ids
    engine.sweep(scene.certificate.plan.request.deadline + 1)
    assert engine.table.list_used() == set()


async def test_s53_s61_what_was_computed_before_all_tasks_were_taken_away_is_committed_to(
    scene: Scene,
) -> None:
    """The client has its outputs, gives every task to a node that can do nothing, and is gone."""
    await scene.pass_steps(range(STEPS))
    for task in range(TASKS):
        scene.client.take_over(scene.certificate, task, 1, STEPS)  # all to c
    async with asyncio.timeout(HANG_S):
        for node in scene.nodes[:2]:
            assert not (await node.failed.get()).parts
    covered = []
    for node in scene.nodes[:2]:
        node.engine.sweep(scene.certificate.plan.request.deadline - 1)
        async with asyncio.timeout(HANG_S):
            execution = await node.finished.get()
        completion = execution.claims.make_completions(lambda: bytes(32))[0]
        assert completion.steps == STEPS and execution.claims.ordered == STEPS
        check_completion(completion, scene.certificate.plan, MANIFEST, completion.root())
        covered += [entry.task for entry in completion.tasks]
    assert sorted(covered) == list(range(TASKS))


async def test_s53_a_gateway_that_refuses_the_rest_costs_nothing_that_it_has(scene: Scene) -> None:
    """The client has shown a takeover to the gateway alone."""
    scene.submit(0)
    await scene.receive(0)
    node = scene.nodes[0]
    execution = node.engine.table.by_id[scene.execution_id]
    await execution.record.writer.finish()
    scene.submit(1)
    await scene.receive(1)
    execution.record.writer.error = Refused("the key does not run task 0", status=403)
    node.engine.sweep(scene.certificate.plan.request.deadline - 1)
    async with asyncio.timeout(HANG_S):
        while await node.failed.get() is not execution:
            pass  # executions of earlier tests, whose deadline has passed
    signed = execution.claims.find_substitute()
    assert signed is not None and signed.end.steps == 1


async def test_s53_s61_what_was_computed_before_a_failure_is_committed_to(scene: Scene) -> None:
    """Its last steps are stored then (S61)."""
    scene.submit(0)
    await scene.receive(0)
    node = scene.nodes[0]
    execution = node.engine.table.by_id[scene.execution_id]
    scene.xs[1] = np.array([RAISE, 0, 0, 0], np.float32)
    scene.submit(1)
    async with asyncio.timeout(HANG_S):
        assert await node.failed.get() is execution
    signed = execution.claims.find_substitute()
    assert signed is not None and signed.is_count and signed.end.steps == 1
    execution.claims.conclude(signed)
    (completion,) = execution.claims.make_completions(lambda: bytes(32))
    assert [entry.task for entry in completion.tasks] == [0, 2]


@pytest.mark.parametrize("fails", [False, True])
async def test_s69_who_was_replaced_behind_its_back_hears_it_from_members(
    scene: Scene, fails: bool
) -> None:
    """It runs no step of the task any more, and says for how many the client had signed."""
    scene.submit(0)
    await scene.receive(0)
    node, id_ = scene.nodes[0], scene.execution_id
    execution = node.engine.table.by_id[id_]
    if fails:
        node.engine.table.fail(id_, 0, 1, "its worker was lost")
    taken = [Takeover(execution_id=id_, task=t, candidate=1, first_step=0) for t in (0, 2)]
    signed = [sign_takeover(scene.client.identity, one) for one in taken]
    node.replaced.clear()
    with pytest.raises(BadSignature):
        node.engine.note_replaced(sign_takeover(node.identity, taken[0]))
    for one in signed * 2:  # members say it until they have an answer
        node.engine.note_replaced(one)
    assert node.replaced == signed and not execution.parts
    assert execution.claims.order is not None and execution.claims.ordered == 1
    others = scene.nodes[2]  # the successor, which is told nothing
    others.engine.note_replaced(signed[0])
    assert not others.engine.table.by_id[id_].parts
    substitute = execution.claims.find_substitute()
    assert substitute is not None and substitute.end.steps == 1


async def test_s62_no_step_is_run_that_the_client_has_not_signed_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inputs are in its log, which nobody signs; nothing would be owed for their outputs."""
    plan = scene.certificate.plan
    logs = scene.store.open(scene.certificate, MANIFEST, ExecutorMap(plan))
    writer = LogWriter(scene.execution_id, plan.request.client, logs)
    for step in range(3):
        data = scene.xs[step].tobytes()
        writer.append(CLIENT, 0, LogEntry(step, hashlib.sha256(data).digest(), len(data), data))
    await writer.finish()
    waits, sleep = asyncio.Semaphore(0), asyncio.sleep

    async def wait(delay_s: float) -> None:
        waits.release()
        await sleep(min(delay_s, 0.01))

    monkeypatch.setattr("splitup_node.execution.catch_up.asyncio.sleep", wait)
    node = scene.nodes[2]

    async def list_run() -> dict[int, int]:
        """Return the steps that c has run, once it waits for the client's word."""
        async with asyncio.timeout(HANG_S):
            while not waits.locked():
                await waits.acquire()
            await waits.acquire()
            await waits.acquire()
        return node.engine.table.queue.get_progress(scene.execution_id)

    scene.client.take_over(scene.certificate, 0, 1, 0)  # from a to c
    assert await list_run() == {0: 0}
    scene.client.send(scene.certificate, 1, scene.xs[1], {node.identity.address})
    async with asyncio.timeout(HANG_S):
        while (await list_run()) != {0: 2}:
            pass
    assert await list_run() == {0: 2}


async def test_s51_a_damaged_log_is_no_failure_of_who_reads_it(scene: Scene) -> None:
    """The task lacks its inputs until the client has replaced their producer, too."""
    scene.submit(0)
    await scene.receive(0)
    producer = scene.nodes[0]
    await producer.engine.table.by_id[scene.execution_id].record.writer.finish()
    key = next(k for k in scene.store.objects if f"{scene.execution_id[2:]}/t0000.0/" in k)
    scene.store.objects[key] = scene.store.objects[key][:-1]

    def move() -> None:
        scene.client.take_over(scene.certificate, 1, 1, 1)  # b to c

    await tell_lack(scene, 2, "splitup.node.replay", move)
    scene.client.take_over(scene.certificate, 0, 1, 1)  # a to c
    scene.submit(0, 2)  # which no log has
    for step in range(1, STEPS):
        scene.submit(step, 2)
        await scene.receive(step)
    await finish(scene, 0, 1, 2)


async def test_s51_a_tensor_that_is_not_stored_is_no_failure_of_who_reads_it(scene: Scene) -> None:
    producer, reader = scene.nodes[0], scene.nodes[1]
    said = make_stored_frame(scene.execution_id, 0, 0, 0, hashlib.sha256().digest(), 4 * SIZE)
    link = producer.engine.pool.open(reader.identity.address, reader.entry.endpoint)
    sealed = seal_frame(producer.identity, said)
    await tell_lack(scene, 1, "splitup.node.inbox", lambda: link.send(sealed))
    scene.client.take_over(scene.certificate, 0, 1, 0)  # a to c
    for step in range(STEPS):
        scene.submit(step, 2)
        await scene.receive(step)
    await finish(scene, 0, 1, 2)


async def tell_lack(scene: Scene, number: int, logger: str, sending: Callable[[], None]) -> None:
    """Wait until a node has tried to read an input of task 1, and says that it lacks it."""
    tried, client = asyncio.Event(), scene.client
    handler = logging.Handler()
    handler.emit = lambda record: tried.set()  # type: ignore[method-assign]
    log = logging.getLogger(logger)
    log.addHandler(handler)
    try:
        sending()
        async with asyncio.timeout(HANG_S):
            await tried.wait()
            client.probe(scene.certificate)
            node = scene.nodes[number].identity.address
            while (progress := await client.progress.get()).node != node:
                pass
    finally:
        log.removeHandler(handler)
    told = next(task for task in progress.tasks if task.task == 1)
    assert not told.steps and not told.ready and client.failures.empty()


async def test_the_least_recently_used_session_is_dropped_for_a_new_one(
    scene: Scene, nodes: list[TestNode]
) -> None:
    node = nodes[0]
    scene.submit(0)
    await scene.receive(0)
    held = node.engine.table.by_id[scene.execution_id]
    other = TestClient()
    certificate = make_certificate(
        MANIFEST, [node.entry] * TASKS, other.identity.signing_key_hex, steps=2, tag="other"
    )
    node.state_limit_bytes = 8 * SIZE * (TASKS - 1)  # the newcomer's states alone
    try:
        held.life.used_at_s -= tuning.SESSION_SPARE_S + 1
        node.engine.start(certificate, MANIFEST)
        await other.connect(certificate)
        other.send(certificate, 0, scene.xs[0], {node.identity.address})
        async with asyncio.timeout(HANG_S):
            failure = await scene.client.failures.get()
            await other.outputs.get()
    finally:
        node.state_limit_bytes = 10**9
        await other.pool.close()
    assert "make room" in failure.reason and held.life.failure


async def test_a_node_that_leaves_finishes_its_executions_or_fails_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LEAVE_S", 0.3)
    async with open_nodes(tmp_path, 1) as (node,):
        client = TestClient()
        key, x = client.identity.signing_key_hex, np.ones(SIZE, np.float32)
        ending, lasting = (
            make_certificate(MANIFEST, [node.entry] * TASKS, key, steps=2, tag=tag)
            for tag in ("ending", "lasting")
        )
        for certificate in (ending, lasting):
            node.engine.start(certificate, MANIFEST)
            await client.connect(certificate)
            client.send(certificate, 0, x, {node.identity.address})
            async with asyncio.timeout(HANG_S):
                await client.outputs.get()
        leaving = asyncio.create_task(node.engine.leave())
        client.end(ending, 1)
        async with asyncio.timeout(HANG_S):
            assert (await node.finished.get()).id == ending.plan.request.execution_id
            failure = await client.failures.get()
            await leaving
        assert "leaving" in failure.reason
        late = make_certificate(MANIFEST, [node.entry] * TASKS, key, steps=2, tag="late")
        with pytest.raises(Unavailable, match="leaving"):
            node.engine.start(late, MANIFEST)
        await client.pool.close()


async def test_an_idle_session_is_dropped_with_a_reason(scene: Scene) -> None:
    scene.submit(0)
    await scene.receive(0)
    scene.nodes[0].engine.sweep(time.time() + tuning.SESSION_IDLE_S / 10)
    assert scene.client.failures.empty()
    execution = scene.nodes[0].engine.table.by_id[scene.execution_id]
    execution.life.used_at_s -= tuning.SESSION_IDLE_S
    scene.nodes[0].engine.sweep(time.time() + 1)
    async with asyncio.timeout(HANG_S):
        failure = await scene.client.failures.get()
    assert "idle" in failure.reason


async def test_the_node_that_cannot_connect_fails_and_not_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node a refuses loopback addresses, so that its reader b gets nothing."""
    monkeypatch.setattr(tuning, "UNREACHED_S", 0.2)
    async with open_nodes(tmp_path, 2) as (a, b):
        a.engine.pool._allow_loopback = False
        client = TestClient()
        try:
            certificate = make_certificate(
                MANIFEST,
                [a.entry, b.entry, b.entry, b.entry],
                client.identity.signing_key_hex,
                steps=1,
            )
            for node in (a, b):
                node.engine.start(certificate, MANIFEST)
            await client.connect(certificate)
            async with asyncio.timeout(HANG_S):
                failure = await client.failures.get()
                assert (await a.failed.get()).id == certificate.plan.request.execution_id
        finally:
            await client.pool.close()
    assert (failure.node, failure.task) == (a.identity.address, 0)
    assert f"cannot connect to node {b.identity.address}" in failure.reason
    assert "set allow_loopback" in failure.reason
    assert b.failed.empty()
