from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sys
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from splitup_node import node as node_module
from splitup_node.config import NodeConfig
from splitup_node.daemon import run_node
from splitup_node.status_file import read_status
from splitup_node.tasks.loaded_tasks import LoadedTasks

from splitup.core import tuning
from splitup.core.errors import ConfigurationError, Refused, Unavailable
from splitup.crypto.keys import Identity
from splitup.devnet.processes import find_program
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.completions import Completion
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Progress
from splitup.messages.verification import VerificationOrder, VerificationResult
from splitup.net.http import SignedClient
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.planning.selection import rank_validators
from splitup.protocol.planning.validators import open_snapshot
from splitup.protocol.settlement.proof_of_sampling import check_completion, is_sampled
from splitup.storage.journal import Journal
from splitup.storage.log_store import LogWriter, open_logs
from tests.builders import HANG_S, wait_open
from tests.chain.proxy import Proxy
from tests.node.market import NodeMarket, RunningNode, open_market
from tests.node.network import TestClient, compute_reference, make_manifest
from tests.oracle.gateway_network import run_network

pytestmark = pytest.mark.asyncio(loop_scope="module")
TASKS, SIZE, STEPS = 4, 8, 3
NODE = (str(find_program("splitup-node")), "run")
SKEWED = (sys.executable, str(Path(__file__).with_name("skewed_node.py")))
LIAR = (sys.executable, str(Path(__file__).with_name("lying_worker.py")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def market(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeMarket]:
    root = tmp_path_factory.mktemp("market")
    manifest, graphs = make_manifest(SIZE, tasks=TASKS)
    async with run_network(root) as network, open_market(network, root, manifest, graphs) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(market: NodeMarket) -> AsyncIterator[list[RunningNode]]:
    """Two honest nodes and a dishonest one."""
    configs = [market.make_config(f"node-{index}", index) for index in range(3)]
    running = []
    async with contextlib.AsyncExitStack() as stack:
        for index, config in enumerate(configs):
            await market.stake(config)
            argv = (LIAR,) if index == 2 else ()
            node = await market.run(config, *argv)
            stack.push_async_callback(node.shut_down)
            running.append(node)
        await market.take_snapshot(running)
        yield running


async def execute(
    market: NodeMarket, certificate: PlanCertificate, steps: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Drive an execution as a client does; return inputs and outputs."""
    client = TestClient(market.client_identity)
    executors = certificate.plan.executors()
    await client.connect(certificate)
    xs = [np.random.default_rng(step).random(SIZE, np.float32) for step in range(steps)]
    results = []
    for step, x in enumerate(xs):
        client.send(certificate, step, x, {executors[0], executors[-1]})
        async with asyncio.timeout(HANG_S):
            frame = await client.outputs.get()
        assert frame.step == step
        results.append(np.frombuffer(frame.payload, np.float32))
    client.end(certificate, steps)
    for _ in set(executors):
        async with asyncio.timeout(HANG_S):
            await client.traces.get()
    await client.pool.close()
    await store_inputs(market, certificate, xs)
    return xs, results


async def store_inputs(
    market: NodeMarket, certificate: PlanCertificate, xs: list[np.ndarray]
) -> None:
    request = certificate.plan.request
    async with market.network.open(market.client_identity) as gateway, SignedClient() as http:
        store = open_logs(
            gateway,
            lambda: http.session,
            certificate,
            ExecutorMap(certificate.plan),
            has_large_tensors=False,
        )
        writer = LogWriter(request.execution_id, request.client, store)
        for step, x in enumerate(xs):
            data = x.tobytes()
            entry = LogEntry(step, hashlib.sha256(data).digest(), len(data), data)
            writer.append(CLIENT, 0, entry)
        await writer.finish()


async def wait_for_completions(
    market: NodeMarket, certificate: PlanCertificate
) -> dict[str, Completion]:
    execution_id = certificate.plan.request.execution_id
    executors = set(certificate.plan.executors())

    def have_all() -> bool:
        return all((execution_id, node) in market.members.completions for node in executors)

    await market.commit(certificate)
    await market.members.wait_for(have_all)
    return {node: market.members.completions[execution_id, node] for node in executors}


async def verify(
    market: NodeMarket,
    certificate: PlanCertificate,
    task: int,
    steps: int,
    nodes: list[RunningNode],
) -> VerificationResult:
    """Order the verification of a task with a draw that picks it."""
    assert market.snapshot is not None
    plan = certificate.plan
    nonce = 0
    while True:
        draw = market.network.committee.draw(plan, nonce, steps)
        if is_sampled(draw.seed, task, 800):
            break
        nonce += 1
    first = rank_validators(draw.seed, task, plan, market.snapshot, market.manifest)[0]
    shown = open_snapshot(market.snapshot, (plan.executors()[task], first))
    order = VerificationOrder(certificate=certificate, draw=draw, snapshot=shown, task=task)
    endpoint = next(node.endpoint for node in nodes if node.identity.address == first)
    async with SignedClient() as http:
        await http.post_json(api.VERIFICATION_ORDER.url(endpoint), order)
    async with asyncio.timeout(HANG_S):
        result = await market.members.results.get()
    assert result.validator == first
    return result


async def test_execution_is_computed_committed_revealed_and_verified(
    market: NodeMarket, nodes: list[RunningNode]
) -> None:
    executors = [nodes[0], nodes[1], nodes[0], nodes[1]]
    certificate = await market.order(executors, steps=5, nonce=1)
    await market.notify(certificate)
    xs, results = await execute(market, certificate, STEPS)
    for output, expected in zip(results, compute_reference(xs, TASKS), strict=True):
        assert np.array_equal(output, expected)

    completions = await wait_for_completions(market, certificate)
    execution_id = certificate.plan.request.execution_id
    for node, completion in completions.items():
        check_completion(completion, certificate.plan, market.manifest, completion.root())
        assert market.members.commitments[execution_id, node].root == completion.root()

    entries = {e.task: e for c in completions.values() for e in c.tasks}
    result = await verify(market, certificate, 1, STEPS, nodes)
    assert result.error == ""
    assert result.inputs == entries[1].inputs
    assert (result.outputs == entries[1].outputs) == (result.validator != nodes[2].identity.address)


async def test_wrong_outputs_are_found_by_recomputing(
    market: NodeMarket, nodes: list[RunningNode]
) -> None:
    liar = nodes[2]
    certificate = await market.order([nodes[0], liar, nodes[0], nodes[0]], steps=STEPS, nonce=2)
    await market.notify(certificate)
    xs, results = await execute(market, certificate, STEPS)
    assert not np.array_equal(results[0], compute_reference(xs, TASKS)[0])
    completions = await wait_for_completions(market, certificate)
    (claimed,) = completions[liar.identity.address].tasks
    result = await verify(market, certificate, 1, STEPS, nodes)
    assert result.error == ""
    assert result.inputs == claimed.inputs
    assert result.outputs != claimed.outputs


async def test_f05_second_daemon_on_the_same_directory_refuses_to_start(
    nodes: list[RunningNode],
) -> None:
    with pytest.raises(ConfigurationError, match="in use by process"):
        await run_node(nodes[0].config)


async def test_completion_that_was_journalled_is_committed_after_a_restart(
    market: NodeMarket, nodes: list[RunningNode]
) -> None:
    node = nodes[0]
    certificate = await market.order([node] * TASKS, steps=STEPS, nonce=3, accept=False)
    execution_id = certificate.plan.request.execution_id
    await market.notify(certificate)
    await execute(market, certificate, STEPS)
    await node.shut_down()  # while its commitment waits for the plan's own transaction
    cached = {path: path.stat().st_mtime_ns for path in node.config.data_dir.glob("cache/*")}
    assert cached
    with Journal.open(node.config.data_dir) as journal:
        stored = journal.get("completion", execution_id)
    assert stored is not None
    assert (execution_id, node.identity.address) not in market.members.completions
    await market.accept(certificate)
    restarted = await market.run(node.config)
    node.stop, node.task = restarted.stop, restarted.task
    (completion,) = (await wait_for_completions(market, certificate)).values()
    assert completion == Completion.from_value(stored["completion"])
    committed = market.members.commitments[execution_id, node.identity.address]
    assert committed.root == completion.root()
    entry = await market.client.call("nodes", "nodeOf", node.identity.address)
    assert entry["endpoint"] == node.endpoint  # another port than before
    assert all(path.stat().st_mtime_ns == at for path, at in cached.items())  # nothing fetched


@contextlib.asynccontextmanager
async def run_process(
    market: NodeMarket, config: NodeConfig, crash_at: str = "", program: Sequence[str] = NODE
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a node as a process of its own that may die at a crash point."""
    identity = config.load_identity()
    market.members.heartbeats.pop(identity.address, None)
    process = await asyncio.create_subprocess_exec(
        *(*program, "--config", config.data_dir.parent / "node.toml"),
        env={**os.environ, "CRASH_AT": crash_at},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    wanted = {entry.task_id for entry in market.manifest.tasks}

    def is_ready() -> bool:
        beat = market.members.heartbeats.get(identity.address)
        return beat is not None and set(beat.resident) == wanted

    try:
        await market.members.wait_for(is_ready)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@dataclass
class Crashing:
    """A node in processes of its own, one after the other."""

    config: NodeConfig
    identity: Identity

    @property
    def endpoint(self) -> str:
        return str(read_status(self.config.data_dir).values["endpoint"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crashing(market: NodeMarket, nodes: list[RunningNode]) -> Crashing:
    config = market.make_config("crashing", len(nodes))
    await market.stake(config)
    return Crashing(config, config.load_identity())


async def wait_for_death(process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(HANG_S):
        assert await process.wait() == -signal.SIGKILL


async def test_f01_f02_a_killed_node_reports_once_after_its_restart(
    market: NodeMarket, nodes: list[RunningNode], crashing: Crashing
) -> None:
    """It is killed in a task, and then between its log and its report; at last it is stopped."""
    async with run_process(market, crashing.config, "run:5") as process:
        await market.take_snapshot([*nodes, crashing])  # type: ignore[list-item]
        certificate = await market.order([crashing] * TASKS, steps=STEPS, nonce=4)  # type: ignore[list-item]
        await market.notify(certificate)
        client = TestClient(market.client_identity)
        await client.connect(certificate)
        for step in range(2):
            x = np.ones(SIZE, np.float32)
            client.send(certificate, step, x, {crashing.identity.address})
        await wait_for_death(process)
        await client.pool.close()
    async with run_process(market, crashing.config, "logged") as process:
        await check_failure_is_reported(market, crashing, certificate)
        await market.take_snapshot([*nodes, crashing])  # type: ignore[list-item]
        executors = [crashing, nodes[0], crashing, nodes[0]]
        certificate = await market.order(executors, steps=STEPS, nonce=7)  # type: ignore[arg-type]
        await market.notify(certificate)
        await execute(market, certificate, STEPS)
        await wait_for_death(process)
    execution_id = certificate.plan.request.execution_id
    assert (execution_id, crashing.identity.address) not in market.members.completions
    async with run_process(market, crashing.config) as process:
        completions = await wait_for_completions(market, certificate)
        await check_stop_waits_for_executions(market, nodes, crashing, process)
    entries = {e.task: e for c in completions.values() for e in c.tasks}
    for task in range(1, TASKS - 1):
        assert entries[task].inputs == entries[task - 1].outputs
    completion = completions[crashing.identity.address]
    check_completion(completion, certificate.plan, market.manifest, completion.root())
    committed = market.members.commitments[execution_id, crashing.identity.address]
    assert committed.root == completion.root()


async def check_failure_is_reported(
    market: NodeMarket, crashing: Crashing, certificate: PlanCertificate
) -> None:
    client = TestClient(market.client_identity)
    execution_id = certificate.plan.request.execution_id
    link = client.pool.open(crashing.identity.address, crashing.endpoint, execution_id)
    await wait_open(link, HANG_S)
    async with asyncio.timeout(HANG_S):
        failure = await client.failures.get()
    assert "restarted" in failure.reason and failure.node == crashing.identity.address
    await client.pool.close()
    async with SignedClient() as http:
        with pytest.raises(Refused, match="over on this node"):
            await http.post_json(api.PLAN_CERTIFICATE.url(crashing.endpoint), certificate)


async def check_stop_waits_for_executions(
    market: NodeMarket,
    nodes: list[RunningNode],
    crashing: Crashing,
    process: asyncio.subprocess.Process,
) -> None:
    await market.take_snapshot([*nodes, crashing])  # type: ignore[list-item]
    certificate = await market.order([crashing] * TASKS, steps=STEPS, nonce=8)  # type: ignore[list-item]
    await market.notify(certificate)
    client = TestClient(market.client_identity)
    await client.connect(certificate)
    x = np.ones(SIZE, np.float32)
    for step in range(2):
        client.send(certificate, step, x, {crashing.identity.address})
        async with asyncio.timeout(HANG_S):
            await client.outputs.get()
        if step == 0:
            process.terminate()  # with steps to come
    client.end(certificate, 2)
    async with asyncio.timeout(HANG_S):
        await client.traces.get()
        assert await process.wait() == 0
    assert client.failures.empty()
    await client.pool.close()
    with Journal.open(crashing.config.data_dir) as journal:  # reported by now, or next time
        assert journal.get("completion", certificate.plan.request.execution_id) is not None


async def wait_for_warnings(config: NodeConfig, condition: Callable[[str], bool]) -> None:
    """Poll the status of another process."""
    async with asyncio.timeout(HANG_S):
        while True:
            said = " ".join(read_status(config.data_dir).values.get("warnings", ["no status"]))
            if condition(said):
                return
            await asyncio.sleep(0.05)


async def test_f24_a_wrong_clock_is_reported_until_it_is_corrected(
    market: NodeMarket, crashing: Crashing
) -> None:
    address = crashing.identity.address
    async with run_process(market, crashing.config, program=SKEWED) as process:
        for number, words in ((signal.SIGUSR1, "s ahead of"), (signal.SIGUSR2, "s behind")):
            process.send_signal(number)
            await wait_for_warnings(
                crashing.config, lambda said, words=words: f"{words} the chain" in said
            )
        await wait_for_warnings(crashing.config, lambda said: "s old by our clock" in said)
        market.members.heartbeats.pop(address, None)
        process.send_signal(signal.SIGHUP)
        await market.members.wait_for(lambda: address in market.members.heartbeats)
        await wait_for_warnings(crashing.config, lambda said: not said)


async def test_f12_node_computes_without_the_chain_and_reports_when_it_is_back(
    market: NodeMarket, nodes: list[RunningNode]
) -> None:
    proxy = await Proxy.open(0, int(market.network.rpc_url.rpartition(":")[2]))
    node = nodes[0]
    await node.shut_down()
    rpc_url = f"http://127.0.0.1:{proxy.port}"
    behind = await market.run(node.config.model_copy(update={"rpc_url": rpc_url}))
    await market.take_snapshot([behind, *nodes[1:]])
    certificate = await market.order([behind] * TASKS, steps=STEPS, nonce=10)
    await proxy.close()
    await market.notify(certificate)  # the plan needs no chain, and neither do steps and logs
    xs, results = await execute(market, certificate, STEPS)
    for result, expected in zip(results, compute_reference(xs, TASKS), strict=True):
        assert np.array_equal(result, expected)
    execution_id = certificate.plan.request.execution_id
    assert (execution_id, node.identity.address) not in market.members.completions
    proxy = await Proxy.open(proxy.port, proxy.target)
    await wait_for_completions(market, certificate)
    await behind.shut_down()
    await proxy.close()
    restarted = await market.run(node.config)
    node.stop, node.task = restarted.stop, restarted.task


async def test_a_node_that_loads_for_a_plan_tells_its_client_so_and_then_runs_it(
    market: NodeMarket, nodes: list[RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PLAN_ANSWER_S", 0.05)
    use, may_load = LoadedTasks.use, asyncio.Event()

    @contextlib.asynccontextmanager
    async def use_late(self: LoadedTasks, model_id: str, index: int) -> AsyncIterator[int]:
        await may_load.wait()
        async with use(self, model_id, index) as program:
            yield program

    monkeypatch.setattr(LoadedTasks, "use", use_late)
    await market.take_snapshot(nodes)
    certificate = await market.order([nodes[0]] * TASKS, steps=STEPS, nonce=19)
    await market.notify(certificate)  # is answered although nothing is loaded
    client = TestClient(market.client_identity)
    await client.connect(certificate)
    x, node = np.ones(SIZE, np.float32), nodes[0].identity.address
    client.send(certificate, 0, x, {node})

    async def ask() -> Progress:
        client.probe(certificate)
        while (progress := await client.progress.get()).node != node:
            pass  # from a node that may take tasks over
        return progress

    async with asyncio.timeout(HANG_S):
        progress = await ask()
        assert progress.is_loading and progress.tasks == ()
        may_load.set()
        frame = await client.outputs.get()
        assert not (await ask()).is_loading
    assert frame.payload == compute_reference([x], TASKS)[0].tobytes()
    await client.pool.close()


async def test_f23_node_on_a_full_disk_takes_no_work_and_says_why(
    market: NodeMarket,
    nodes: list[RunningNode],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = nodes[1]
    everybody = [one.identity.address for one in nodes]  # all share this process's disk
    beats = market.members.heartbeats
    await market.take_snapshot(nodes)
    refused, failed = [
        await market.order([node] * TASKS, steps=STEPS, nonce=nonce) for nonce in (11, 12)
    ]
    usage = namedtuple("usage", "total used free")

    tried = asyncio.Event()

    def fail_to_write(*_: object) -> None:
        tried.set()
        raise Unavailable("no status can be written")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 4096))
        await market.members.wait_for(lambda: not any(beats[one].resident for one in everybody))
        patch.setattr(node_module, "write_status", fail_to_write)
        async with asyncio.timeout(HANG_S):
            await tried.wait()
        async with SignedClient() as http:
            with pytest.raises(Unavailable, match=r"less than 16 MiB left.*more free space"):
                await http.post_json(api.PLAN_CERTIFICATE.url(node.endpoint), refused)
    assert "no status" not in caplog.text  # which would be said every second
    await market.members.wait_for(lambda: all(beats[one].resident for one in everybody))

    put = Journal.put

    def fail(self: Journal, kind: str, key: str, value: dict[str, object]) -> None:
        if kind == "assignment" and key == failed.plan.request.execution_id:
            raise Unavailable("the disk is full; free some space, then try again")
        put(self, kind, key, value)

    monkeypatch.setattr(Journal, "put", fail)  # it fills up between two looks
    client = TestClient(market.client_identity)
    await market.notify(failed)
    await client.connect(failed)
    async with asyncio.timeout(HANG_S):
        failure = await client.failures.get()
    assert "journal cannot be written: the disk is full" in failure.reason
    await client.pool.close()


async def test_forged_plans_are_refused(market: NodeMarket, nodes: list[RunningNode]) -> None:
    await market.take_snapshot(nodes)
    certificate = await market.order([nodes[0]] * TASKS, steps=STEPS, nonce=5)
    plan = certificate.plan
    tampered = plan.model_copy(update={"tasks": ((nodes[1].identity.address,),) * TASKS})
    forged = certificate.model_copy(update={"plan": tampered})
    async with SignedClient() as http:
        for node, bad in ((nodes[1], forged), (nodes[0], _drop_signature(certificate))):
            with pytest.raises(Refused) as caught:
                await http.post_json(api.PLAN_CERTIFICATE.url(node.endpoint), bad)
            assert caught.value.status in (400, 401)


async def test_verification_orders_that_contradict_their_draw_are_refused(
    market: NodeMarket, nodes: list[RunningNode]
) -> None:
    assert market.snapshot is not None
    certificate = await market.order([nodes[0]] * TASKS, steps=STEPS, nonce=6)
    nonce = 0
    while is_sampled((draw := market.network.committee.draw(certificate.plan, nonce)).seed, 1, 800):
        nonce += 1
    shown = open_snapshot(market.snapshot, [nodes[n].identity.address for n in (0, 1)])
    order = VerificationOrder(certificate=certificate, draw=draw, snapshot=shown, task=1)
    async with SignedClient() as http:
        with pytest.raises(Refused, match="does not pick this task"):
            await http.post_json(api.VERIFICATION_ORDER.url(nodes[1].endpoint), order)


@pytest.mark.long  # in small: committee/test_reachability.py has executions between relayed nodes
async def test_a_node_that_nobody_can_connect_to_serves_through_another_nodes_relay(
    market: NodeMarket, nodes: list[RunningNode]
) -> None:
    config = market.make_config("hidden", len(nodes) + 2)
    config = config.model_copy(update={"relay": nodes[0].endpoint})
    await market.stake(config)
    hidden = await market.run(config)
    address = hidden.identity.address
    endpoint = f"{nodes[0].endpoint}/v1/relay/{address}"
    try:
        await market.members.wait_for(lambda: hidden.endpoint == endpoint)
        await market.take_snapshot([*nodes, hidden])
        executors = [nodes[0], hidden, nodes[1], hidden]  # from node to node, and to the client
        certificate = await market.order(executors, steps=5, nonce=18)
        assert certificate.plan.node_of(address).endpoint == endpoint
        await market.notify(certificate)
        xs, results = await execute(market, certificate, STEPS)
        for result, expected in zip(results, compute_reference(xs, TASKS), strict=True):
            assert np.array_equal(result, expected)
        await wait_for_completions(market, certificate)
        entry = await market.client.call("nodes", "nodeOf", address)
        assert entry["endpoint"] == endpoint
    finally:
        await hidden.shut_down()


def _drop_signature(certificate: PlanCertificate) -> PlanCertificate:
    return certificate.model_copy(update={"signatures": certificate.signatures[:2]})
