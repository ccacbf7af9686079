"""A small network of real engines, workers and links, without chain or committee."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from splitup_node.execution.engine import Engine
from splitup_node.execution.kept.executions import Execution
from splitup_node.worker.supervisor import WORKER_ARGV, Supervisor
from splitup_node.worker.worker_pool import Workers

from splitup.core import limits
from splitup.core.errors import StorageUnavailable
from splitup.core.tensors import extend_steps
from splitup.crypto.keys import Identity, generate_identity
from splitup.graph.cost import compute_state_bytes, compute_vram_bytes
from splitup.graph.ir import Graph
from splitup.graph.manifest import (
    InputSource,
    Manifest,
    OutputPort,
    Port,
    Task,
    TaskInput,
    TaskSource,
)
from splitup.graph.rules import check_graph
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.completions import End, SignedTakeover, Takeover
from splitup.messages.frames import CHUNK_MAGIC, Frame, FrameKind, TensorChunk, make_delivery
from splitup.messages.plans import Plan, PlanCertificate, PlanNode, Request
from splitup.messages.progress import Progress, TaskFailure, Trace
from splitup.messages.storage import LogName
from splitup.net.http_server import Server, make_app, serve_app
from splitup.net.links import Link, LinkPool
from splitup.net.object_transfer import NotStored, get_parts
from splitup.net.signed_frames import (
    make_message_frame,
    seal_frame,
)
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.execution.log_segments import LogNameer
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.storage.log_store import LogObject, iter_log, read_tensor
from tests.builders import (
    HANG_S,
    KERNELS,
    decode_frame,
    make_stored_frame,
    make_tensor_frame,
    wait_open,
)
from tests.node.graphs import make_accumulator, make_reference, make_sum


def make_manifest(size: int = 4, *, tasks: int = 3) -> tuple[Manifest, dict[str, Graph]]:
    """Return a model of ``tasks`` tasks: accumulators in a row, then z = x + last."""
    accumulator, total = make_accumulator(size), make_sum(size)
    graphs = {_digest(graph): graph for graph in (accumulator, total)}

    def port(name: str) -> dict[str, object]:
        return {"name": name, "dtype": "float32", "shape": (size,)}

    rows = []
    for index in range(tasks):
        last = index == tasks - 1
        before = TaskSource(task=index - 1, port=0) if index else InputSource(input="x")
        inputs = [TaskInput(**port("x"), source=InputSource(input="x") if last else before)]
        if last:
            inputs.append(TaskInput(**port("y"), source=before))
        graph = total if last else accumulator
        reference = make_reference(graph)
        rows.append(
            Task(
                task_id=_digest(graph),
                label=f"part {index}",
                inputs=tuple(inputs),
                outputs=(Port(**port("z" if last else "y")),),
                graph_bytes=len(graph.to_bytes()),
                weights_digest="",
                weights_bytes=0,
                state_bytes=compute_state_bytes(graph),
                vram_bytes=compute_vram_bytes(check_graph(graph)),
                flops=size,
                price_nano_usdc=10_000,
                reference_digest=hashlib.sha256(reference).hexdigest(),
                reference_bytes=len(reference),
            )
        )
    manifest = Manifest(
        version=1,
        kind="function",
        tinygrad="0.14.0",
        inputs=(Port(**port("x")),),
        outputs=(OutputPort(**port("z"), task=tasks - 1, port=0),),
        tasks=tuple(rows),
        text=None,
    )
    return manifest, graphs


def compute_reference(xs: Sequence[np.ndarray], tasks: int) -> list[np.ndarray]:
    """Return what the model gives for every step."""
    sums = [np.zeros_like(xs[0]) for _ in range(tasks - 1)]
    results = []
    for x in xs:
        value = x
        for index in range(tasks - 1):
            value = sums[index] = value + sums[index]
        results.append(x + value)
    return results


def make_certificate(
    manifest: Manifest,
    executors: Sequence[PlanNode],
    client_key: str,
    *,
    steps: int,
    tag: str = "1",
    fallbacks: Sequence[PlanNode] = (),
) -> PlanCertificate:
    """Return a plan without signatures: task i runs on ``executors[i]``, then ``fallbacks``."""
    plan = Plan(
        request=Request(
            chain_id=31337,
            market="0x" + "22" * 20,
            execution_id="0x" + hashlib.sha256(tag.encode()).hexdigest(),
            model_id=manifest.model_id,
            client="0x" + "33" * 20,
            client_key=client_key,
            steps=steps,
            max_price_micro_usdc=10**6,
            deadline=int(time.time()) + 600,
            snapshot_sequence=1,
            snapshot_root="0x" + "44" * 32,
            block_hash="0x" + "55" * 32,
            verify_bps=800,
        ),
        seed="0x" + "66" * 32,
        tasks=tuple(
            (node.node, *(other.node for other in fallbacks if other is not node))
            for node in executors
        ),
        nodes=tuple(
            sorted({n.node: n for n in (*executors, *fallbacks)}.values(), key=lambda n: n.node)
        ),
    )
    return PlanCertificate(plan=plan, seed_signature="0x", signatures=())


@dataclass
class Store:
    """An object store in memory; ``down`` makes it fail, and without ``takes`` it waits."""

    objects: dict[str, bytes] = field(default_factory=dict)
    down: bool = False
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Queue[LogName] = field(default_factory=asyncio.Queue)  # what waits for that

    def __post_init__(self) -> None:
        self.takes.set()

    def open(
        self, certificate: PlanCertificate, manifest: Manifest, executor_map: ExecutorMap
    ) -> StoredLogs:
        return StoredLogs(self, certificate.plan.request.execution_id)


@dataclass
class StoredLogs:
    """One execution's objects in a Store."""

    store: Store
    execution_id: str

    async def write(self, objects: Sequence[LogObject], *, pause_s: float = 0.0) -> None:
        if self.store.down:
            raise StorageUnavailable("the store is down; start it")
        if not self.store.takes.is_set():
            for item in objects:
                self.store.asked.put_nowait(item.name)
            await self.store.takes.wait()
        for item in objects:
            key = item.name.get_key(self.execution_id)
            data = b"".join(get_parts(item.data))
            assert self.store.objects.setdefault(key, data) == data and len(data) == item.length

    async def read(self, name: LogName, max_bytes: int, digest: bytes | None) -> bytes:
        if self.store.down:
            raise StorageUnavailable("the store is down; start it")
        data = self.store.objects.get(name.get_key(self.execution_id))
        if data is None:
            raise NotStored(f"there is no {name}")
        assert len(data) <= max_bytes
        assert digest is None or hashlib.sha256(data).digest() == digest
        return data


