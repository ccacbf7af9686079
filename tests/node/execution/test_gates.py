"""Experts on real nodes: one that is not chosen gets only a frame of zeros, and does not run.

Layers of four experts, two of them chosen per token. The first node has everything but the
third and fourth experts, which the second has.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from splitup_node.settlement.task_replay import TaskReplay, recompute
from splitup_node.worker.ipc import RunRequest

from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import Manifest, Task, get_task_key, get_weights_key
from splitup.messages.base import CLIENT
from splitup.messages.frames import Frame, FrameKind
from splitup.messages.plans import PlanCertificate
from splitup.net.signed_frames import seal_frame
from splitup.storage.log_store import LogPatience
from tests.builders import HANG_S, make_tensor_frame
from tests.deploy.moes import MIXTRAL, QWEN3_MOE, TOKENS, save_moe
from tests.node.network import Store, TestClient, TestNode, make_certificate, read_log

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHUNK = Sizes(chunk=2)
# the other family, of twice the layers, has its experts cut in tests/deploy/frontends
FAMILIES = (pytest.param("mixtral", marks=pytest.mark.long), "qwen3_moe")
STEPS = 8
Inputs = dict[str, np.ndarray[Any, Any]]


@dataclass
class Moe:
    """A model on two nodes, and what was seen of its running."""

    directory: str
    manifest: Manifest
    nodes: list[TestNode]
    client: TestClient
    runs: Counter[str] = field(default_factory=Counter)  # of the workers, by task
    frames: list[Frame] = field(default_factory=list)  # that the second node got

    @functools.cached_property
    def whole(self) -> list[bytes]:
        """The outputs of the whole model."""
        program = load_reference(self.directory, CHUNK)
        state, inputs = program.new_state(), [make_inputs(step) for step in range(STEPS)]
        return [
            program.run(state, [row[spec.name].tobytes() for spec in program.inputs])[0]
            for row in inputs
        ]

    @property
    def experts(self) -> list[int]:
        return [i for i, task in enumerate(self.manifest.tasks) if task.gate is not None]

    def plan(self, tag: str, fallbacks: bool = False) -> PlanCertificate:
        first, second = (node.entry for node in self.nodes)
        executors = [second if is_elsewhere(task) else first for task in self.manifest.tasks]
        key = self.client.identity.signing_key_hex
        return make_certificate(
            self.manifest,
            executors,
            key,
            steps=STEPS,
            tag=tag,
            fallbacks=(first, second) if fallbacks else (),
        )

    def send(self, certificate: PlanCertificate, step: int, inputs: Inputs) -> None:
        execution_id = certificate.plan.request.execution_id
        for port, entry in enumerate(self.manifest.inputs):
            data = inputs[entry.name].tobytes()
            frame = make_tensor_frame(execution_id, CLIENT, port, step, data)
            for link in self.client.links:
                if link.peer == self.nodes[0].identity.address:
                    link.send(seal_frame(self.client.identity, frame))

    async def run(self, certificate: PlanCertificate, step: int, inputs: Inputs) -> bytes:
        self.send(certificate, step, inputs)
        async with asyncio.timeout(HANG_S):
            frame = await self.client.outputs.get()
        assert frame.step == step
        return bytes(frame.payload)


def is_elsewhere(task: Task) -> bool:
    return task.gate is not None and task.label.partition(" of")[0][-1] in "34"


def watch(moe: Moe) -> None:
    """Count what workers run, and keep what comes to the second node."""
    for node in moe.nodes:
        names = {program: task_id for task_id, program in node.programs.items()}

        def run_together(
            requests: Sequence[RunRequest],
            on_answers: Any,
            run_together: Any = node.workers.run_together,
            names: Any = names,
        ) -> None:
            for request in requests:
                moe.runs[names[request.program]] += 1
            run_together(requests, on_answers)

        node.workers.run_together = run_together  # type: ignore[method-assign]
    engine = moe.nodes[1].engine
    take = engine._inbox._take_frame

    def take_tensor(execution: Any, frame: Frame, signature: bytes) -> None:
        if frame.kind is FrameKind.TENSOR:
            moe.frames.append(frame)
        take(execution, frame, signature)

    engine._inbox._take_frame = take_tensor  # type: ignore[method-assign]


async def load(node: TestNode, compiled: CompiledModel, tasks: Sequence[Task]) -> None:
    stored = {blob.key: blob for blob in compiled.blobs}
    for task in tasks:
        graph, weights = node.directory / task.task_id, None
        graph.write_bytes(b"".join(stored[get_task_key(task.task_id)].open()))
        if task.weights_digest:
            weights = node.directory / task.weights_digest
            weights.write_bytes(b"".join(stored[get_weights_key(task.weights_digest)].open()))
        loaded = await node.workers.load(0, graph, weights)
        node.programs[task.task_id] = loaded["program"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def moe(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Moe]:
    root = tmp_path_factory.mktemp("moe")
    qwen = {**QWEN3_MOE, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    qwen |= {"mlp_only_layers": [], "moe_intermediate_size": 48}
    save_moe(root / "m", MIXTRAL if request.param == "mixtral" else qwen)
    compiled = build(str(root / "m"), 40_000, sizes=CHUNK)
    store, nodes = Store(), []
    for name in ("a", "b"):
        (root / name).mkdir()
        nodes.append(TestNode(root / name, store))
    client = TestClient()
    try:
        for node in nodes:
            await node.start({})
        await load(nodes[0], compiled, compiled.manifest.tasks)
        others = [task for task in compiled.manifest.tasks if is_elsewhere(task)]
        await load(nodes[1], compiled, others)
        moe = Moe(str(root / "m"), compiled.manifest, nodes, client)
        watch(moe)
        yield moe
    finally:
        await client.pool.close()
        for node in nodes:
            await node.close()


def make_inputs(step: int) -> Inputs:
    return make_arrays(make_causal_step([TOKENS[step]], step), 2)


async def test_experts_that_are_not_chosen_get_no_inputs_and_do_not_run(moe: Moe) -> None:
    manifest, tasks = moe.manifest, moe.manifest.tasks
    chosen = len(moe.experts) // 2
    assert chosen in (2, 4)  # of one layer, or two
    wanted = moe.whole
    certificate = moe.plan("run")
    executions = [node.engine.start(certificate, manifest) for node in moe.nodes]
    await moe.client.connect(certificate)
    for step in range(STEPS):
        moe.runs.clear()
        moe.frames.clear()
        assert await moe.run(certificate, step, make_inputs(step)) == wanted[step]
        run = [index for index in moe.experts if moe.runs[tasks[index].task_id]]
        assert len(run) == chosen and sum(moe.runs.values()) == len(tasks) - chosen
        check_frames(moe, certificate, set(run))
    moe.client.end(certificate, STEPS)
    async with asyncio.timeout(HANG_S):
        for node in moe.nodes:
            await node.finished.get()
    await check_records(moe, certificate, executions)


def check_frames(moe: Moe, certificate: PlanCertificate, run: set[int]) -> None:
    """An expert that does not run gets its gate as zeros; a shared input comes once or never."""
    tasks = moe.manifest.tasks
    seen = {(frame.task, frame.port): frame for frame in moe.frames}
    assert len(seen) == len(moe.frames)
    expected = set()
    for index in moe.experts:
        if certificate.plan.executors()[index] == moe.nodes[1].identity.address:
            sources = [(port.source.task, port.source.port) for port in tasks[index].inputs]
            gate = sources[tasks[index].gate or 0]
            expected |= set(sources) if index in run else {gate}
            assert seen[gate].zeros == (index not in run)
    assert set(seen) == expected


async def check_records(moe: Moe, certificate: PlanCertificate, executions: list[Any]) -> None:
    """A validator gets the experts' commitments from the logs, in which zeros take no space."""
    request, executors = certificate.plan.request, certificate.plan.executors()
    for index in moe.experts:
        (place,) = (p for p, n in enumerate(moe.nodes) if n.identity.address == executors[index])
        node, task = moe.nodes[place], moe.manifest.tasks[index]
        replay = TaskReplay(
            node.store.open(certificate, moe.manifest, executions[place].executor_map),
            request,
            moe.manifest,
            executors,
            index,
            STEPS,
            LogPatience(is_drawn=False),
        )
        program = node.programs[task.task_id]
        digests = await recompute(node.engine, node.workers, program, replay)
        own = executions[place].parts[index].digests
        assert (digests.inputs, digests.outputs) == (own.inputs, own.outputs)
        rows = await read_log(node.store, request.execution_id, index, 0, executors[index])
        zeros = sum(not any(row) for row in rows)
        prefix = f"executions/{request.execution_id[2:]}/t{index:04d}.0/"
        stored = sum(len(data) for key, data in node.store.objects.items() if prefix in key)
        assert [len(row) for row in rows] == [task.outputs[0].spec.row_bytes] * STEPS
        assert stored < 800 + (STEPS - zeros) * len(rows[0])


async def test_an_expert_is_taken_over(moe: Moe) -> None:
    wanted, last = moe.whole, moe.experts[-1]
    certificate = moe.plan("takeover", fallbacks=True)
    for node in moe.nodes:
        node.engine.start(certificate, moe.manifest)
    await moe.client.connect(certificate)
    for step in range(STEPS):
        if step == 4:
            moe.client.take_over(certificate, last, 1, step)
        assert await moe.run(certificate, step, make_inputs(step)) == wanted[step]
    moe.client.end(certificate, STEPS)
    async with asyncio.timeout(HANG_S):
        for node in moe.nodes:
            execution = await node.finished.get()
            assert (last in execution.parts) == (node is moe.nodes[0])
