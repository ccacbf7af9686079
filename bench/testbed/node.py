"""A node's engine, worker and data plane as a process of its own, without chain or committee.

    python -m bench.testbed.node CONFIG.json

The path of a frame and the logs are the daemon's own code on the daemon's event loop. Heartbeats,
the journal and the certificates' signatures are left out. When the node serves, it writes its
address and processes to ``node.json`` beside the config.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from splitup_node.execution.engine import Engine
from splitup_node.execution.kept.digests import Digests
from splitup_node.execution.kept.executions import Execution
from splitup_node.settlement.task_replay import TaskReplay, recompute
from splitup_node.worker.supervisor import Supervisor

from bench.testbed.local_gateway import LocalGateway, ObjectPlace
from splitup.core import tuning
from splitup.crypto.keys import generate_identity
from splitup.devnet.state import write_json
from splitup.graph.manifest import Manifest
from splitup.graph.manifest_rules import load_manifest
from splitup.messages import api
from splitup.messages.plans import PlanCertificate
from splitup.net.http import SignedClient
from splitup.net.http_server import make_app, read_json, serve_app
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.execution.task_queue import Tensor
from splitup.storage.log_store import LogPatience, has_large_tensors, open_logs

READY = "node.json"


def add_unhashed(
    digests: Digests,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    on_done: Callable[[], None],
) -> None:
    """Hash nothing, to measure the path of a tensor without verification.

    What came in frames has a digest: an execution ends only with the inputs that its client states.
    """
    digests.add([one.digest or bytes(32) for one in inputs], [bytes(32)] * len(outputs))
    on_done()


class BenchNode:
    """One engine with what it needs."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.identity = generate_identity()
        self._http = SignedClient(self.identity)
        self._config = config
        self._manifests: dict[str, Manifest] = {}
        self._gateway = LocalGateway(
            ObjectPlace(**config["objects"]), self.identity.signing_key_hex, self._manifests
        )
        self._programs: dict[str, int] = {}
        self._unrecorded: set[str] = set()
        memory_bytes = int(config["memory_bytes"])
        self.supervisor = Supervisor(
            directory,
            memory_bytes=memory_bytes,
            device=os.environ.get("DEV", ""),
            cache_directory=Path(config["kernels"]),
        )
        self.engine = Engine(
            self.identity,
            self.supervisor,
            self._programs,
            self._open_store,
            self,
            allow_loopback=True,
            get_state_limit=lambda: memory_bytes,
            direct_bytes=int(config["direct_bytes"]),
        )

    def _open_store(
        self, certificate: PlanCertificate, manifest: Manifest, executor_map: ExecutorMap
    ) -> Any:
        return open_logs(
            self._gateway,  # type: ignore[arg-type]  # grants without HTTP
            lambda: self._http.session,
            certificate,
            executor_map,
            has_large_tensors=has_large_tensors(manifest),
        )

    async def start(self, app: web.Application) -> None:
        """Load the tasks and add the routes."""
        await self.supervisor.start()
        for folder, tasks in self._config["models"].items():
            await self._load(Path(folder), tasks)
        app.router.add_post(api.PLAN_CERTIFICATE.path, self._handle_plan)
        app.router.add_post("/bench/unrecorded", self._handle_unrecorded)
        app.router.add_post("/bench/recompute", self._handle_recompute)
        app.router.add_get(api.DATA.path, self.engine.acceptor.handle)

    async def _load(self, folder: Path, tasks: list[int]) -> None:
        manifest = load_manifest((folder / "manifest").read_bytes())
        self._manifests[manifest.model_id] = manifest
        for index in tasks:
            task = manifest.tasks[index]
            weights = folder / task.weights_digest if task.weights_digest else None
            if task.task_id not in self._programs:
                loaded = await self.supervisor.load(folder / task.task_id, weights)
                self._programs[task.task_id] = loaded["program"]

    # ---- HTTP ----------------------------------------------------------------------------------

    async def _handle_plan(self, request: web.Request) -> web.Response:
        certificate = PlanCertificate.from_value(await read_json(request))
        asked = certificate.plan.request
        if not self.engine.table.is_known(asked.execution_id):
            self.engine.start(certificate, self._manifests[asked.model_id])
        return web.json_response({})

    async def _handle_unrecorded(self, request: web.Request) -> web.Response:
        """Do not record the execution that is named, which has not begun."""
        self._unrecorded.add((await read_json(request))["execution_id"])
        return web.json_response({})

    async def _handle_recompute(self, request: web.Request) -> web.Response:
        """Recompute a task of an execution as a validator does, from the stored logs."""
        order = await read_json(request)
        certificate = PlanCertificate.from_value(order["certificate"])
        plan = certificate.plan
        manifest = self._manifests[plan.request.model_id]
        started_s = time.monotonic()
        replay = TaskReplay(
            self._open_store(certificate, manifest, ExecutorMap(plan)),
            plan.request,
            manifest,
            plan.executors(),
            order["task"],
            order["steps"],
            LogPatience(is_drawn=False),  # nobody here waits until executors have stored theirs
        )
        program = self._programs[manifest.tasks[order["task"]].task_id]
        digests = await recompute(self.engine, self.supervisor, program, replay)
        seconds = time.monotonic() - started_s
        return web.json_response({"seconds": seconds, "outputs": list(digests.outputs)})

    # ---- the engine's events -------------------------------------------------------------------

    def on_begun(self, execution: Execution) -> None:
        if execution.id in self._unrecorded:
            self._unrecorded.discard(execution.id)
            execution.record.add = add_unhashed  # type: ignore[method-assign]

    def on_ended(self, execution: Execution) -> None:
        pass

    def on_finished(self, execution: Execution) -> None:
        execution.claims.make_completions(partial(bytes, 32))[0].root()

    def on_failed(self, execution: Execution) -> None:
        print(f"{execution.id} failed: {execution.life.failure}", file=sys.stderr, flush=True)

    async def keep_house(self) -> None:
        """Store logs and forget executions, as the daemon does."""
        while True:
            await asyncio.sleep(tuning.FLUSH_PERIOD_S)
            self.engine.flush()
            self.engine.sweep(time.time())

    async def close(self) -> None:
        await self.engine.close()
        await self.supervisor.close()
        await self._http.close()


async def serve(path: Path, config: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    node = BenchNode(path.parent, config)
    app = make_app()
    await node.start(app)
    server = await serve_app(app, "127.0.0.1", 0)
    ready = {
        "node": node.identity.address,
        "signing_key": node.identity.signing_key_hex,
        "endpoint": server.url,
        "pid": os.getpid(),
        "worker_pid": node.supervisor.pid,
    }
    write_json(path.parent / READY, ready)
    house = asyncio.create_task(node.keep_house())
    await stopping.wait()
    house.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await house
    await node.close()
    await server.close()


if __name__ == "__main__":
    given = Path(sys.argv[1])
    gc.collect()
    gc.freeze()  # as the daemon does
    uvloop.run(serve(given, json.loads(given.read_text())))
