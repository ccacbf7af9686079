"""A network's data plane: nodes' engines as processes, an object store, and sessions over them.

The caller assigns tasks to nodes, so that every task has a node of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from splitup_deploy.cutting.build import CompiledModel

from bench.testbed.local_gateway import LocalGateway, ObjectPlace
from bench.testbed.node import READY
from splitup.client.execution.session import Session
from splitup.client.outcome import TraceEvent, make_trace
from splitup.core import tuning
from splitup.core.errors import Unavailable
from splitup.crypto.keys import Identity, generate_identity
from splitup.devnet.processes import DevnetProcess, spawn
from splitup.devnet.s3_server import ObjectServer, start_object_server
from splitup.devnet.state import write_json
from splitup.graph.manifest import Manifest, get_task_key, get_weights_key
from splitup.messages import api
from splitup.messages.plans import PlanCertificate, PlanNode
from splitup.net.http import SignedClient
from tests.node.network import make_certificate

START_TIMEOUT_S: Final = 90.0  # a worker compiles its tasks
DEADLINE_S: Final = 100.0  # of an execution
MEMORY_BYTES: Final = 4 * 10**9
_LOWEST: Final = 19  # priority


@dataclass(frozen=True, slots=True)
class Model:
    """A cut model as files: ``manifest``, graphs by task id, weights by digest."""

    manifest: Manifest
    folder: Path


@dataclass(slots=True)
class Node:
    """A running node and the contents of its ``node.json``."""

    child: DevnetProcess
    entry: PlanNode
    worker_pid: int


@dataclass(slots=True)
class Engines:
    """The running nodes. Made by ``run_engines``."""

    directory: Path
    objects: ObjectServer
    nodes: list[Node] = field(default_factory=list)
    models: dict[str, Manifest] = field(default_factory=dict)  # by id
    identity: Identity = field(default_factory=generate_identity)
    executions: int = 0
    direct_bytes: int = tuning.DIRECT_BYTES

    @property
    def ports(self) -> list[int]:
        return [int(node.entry.endpoint.rpartition(":")[2]) for node in self.nodes]

    @property
    def place(self) -> ObjectPlace:
        server = self.objects
        return ObjectPlace(server.endpoint_url, server.bucket, str(server.credentials_path))

    def make_certificate(
        self,
        manifest: Manifest,
        runs: Sequence[int],
        steps: int,
    ) -> PlanCertificate:
        """Return the plan of a new execution: task i runs on node ``runs[i]``."""
        self.executions += 1
        entries = [self.nodes[place].entry for place in runs]
        return make_certificate(
            manifest,
            entries,
            self.identity.signing_key_hex,
            steps=steps,
            tag=f"{self.directory} {self.executions}",
        )

    @asynccontextmanager
    async def session(
        self,
        manifest: Manifest,
        runs: Sequence[int],
        steps: int,
        *,
        endpoints: Mapping[str, str] | None = None,
        is_recorded: bool = True,
    ) -> AsyncIterator[Session]:
        """Open an execution as the SDK does, once its nodes have the plan.

        ``endpoints`` are the addresses at which only the client reaches the nodes.
        """
        certificate = self.make_certificate(manifest, runs, steps)
        plan = certificate.plan
        async with SignedClient(self.identity) as http:
            for node in plan.nodes:
                if not is_recorded:
                    order = {"execution_id": plan.request.execution_id}
                    await http.post_json(f"{node.endpoint}/bench/unrecorded", order)
                await http.post_json(api.PLAN_CERTIFICATE.url(node.endpoint), certificate)
            session = Session(
                _redirect(certificate, endpoints or {}),
                manifest,
                self.identity,
                http,
                LocalGateway(self.place, self.identity.signing_key_hex, self.models),  # type: ignore[arg-type]
                deadline=asyncio.get_running_loop().time() + DEADLINE_S,
                allow_loopback=True,
                direct_bytes=self.direct_bytes,
            )
            session.open()
            try:
                yield session
                await session.finish()
                await session.store_inputs()
            finally:
                await session.close()


def _redirect(certificate: PlanCertificate, endpoints: Mapping[str, str]) -> PlanCertificate:
    nodes = tuple(
        node.model_copy(update={"endpoint": endpoints.get(node.node, node.endpoint)})
        for node in certificate.plan.nodes
    )
    plan = certificate.plan.model_copy(update={"nodes": nodes})
    return certificate.model_copy(update={"plan": plan})


@asynccontextmanager
async def run_engines(
    placements: Sequence[Sequence[tuple[Model, Sequence[int]]]],
    *,
    direct_bytes: int = tuning.DIRECT_BYTES,
    store_gives_way: bool = False,
) -> AsyncIterator[Engines]:
    """Run one node per entry, each with tasks of models, until the block is left.

    ``store_gives_way``: the object store has the lowest priority, because on a real network it does
    not share processors with the nodes.
    """
    directory = Path(tempfile.mkdtemp(prefix="splitup-bench-"))
    objects = start_object_server(directory / "objects")
    if store_gives_way:
        _give_way(objects.process.pid)
    engines = Engines(directory, objects, direct_bytes=direct_bytes)
    children: list[DevnetProcess] = []
    try:
        for place, models in enumerate(placements):
            folder = directory / f"node-{place}"
            folder.mkdir()
            engines.models |= {model.manifest.model_id: model.manifest for model, _ in models}
            config = {
                "objects": asdict(engines.place),
                "memory_bytes": MEMORY_BYTES,
                "direct_bytes": direct_bytes,
                "kernels": str(directory / "kernels"),
                "models": {str(model.folder): list(tasks) for model, tasks in models},
            }
            write_json(folder / "config.json", config)
            command = [sys.executable, "-m", "bench.testbed.node", folder / "config.json"]
            children.append(spawn(f"node-{place}", command, log=folder / "node.log"))
        for child in children:
            engines.nodes.append(await _wait_ready(child))
        yield engines
    finally:
        for child in children:
            child.request_stop()
        for child in children:
            await asyncio.to_thread(child.stop)
        await asyncio.to_thread(objects.stop)
        shutil.rmtree(directory, ignore_errors=True)


def _give_way(process: int) -> None:
    os.setpriority(os.PRIO_PGRP, process, _LOWEST)
    with contextlib.suppress(OSError):  # a session's share counts first, where the kernel does so
        Path(f"/proc/{process}/autogroup").write_text(str(_LOWEST))


async def _wait_ready(child: DevnetProcess) -> Node:
    path = child.log.parent / READY
    ends = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        child.check_running()
        if time.monotonic() > ends:
            raise Unavailable(f"{child.name} is not ready after {START_TIMEOUT_S:g} s")
        await asyncio.sleep(0.02)
    said: dict[str, Any] = json.loads(path.read_text())
    entry = PlanNode(node=said["node"], signing_key=said["signing_key"], endpoint=said["endpoint"])
    return Node(child, entry, said["worker_pid"])


def save_model(compiled: CompiledModel, folder: Path) -> Model:
    """Write a cut model as ``bench.testbed.node`` reads it."""
    folder.mkdir(parents=True)
    (folder / "manifest").write_bytes(compiled.manifest_bytes)
    names: dict[str, str] = {}
    client = compiled.manifest.client
    for task in (*compiled.manifest.tasks, *(client.tasks if client else ())):
        names[get_task_key(task.task_id)] = task.task_id
        if task.weights_digest:
            names[get_weights_key(task.weights_digest)] = task.weights_digest
    for blob in compiled.blobs:
        if blob.key in names:
            with (folder / names[blob.key]).open("wb") as file:
                file.writelines(blob.open())
    return Model(compiled.manifest, folder)


async def fetch_trace(session: Session) -> tuple[TraceEvent, ...]:
    """End a session and return its timeline."""
    return make_trace(session.manifest, await session.finish())
