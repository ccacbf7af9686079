"""A member's recomputation over real storage: what it finds, and what nobody stored."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections import namedtuple
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
from splitup_node.settlement.task_replay import append_output
from splitup_oracle.member.recomputation import Recomputer
from splitup_oracle.member.rulings import Rulings

from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.core import tuning
from splitup.core.errors import InvalidModel, Refused, TooSlow
from splitup.crypto.keys import Identity
from splitup.graph.ir import Graph
from splitup.graph.manifest import Manifest, get_task_key
from splitup.messages.completions import EMPTY_DIGEST, TaskCommitment
from splitup.messages.plans import PlanCertificate
from splitup.messages.snapshots import UNRULED
from splitup.messages.storage import LogName, LogWrite, UploadObject
from splitup.messages.verification import Ruling, VerificationOrder, VerificationResult
from splitup.net.http import SignedClient
from splitup.protocol.committee.commands import RecomputeTask
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.planning.validators import open_snapshot
from splitup.protocol.settlement.proof_of_sampling import get_sampled_tasks
from splitup.storage.log_store import LogPatience, LogWriter, open_logs, open_verification_logs
from tests.builders import COMMON_CLASS, FOREIGN_CLASS, KERNELS, make_tolerant
from tests.node.network import make_manifest
from tests.oracle.gateway_network import Network, run_network

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZE, STEPS, TASK = 4, 3, 1  # an accumulator that reads another one
DATA = np.random.default_rng(5).random((STEPS, SIZE), np.float32)
RIGHT = np.cumsum(DATA, axis=0, dtype=np.float32)


ABROAD = UNRULED + FOREIGN_CLASS
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
    recomputer: Recomputer
    rulings: Rulings

    def order(
        self, manifest: Manifest, determinism: str = COMMON_CLASS, validator: str = ""
    ) -> VerificationOrder:
        """An order for the task, of an execution of its own."""
        network = self.network
        snapshot = network.make_snapshot(manifest, determinism)
        request = network.make_request(manifest, snapshot, steps=STEPS)
        chosen = {task: network.nodes[task].address for task in range(3)}
        certificate = network.committee.certify(request, snapshot, manifest, restrict=chosen)
        draws = (network.committee.draw(certificate.plan, nonce) for nonce in range(1000))
        draw = next(d for d in draws if TASK in get_sampled_tasks(d, 3, 800))
        shown = open_snapshot(snapshot, [chosen[TASK], *([validator] if validator else [])])
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

    async def store(
        self, order: VerificationOrder, validator: Identity, tensors: np.ndarray
    ) -> None:
        """Write what a validator got, as the validator."""
        execution_id = order.certificate.plan.request.execution_id
        snapshot = self.network.make_snapshot(TOLERANT, ABROAD)
        shown = open_snapshot(snapshot, [order.executors[TASK], validator.address])
        order = order.model_copy(update={"snapshot": shown})
        async with SignedClient(validator) as http, self.network.open(validator) as gateway:
            store = open_verification_logs(gateway, lambda: http.session, order)
            writer = LogWriter(execution_id, validator.address, store)
            for step, row in enumerate(tensors):
                name = LogName.of(TASK, 0, validator.address, step, apart=True)
                await append_output(writer, store, name, row.tobytes())
            await writer.finish()
            await writer.close()

    async def rule(
        self, order: VerificationOrder, manifest: Manifest, determinism: str, claimed: np.ndarray
    ) -> Ruling:
        (ruling,) = await self.rule_all(order, manifest, determinism, claimed, {})
        return ruling

    async def rule_all(
        self,
        order: VerificationOrder,
        manifest: Manifest,
        determinism: str,
        claimed: np.ndarray,
        contradict: dict[str, np.ndarray],
    ) -> tuple[Ruling, ...]:
        claim = TaskCommitment(
            task=TASK,
            inputs=(digest_steps(DATA),),
            outputs=(digest_steps(claimed),),
            state="ab" * 32,
        )
        results = tuple(
            VerificationResult(
                execution_id=order.draw.execution_id,
                task=TASK,
                validator=validator,
                inputs=claim.inputs,
                outputs=(digest_steps(tensors),),
                state="cd" * 32,
                salt="0x" + "00" * 32,
                error="",
            )
            for validator, tensors in contradict.items()
        )
        command = RecomputeTask(order, determinism, claim, results)
        return await self.rulings.recompute(command, manifest)


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
            with closing(Recomputer(KernelCache(KERNELS))) as recomputer:
                rulings = Rulings(http, gateway, recomputer, root / "replays")
                yield Court(network, recomputer, rulings)


async def test_in_the_executors_class_a_member_gets_its_bytes(court: Court) -> None:
    order = court.order(MANIFEST)
    await court.write(order.certificate, 0, DATA)
    determinism = await court.recomputer.find_class("")
    ruling = await court.rule(order, MANIFEST, determinism, RIGHT)
    assert (ruling.inputs, ruling.outputs) == ((digest_steps(DATA),), (digest_steps(RIGHT),))
    assert ruling.state == digest(RIGHT[-1]) and not ruling.compared and not ruling.error
    ruling = await court.rule(order, MANIFEST, "another/GPU", RIGHT)
    assert "this machine computes as" in ruling.error, "it has no tolerance"


@pytest.mark.parametrize(
    ("error", "is_slow"),
    [(TooSlow("busy"), True), (OSError("no memory"), True), (InvalidModel("no graph"), False)],
)
async def test_a_member_that_could_not_compute_yet_says_that_and_not_that_it_cannot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    is_slow: bool,
) -> None:
    nothing = cast(Any, None)
    rulings = Rulings(nothing, nothing, nothing, tmp_path / "replays")

    async def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(rulings, "_recompute", fail)
    command = cast(Any, SimpleNamespace(order=SimpleNamespace(task=TASK)))
    (ruling,) = await rulings.recompute(command, MANIFEST)
    assert (ruling.slow, ruling.error) == (is_slow, "" if is_slow else str(error))
    said = "is not recomputed yet" if is_slow else "cannot be recomputed here"
    assert caplog.messages == [f"task {TASK} {said}: {error}"]


async def test_s77_logs_do_not_fill_the_disk_of_a_members_journal(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 KB of a log may name 4 MiB of zeros, and an execution has up to 65,536 steps."""
    order = court.order(MANIFEST)
    await court.write(order.certificate, 0, DATA)
    left = iter([2 * tuning.DISK_RESERVE_BYTES] * 2)  # for the graph, and one tensor
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(next(left, 0)))
    determinism = await court.recomputer.find_class("")
    ruling = await court.rule(order, MANIFEST, determinism, RIGHT)
    assert ruling.slow and not ruling.error and not ruling.missing
    assert not list(court.rulings._directory.iterdir())


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
        assert (ruling.compared, ruling.outputs) == (True, expected or ())
        assert ruling.missing == ((TASK,) if expected is None else ())
        assert (ruling.inputs, ruling.state) == ((digest_steps(DATA),), "ab" * 32)


