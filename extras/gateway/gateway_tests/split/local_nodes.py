"""A server of split inference whose nodes are a model's real tasks, computed in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from splitup_deploy.cutting.build import CompiledModel
from splitup_gateway.access import Access
from splitup_gateway.http_server import ApiServer
from splitup_gateway.page_files import MARKET_PAGE, add_page
from splitup_gateway.split.sessions import SessionOptions
from splitup_gateway.timelines import Timelines

from splitup.client.leases import LeaseOptions
from splitup.client.models import Model
from splitup.core.errors import ExecutionFailed, Unavailable
from splitup.core.tensors import check_inputs
from splitup.graph.manifest import get_blob_key, get_task_key, get_weights_key
from splitup.net.http_server import serve_app
from tests.deploy.execution import CutModel

NAME = "packages-private"
CHUNK = 8


class LocalSession:
    """An execution: computes the nodes' tasks step by step, and keeps every byte that they get."""

    def __init__(self, nodes: LocalNodes, steps: int) -> None:
        self.nodes = nodes
        self.manifest = nodes.cut.manifest
        self.plan = SimpleNamespace(request=SimpleNamespace(steps=steps))
        self.execution_id = f"0x{len(nodes.opened):064x}"
        self.failure: str | None = None
        self.steps = 0
        self.seen: list[bytes] = []
        self._states = nodes.cut.new_states()
        self._last: asyncio.Task[None] | None = None

    def submit(self, inputs: Mapping[str, Any]) -> asyncio.Future[dict[str, Any]]:
        specs = [port.spec for port in self.manifest.inputs]
        tensors = check_inputs(specs, inputs)
        self.seen += [bytes(tensor) for tensor in tensors]
        self.steps += 1
        given = {spec.name: data for spec, data in zip(specs, tensors, strict=True)}
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._last = asyncio.create_task(self._run(self._last, given, result))
        return result

    async def _run(
        self,
        before: asyncio.Task[None] | None,
        given: dict[str, bytes],
        result: asyncio.Future[dict[str, Any]],
    ) -> None:
        """Compute one step after the one before; a step that nobody waits for is computed, too."""
        if before is not None:
            await before
        await self.nodes.gate.wait()
        if self.nodes.fails:
            self.nodes.fails -= 1
            self.failure = "a node is gone"
        [port] = self.manifest.outputs
        data = self.nodes.cut.step(self._states, given)[port.name]
        if result.done():
            return
        if self.failure:
            result.set_exception(ExecutionFailed(self.failure, execution_id=self.execution_id))
        else:
            result.set_result({port.name: np.frombuffer(data, "<f4").reshape(-1, port.shape[1])})

    async def finish(self) -> tuple[()]:
        return ()


class LocalNodes:
    """Stands for a network with one private model."""

    def __init__(self, compiled: CompiledModel, cut: CutModel, folder: Path) -> None:
        self.cut = cut
        self.opened: list[LocalSession] = []
        self.ended: list[LocalSession] = []
        self.has_ended = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0  # of the next steps
        self.refuses = False  # to open executions
        self.files = self._write(compiled, folder)

    def _write(self, compiled: CompiledModel, folder: Path) -> dict[str, Path]:
        manifest = self.cut.manifest
        assert manifest.client is not None and manifest.text is not None
        stored = {blob.key: blob for blob in compiled.blobs}
        keys = {manifest.text.tokenizer_digest: get_blob_key(manifest.text.tokenizer_digest)}
        for task in manifest.client.tasks:
            keys[task.task_id] = get_task_key(task.task_id)
            keys[task.weights_digest] = get_weights_key(task.weights_digest)
        files = {manifest.model_id[2:]: folder / "manifest"}
        files[manifest.model_id[2:]].write_bytes(compiled.manifest_bytes)
        for digest, key in keys.items():
            files[digest] = folder / digest
            files[digest].write_bytes(b"".join(stored[key].open()))
        return files

    async def fetch_model(self, name: str) -> Model:
        return Model(name, self.cut.manifest.model_id, self.cut.manifest)

    async def fetch_client_files(self, _: Model) -> dict[str, Path]:
        return self.files

    async def look(self, _: str) -> None:
        """Nodes hold what there is."""

    @asynccontextmanager
    async def session(
        self,
        model: str,
        *,
        steps: int,
        deadline_s: float,
        verify: str | None,
        nodes_only: bool,
        on_failure: object,
    ) -> AsyncIterator[LocalSession]:
        assert model == NAME and deadline_s > 0 and nodes_only
        if self.refuses:
            raise Unavailable("no balance")
        session = LocalSession(self, steps)
        self.opened.append(session)
        try:
            yield session
        finally:
            self.ended.append(session)
            self.has_ended.set()


@asynccontextmanager
async def serve_split(
    nodes: LocalNodes,
    *,
    access: Access | None = None,
    leases: LeaseOptions | None = None,
    **options: Any,
) -> AsyncIterator[str]:
    """Run the server; give its base URL."""
    access = access or Access(None)
    api = ApiServer(nodes, leases or LeaseOptions(), access, Timelines(), SessionOptions(**options))
    await api.add_model(NAME)
    app = api.make_app()
    add_page(app, MARKET_PAGE, has_keys=access.has_keys)
    server = await serve_app(app, "127.0.0.1", 0, cancels_handlers=True)
    try:
        yield server.url
    finally:
        await server.close()
        await api.close()
        assert len(nodes.ended) == len(nodes.opened), "every execution is ended"