async def read_log(store: Store, execution_id: str, task: int, port: int, node: str) -> list[bytes]:
    """Return a stored log, step by step."""
    reader = LogNameer(execution_id, task, port, node, lambda length: True)
    logs = StoredLogs(store, execution_id)
    return [
        bytes(await read_tensor(logs, reader.name, entry))
        async for entries in iter_log(logs, reader)
        for entry in entries
    ]


class TestNode:
    """An engine with its worker and server."""

    __test__ = False

    def __init__(
        self,
        directory: Path,
        store: Store,
        worker_argv: Sequence[str] = WORKER_ARGV,
        **options: float,
    ) -> None:
        self.identity = generate_identity()
        self.directory = directory
        self.programs: dict[str, int] = {}
        self.finished: asyncio.Queue[Execution] = asyncio.Queue()
        self.failed: asyncio.Queue[Execution] = asyncio.Queue()
        self.begun: list[str] = []
        self.replaced: list[SignedTakeover] = []
        self.store = store
        self.supervisor = Supervisor(
            directory,
            memory_bytes=10**8,
            device="CPU:X86",
            cache_directory=KERNELS,
            worker_argv=worker_argv,
            **options,
        )
        self.workers = Workers([self.supervisor])
        self.state_limit_bytes = 10**9
        self.engine = Engine(
            self.identity,
            self.workers,
            self.programs,
            store.open,
            self,
            allow_loopback=True,
            get_state_limit=lambda: self.state_limit_bytes,
        )
        self.server: Server | None = None

    def on_begun(self, execution: Execution) -> None:
        self.begun.append(execution.id)

    def on_taken(self, execution: Execution, signed: SignedTakeover) -> None:
        """Note that it takes a task over."""

    def on_replaced(self, execution: Execution, signed: SignedTakeover) -> None:
        self.replaced.append(signed)

    def on_ended(self, execution: Execution) -> None:
        pass

    def on_finished(self, execution: Execution) -> None:
        self.finished.put_nowait(execution)

    def on_failed(self, execution: Execution) -> None:
        self.failed.put_nowait(execution)

    async def start(self, graphs: dict[str, Graph]) -> None:
        app = make_app()
        app.router.add_get(api.DATA.path, self.engine.acceptor.handle)
        self.server = await serve_app(app, "127.0.0.1", 0)
        await self.workers.start()
        await self.load(graphs)

    async def load(self, graphs: dict[str, Graph]) -> None:
        for task_id, graph in graphs.items():
            path = self.directory / task_id
            path.write_bytes(graph.to_bytes())
            loaded = await self.workers.load(0, path, None)
            assert loaded["task_id"] == task_id
            self.programs[task_id] = loaded["program"]

    @property
    def entry(self) -> PlanNode:
        assert self.server is not None
        return PlanNode(
            node=self.identity.address,
            signing_key=self.identity.signing_key_hex,
            endpoint=self.server.url,
        )

    async def close(self) -> None:
        await self.engine.close()
        if self.server is not None:
            await self.server.close()
        await self.workers.close()


