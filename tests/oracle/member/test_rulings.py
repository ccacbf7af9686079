"""A member's recomputation over real storage: what it finds, and what nobody stored."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio
from splitup_oracle.member import recomputation
from splitup_oracle.member.rulings import Rulings

from splitup.core import tuning
from splitup.crypto.keys import Identity
from splitup.graph.compare import Tolerance
from splitup.graph.ir import Graph
from splitup.graph.manifest import Manifest, get_task_key
from splitup.messages.completions import EMPTY_DIGEST, TaskCommitment
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import UploadObject
from splitup.messages.verification import Ruling, VerificationOrder
from splitup.net.http import SignedClient
from splitup.protocol.committee.commands import RecomputeTask
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.planning.validators import open_snapshot
from splitup.protocol.settlement.proof_of_sampling import get_sampled_tasks
from splitup.storage.log_store import LogWriter, open_logs
from tests.node.network import make_manifest
from tests.oracle.gateway_network import Network, run_network

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZE, STEPS, TASK = 4, 3, 1  # an accumulator that reads another one
TOLERANCE = Tolerance(
    dtype="float32", relative_l2_ppb=1000, exponent_ppb=None, mantissa_ppb=None, max_ulp=None
)
DATA = np.random.default_rng(5).random((STEPS, SIZE), np.float32)
RIGHT = np.cumsum(DATA, axis=0, dtype=np.float32)


def make_tolerant(manifest: Manifest) -> Manifest:
    tasks = tuple(t.model_copy(update={"tolerances": (TOLERANCE,)}) for t in manifest.tasks)
    return manifest.model_copy(update={"tasks": tasks})


MANIFEST, GRAPHS = make_manifest(SIZE)
TOLERANT = make_tolerant(MANIFEST)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def digest_steps(steps: np.ndarray) -> str:
    total = bytes(32)
    for step in steps:
        total = hashlib.sha256(total + bytes.fromhex(digest(step))).digest()
    return total.hex()


@dataclass(frozen=True)
class Court:
    """A network whose store holds the model, and one member's recomputation."""

    network: Network
    rulings: Rulings

    def order(self, manifest: Manifest) -> VerificationOrder:
        """An order for the task, of an execution of its own."""
        network = self.network
        snapshot = network.make_snapshot(manifest)
        request = network.make_request(manifest, snapshot, steps=STEPS)
        chosen = {task: network.nodes[task].address for task in range(3)}
        certificate = network.committee.certify(request, snapshot, manifest, restrict=chosen)
        draws = (network.committee.draw(certificate.plan, nonce) for nonce in range(1000))
        draw = next(d for d in draws if TASK in get_sampled_tasks(d, 3, 800))
        shown = open_snapshot(snapshot, [chosen[TASK]])
        return VerificationOrder(certificate=certificate, draw=draw, snapshot=shown, task=TASK)

    async def write(self, certificate: PlanCertificate, task: int, tensors: np.ndarray) -> None:
        """Write the log of a task's output, as its executor."""
        node = self.network.nodes[task]
        async with SignedClient(node) as http, self.network.open(node) as gateway:
            executor_map = ExecutorMap(certificate.plan)
            store = open_logs(
                gateway, lambda: http.session, certificate, executor_map, has_large_tensors=False
            )
            execution_id = certificate.plan.request.execution_id
            writer = LogWriter(execution_id, node.address, store)
            for step, row in enumerate(tensors):
                data = row.tobytes()
                writer.append(
                    task, 0, LogEntry(step, hashlib.sha256(data).digest(), len(data), data)
                )
            await writer.finish()
            await writer.close()

    async def rule(
        self, order: VerificationOrder, manifest: Manifest, determinism: str, claimed: np.ndarray
    ) -> Ruling:
        claim = TaskCommitment(
            task=TASK,
            inputs=(digest_steps(DATA),),
            outputs=(digest_steps(claimed),),
            state="ab" * 32,
        )
        return await self.rulings.recompute(RecomputeTask(order, determinism, claim), manifest)