async def test_validators_that_contradict_are_compared_by_what_they_stored(court: Court) -> None:
    near, far = RIGHT * np.float32(1 + 5e-7), RIGHT * np.float32(1 + 5e-6)
    right, wrong, hiding = (court.network.nodes[place] for place in (0, 2, 3))
    shown = [node.address for node in (right, wrong, hiding)]
    order = court.order(TOLERANT, ABROAD)
    await court.write(order.certificate, 0, DATA)
    await court.write(order.certificate, TASK, RIGHT)
    await court.store(order, right, near)
    await court.store(order, wrong, far)
    claims = dict.fromkeys(shown, near) | {wrong.address: far}
    rulings = await court.rule_all(order, TOLERANT, "another/GPU", RIGHT, claims)
    assert [r.validator for r in rulings] == [None, *shown]
    found = [(r.outputs, r.missing) for r in rulings]
    assert found == [
        ((digest_steps(RIGHT),), ()),
        ((digest_steps(near),), ()),
        ((), ()),
        ((), (TASK,)),
    ]
    assert all(r.compared and r.inputs == (digest_steps(DATA),) for r in rulings)


async def test_a10_only_validators_whose_numbers_are_compared_may_store_any(court: Court) -> None:
    validator, stranger = court.network.nodes[2], court.network.client
    order = court.order(TOLERANT, ABROAD, validator.address)
    right = LogWrite(task=TASK, port=0, number=0, apart=False, length_bytes=300, sha256="ab" * 32)
    cases = [
        (validator, order, right.model_copy(update={"task": 0}), "recomputes task 1, not 0"),
        (validator, order, right.model_copy(update={"length_bytes": 10**6}), "at most"),
        (validator, order, right.model_copy(update={"number": STEPS}), "has no log object"),
        (stranger, order, right, "not that of a node"),
        (court.network.nodes[TASK], order, right, "not a validator"),
        (court.network.committee.members[0], order, right, "nobody compares"),
    ]
    for manifest, determinism in ((TOLERANT, COMMON_CLASS), (MANIFEST, ABROAD)):
        other = court.order(manifest, determinism, validator.address)
        cases.append((validator, other, right, "nobody compares"))
    for who, shown, write, reason in cases:
        async with court.network.open(who) as gateway:
            with pytest.raises(Refused, match=reason):
                await gateway.verification_grants(shown, (), (write,))
    async with court.network.open(validator) as gateway:
        grants = (await gateway.verification_grants(order, (), (right,))).grants
    (put,) = [grant for grant in grants if grant.method == "PUT"]
    assert validator.address in put.key


async def test_s14_in_the_executors_class_a_member_says_whether_a_difference_is_close(
    court: Court,
) -> None:
    near, far = RIGHT * np.float32(1 + 5e-7), RIGHT * np.float32(1 + 5e-6)
    determinism = await court.recomputer.find_class("")
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


async def test_a_killed_clients_inputs_are_nobodys_fault_and_waited_for_once(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LOG_POLL_S", 0.01)
    looks = itertools.count()  # at a clock that moves by a second each time
    court.rulings._patience = LogPatience(is_drawn=True, monotonic=lambda: next(looks))
    order = court.order(MANIFEST)
    draws = (court.network.committee.draw(order.certificate.plan, n) for n in range(1000))
    draw = next(d for d in draws if 0 in get_sampled_tasks(d, 3, 800))
    first = order.model_copy(update={"draw": draw, "task": 0})
    for _ in range(3):  # as for other tasks
        ruling = await court.rule(first, MANIFEST, "any", RIGHT)
        assert "the log of the client ends before step" in ruling.error and not ruling.missing
    assert next(looks) == 1 + tuning.LOG_LATE_S + 2 * 2, "the others only look"