class TestClient:
    """Sends inputs to every node and collects what comes back."""

    __test__ = False

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity or generate_identity()
        self.closed: asyncio.Queue[Link] = asyncio.Queue()
        self.pool = LinkPool(
            self.identity, self._on_frame, on_closed=self.closed.put_nowait, allow_loopback=True
        )
        self.outputs: asyncio.Queue[Frame] = asyncio.Queue()
        self.direct: asyncio.Queue[Frame] = asyncio.Queue()  # behind chunks, which are not kept
        self.failures: asyncio.Queue[TaskFailure] = asyncio.Queue()
        self.traces: asyncio.Queue[Trace] = asyncio.Queue()
        self.progress: asyncio.Queue[Progress] = asyncio.Queue()
        self.links: list[Link] = []
        # what the nodes signed for all steps up to one, by execution and step
        self.totals: dict[tuple[str, int], str] = {}

    def _on_frame(self, link: Link, data: bytes) -> None:
        if data.startswith(CHUNK_MAGIC):
            return
        frame, seal = decode_frame(data)
        if frame.kind is FrameKind.TENSOR:
            if (frame.step + 1) % limits.INTERIM_STEPS == 0:
                self.acknowledge(frame.execution_id, frame.step + 1, make_delivery(seal))
            total = extend_steps(frame.before, frame.digest).hex()
            assert self.totals.setdefault((frame.execution_id, frame.step), total) == total
            (self.direct if frame.direct else self.outputs).put_nowait(frame)
        elif frame.kind is FrameKind.ERROR:
            self.failures.put_nowait(TaskFailure.parse(bytes(frame.payload)))
        elif frame.kind is FrameKind.PROGRESS:
            self.progress.put_nowait(Progress.parse(bytes(frame.payload)))
        elif frame.kind is FrameKind.TRACE:
            self.traces.put_nowait(Trace.parse(bytes(frame.payload)))

    async def connect(self, certificate: PlanCertificate) -> None:
        """Open a link to every node of the plan."""
        execution_id = certificate.plan.request.execution_id
        self.links = [
            self.pool.open(node.node, node.endpoint, execution_id)
            for node in certificate.plan.nodes
        ]
        for link in self.links:
            await wait_open(link, HANG_S)

    def send(self, certificate: PlanCertificate, step: int, x: np.ndarray, nodes: set[str]) -> None:
        """Send one step's input to the nodes that read it."""
        execution_id = certificate.plan.request.execution_id
        sealed = seal_frame(
            self.identity, make_tensor_frame(execution_id, CLIENT, 0, step, x.tobytes())
        )
        for link in self.links:
            if link.peer in nodes:
                link.send(sealed)

    def send_stored(
        self, certificate: PlanCertificate, step: int, x: np.ndarray, nodes: set[str]
    ) -> None:
        """Announce one step's input that was stored before."""
        digest = hashlib.sha256(x.tobytes()).digest()
        execution_id = certificate.plan.request.execution_id
        frame = make_stored_frame(execution_id, CLIENT, 0, step, digest, x.nbytes)
        for link in self.links:
            if link.peer in nodes:
                link.send(seal_frame(self.identity, frame))

    def send_chunks(
        self,
        certificate: PlanCertificate,
        step: int,
        x: np.ndarray,
        node: str,
        *,
        offsets: Sequence[int] | None = None,
        digest: bytes | None = None,
    ) -> None:
        """Send one step's input to a node in chunks (all of them: None), then its digest."""
        data, execution_id = x.tobytes(), certificate.plan.request.execution_id
        digest = hashlib.sha256(data).digest() if digest is None else digest
        frame = make_stored_frame(execution_id, CLIENT, 0, step, digest, x.nbytes, direct=True)
        link = next(link for link in self.links if link.peer == node)
        for offset in (
            range(0, len(data), limits.TENSOR_CHUNK_BYTES) if offsets is None else offsets
        ):
            payload = data[offset : offset + limits.TENSOR_CHUNK_BYTES]
            chunk = TensorChunk(execution_id, CLIENT, 0, step, len(data), offset, payload)
            link.send_bulk(chunk.encode())
        link.send_bulk(seal_frame(self.identity, frame))

    def take_over(
        self, certificate: PlanCertificate, task: int, candidate: int, first_step: int
    ) -> None:
        """Tell every node that another one runs a task from now on."""
        execution_id = certificate.plan.request.execution_id
        signed = sign_takeover(
            self.identity,
            Takeover(
                execution_id=execution_id, task=task, candidate=candidate, first_step=first_step
            ),
        )
        self.tell(make_message_frame(FrameKind.TAKEOVER, execution_id, CLIENT, 0, signed))

    def probe(self, certificate: PlanCertificate) -> None:
        """Ask every node how far it is."""
        execution_id = certificate.plan.request.execution_id
        self.tell(make_message_frame(FrameKind.PROBE, execution_id, CLIENT, 0, None))

    def tell(self, frame: Frame) -> None:
        """Send a frame of the client's own to every node."""
        sealed = seal_frame(self.identity, frame)
        for link in self.links:
            link.send(sealed)

    def acknowledge(self, execution_id: str, steps: int, delivery: str) -> None:
        """Say that so many steps of a model with one output were delivered."""
        end = End(
            execution_id=execution_id, steps=steps, inputs=(), outputs=(delivery,), final=False
        )
        signed = sign_end(self.identity, end)
        self.tell(make_message_frame(FrameKind.END, execution_id, CLIENT, steps, signed))

    def end(self, certificate: PlanCertificate, steps: int) -> None:
        """Say how many steps there were."""
        execution_id = certificate.plan.request.execution_id
        signed = sign_end(self.identity, End(execution_id=execution_id, steps=steps, inputs=()))
        self.tell(make_message_frame(FrameKind.END, execution_id, CLIENT, steps, signed))


def _digest(graph: Graph) -> str:
    return hashlib.sha256(graph.to_bytes()).hexdigest()


def get_pids(workers: Workers) -> list[int | None]:
    return [supervisor.pid for supervisor in workers._supervisors]