async def store_model(
    network: Network, manifests: Sequence[Manifest], graphs: dict[str, Graph]
) -> None:
    for manifest in manifests:
        await network.store_manifest(manifest)
    async with network.open(network.client) as gateway:
        for task_id, graph in graphs.items():
            data = graph.to_bytes()
            entry = UploadObject(key=get_task_key(task_id), length_bytes=len(data), sha256=task_id)
            for grant in (await gateway.upload_grants([entry])).grants:
                await gateway.upload_object(grant, lambda data=data: iter([data]), lambda _: None)  # type: ignore[misc]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def court(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Court]:
    root = tmp_path_factory.mktemp("rulings")
    async with run_network(root) as network:
        await store_model(network, [MANIFEST, TOLERANT], GRAPHS)
        member: Identity = network.committee.members[0]
        async with SignedClient(member) as http, network.open(member) as gateway:
            yield Court(network, Rulings(http, gateway, root / "replays"))


async def test_in_the_executors_class_a_member_gets_its_bytes(court: Court) -> None:
    order = court.order(MANIFEST)
    await court.write(order.certificate, 0, DATA)
    determinism = await recomputation.find_class("")
    ruling = await court.rule(order, MANIFEST, determinism, RIGHT)
    assert (ruling.inputs, ruling.outputs) == ((digest_steps(DATA),), (digest_steps(RIGHT),))
    assert ruling.state == digest(RIGHT[-1]) and not ruling.compared and not ruling.error
    ruling = await court.rule(order, MANIFEST, "another/GPU", RIGHT)
    assert "this machine computes as" in ruling.error, "it has no tolerance"


@pytest.mark.parametrize("steps", [0, STEPS - 1])
async def test_outputs_that_are_not_in_the_store_are_missed_by_name(
    court: Court, steps: int
) -> None:
    order = court.order(MANIFEST)
    await court.write(order.certificate, 0, DATA[:steps])
    ruling = await court.rule(order, MANIFEST, "any", RIGHT)
    empty = {"inputs": (), "outputs": (), "state": EMPTY_DIGEST, "error": ""}
    assert ruling == Ruling(task=TASK, missing=(0,), **empty)  # type: ignore[arg-type]


async def test_across_classes_a_member_compares_what_the_executor_stored(court: Court) -> None:
    near, far = RIGHT * np.float32(1 + 5e-7), RIGHT * np.float32(1 + 5e-6)
    for claimed, stored, expected in (
        (near, near, (digest_steps(near),)),
        (far, far, ()),
        (near, RIGHT, None),  # it commits to others than it stores
        (near, RIGHT[:0], None),
    ):
        order = court.order(TOLERANT)
        await court.write(order.certificate, 0, DATA)
        await court.write(order.certificate, TASK, stored)
        ruling = await court.rule(order, TOLERANT, "another/GPU", claimed)
        if expected is None:
            assert ruling.missing == (TASK,)
        else:
            assert ruling.compared and ruling.outputs == expected
            assert (ruling.inputs, ruling.state) == ((digest_steps(DATA),), "ab" * 32)


async def test_s14_in_the_executors_class_a_member_says_whether_a_difference_is_close(
    court: Court,
) -> None:
    near, far = RIGHT * np.float32(1 + 5e-7), RIGHT * np.float32(1 + 5e-6)
    determinism = await recomputation.find_class("")
    for claimed, stored, close in (
        (near, near, True),
        (far, far, False),
        (near, RIGHT[:0], False),  # nothing is stored that could be compared
    ):
        order = court.order(TOLERANT)
        await court.write(order.certificate, 0, DATA)
        await court.write(order.certificate, TASK, stored)
        ruling = await court.rule(order, TOLERANT, determinism, claimed)
        assert (ruling.outputs, ruling.close) == ((digest_steps(RIGHT),), close)
        assert not ruling.missing and not ruling.compared


async def test_the_clients_inputs_are_nobodys_fault(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LOG_LATE_S", 0.0)
    order = court.order(MANIFEST)
    draws = (court.network.committee.draw(order.certificate.plan, n) for n in range(1000))
    draw = next(d for d in draws if 0 in get_sampled_tasks(d, 3, 800))
    first = order.model_copy(update={"draw": draw, "task": 0})
    ruling = await court.rule(first, MANIFEST, "any", RIGHT)
    assert "the log of the client ends before step" in ruling.error and not ruling.missing
