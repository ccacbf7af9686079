"""The node as a whole: opens everything in order, keeps its loops going, closes it again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees, fetch_node_key
from splitup.chain.deployment import Deployment
from splitup.chain.market import fetch_economics
from splitup.core import limits, tuning
from splitup.core.errors import ConfigurationError, PeerFault, Refused, SplitUpError, Unavailable
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.plans import PlanCertificate
from splitup.net.http import (
    Server,
    SignedClient,
    add_routes,
    make_app,
    read_unsigned,
    serve_app,
)
from splitup.net.relay import Relay
from splitup.net.tunnel import Tunnel
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.settlement.proof_of_sampling import Economics, compute_exposure
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.journal import Journal
from splitup.storage.log_store import (
    GrantedLogs,
    has_large_tensors,
    open_logs,
    open_verification_logs,
)
from splitup.storage.task_cache import Cache
from splitup_node.committee.committee_client import CommitteeClient
from splitup_node.committee.presence import Presence
from splitup_node.committee.reachability import Reach
from splitup_node.config import NodeConfig
from splitup_node.execution.device_states import compute_state_bytes
from splitup_node.execution.engine import Engine
from splitup_node.execution.executions import Execution
from splitup_node.health import Health
from splitup_node.settlement.account import check_registration
from splitup_node.settlement.recovery import Recovery, Unreported, make_end_value, read_unreported
from splitup_node.settlement.reports import Reporter
from splitup_node.settlement.verifier import Tools, Verifier
from splitup_node.status_file import write_status
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.worker.supervisor import WORKER_ARGV, Supervisor, WorkerLost
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a node works with; opened in this order, closed in the reverse."""

    config: NodeConfig
    identity: Identity
    journal: Journal
    chain: Chain
    committees: Committees
    http: SignedClient
    supervisor: Workers


class Node:
    """A running node. Made by ``run_node``."""

    def __init__(
        self, parts: _Parts, committee: CommitteeView, economics: Economics, device: dict[str, str]
    ) -> None:
        self._config = parts.config
        self._identity = parts.identity
        self._journal = parts.journal
        self._chain = parts.chain
        self._http = parts.http
        self._supervisor = parts.supervisor
        self._committees = parts.committees
        self._committee = committee
        self._economics = economics
        self.device = device
        self.reach: Reach | None = None  # known once the server listens
        self._accepting: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._gateway = GatewayClient(self._config.gateway_urls, self._identity, http=self._http)
        self._cache = Cache(self._config.data_dir / "cache", self._gateway, self._http.session)
        self._loaded_tasks = LoadedTasks(
            self._supervisor, self._cache, lambda: self.engine.runs.speed
        )
        self.engine = Engine(
            self._identity,
            self._supervisor,
            self._loaded_tasks.programs,
            self._open_store,
            self,
            allow_loopback=self._config.allow_loopback,
            get_state_limit=lambda: self._loaded_tasks.state_limit_bytes,
            now_s=self._chain.clock.now_s,
        )
        self._health = Health(self._journal, self._config.data_dir, self._chain.clock)
        self._presence = Presence(
            self._identity,
            self._http,
            self.engine,
            self._loaded_tasks,
            self._cache,
            self._health,
            get_committee=lambda: self._committee,
            get_determinism=lambda: self.device["determinism_class"],
        )
        committee_client = CommitteeClient(
            self._http, self._committees.fetch_of, self._chain.clock.now_s
        )
        self._reporter = Reporter(self._journal, self._chain, committee_client)
        self._recovery = Recovery(
            self._identity.address,
            self.engine,
            self._supervisor,
            self._loaded_tasks,
            self._cache,
            self._open_store,
            self._chain.clock.now_s,
        )
        self._verifier = Verifier(
            Tools(
                identity=self._identity,
                engine=self.engine,
                supervisor=self._supervisor,
                loaded_tasks=self._loaded_tasks,
                cache=self._cache,
                committee_client=committee_client,
                open_store=lambda order: open_verification_logs(
                    self._gateway,
                    lambda: self._http.session,
                    order,
                    now_s=self._chain.clock.now_s,
                ),
                committees=self._committees,
            ),
            economics.sampling_bps,
        )

    @property
    def endpoint(self) -> str:
        """Return where others reach the node, "" while they do not."""
        return self.reach.endpoint if self.reach is not None else ""

    # ---- life ----------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set; a loop that dies of a bug ends the node."""
        if (reach := self.reach) is None:
            raise ConfigurationError("a node is settled before it runs")
        self._resume()
        loops = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in (
                ("heartbeats", self._presence.beat()),
                ("logs", self._every(tuning.FLUSH_PERIOD_S, self._flush_logs)),
                ("housekeeping", self._every(limits.HEARTBEAT_PERIOD_S, self._keep_house)),
                ("clock", self._every(tuning.CLOCK_PERIOD_S, self._chain.fetch_head)),
                ("committee", self._every(tuning.COMMITTEE_CACHE_S, self._refresh_committee)),
                ("specialising", self._presence.specialise()),
                ("worker", self._watch_worker()),
                ("reports", self._reporter.run()),
                ("stake", self._every(tuning.DISTRIBUTE_PERIOD_S, self._reporter.release_stake)),
                ("verification", self._verifier.run()),
                ("endpoint", reach.follow()),
                ("reach", reach.run()),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *loops], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            stopping.cancel()
            if all(not task.done() for task in loops):  # asked to stop, not broken
                await self.engine.leave()
            await self.engine.close()
            await reach.close()
            if self._background:  # completions on their way into the journal
                await asyncio.wait(self._background, timeout=tuning.WORKER_STOP_S)
            for task in (*loops, *self._background, *self._accepting.values()):
                task.cancel()
            await asyncio.gather(*loops, *self._background, return_exceptions=True)
            with contextlib.suppress(SplitUpError):
                self._write_status(running=False)

    async def settle(self, server: Server, listed: str) -> None:
        """Find out how the node is reached and have that listed; ``listed`` is what is now."""
        self.reach = Reach(
            self._identity.address,
            Tunnel(self._identity, self.engine.acceptor, server.local_url),
            self._http,
            self._chain,
            lambda: self._committee,
            mode=self._config.relay,
            direct=self._config.endpoint or server.url,
            listed=listed,
        )
        await self.reach.settle()
        await self.reach.list_endpoint()

    def _resume(self) -> None:
        """Take up what the journal holds: report what was completed, complete what had ended."""
        for lost in read_unreported(self._journal, self._chain.clock.now_s()):
            execution_id = lost.certificate.plan.request.execution_id
            _log.warning("execution %s was cut off by the end of the last run", execution_id)
            self.engine.refuse(lost.certificate, "the node was restarted and lost its state")
            if lost.end is not None and lost.end.end.steps:
                self._spawn(self._recover(lost))
            else:
                self._journal.delete("assignment", execution_id)
        self._reporter.resume()

    async def _recover(self, lost: Unreported) -> None:
        try:
            execution = await self._recovery.run(lost)
        except SplitUpError as error:
            execution_id = lost.certificate.plan.request.execution_id
            _log.error("execution %s cannot be completed: %s", execution_id, error)
            return
        self.on_finished(execution)

    async def _every(self, period_s: float, action: Any) -> None:
        while True:
            started_s = time.monotonic()
            try:
                await action()
            except SplitUpError as error:
                _log.warning("%s", error)
            await asyncio.sleep(max(0.0, period_s - (time.monotonic() - started_s)))

    # ---- plans and verifications ---------------------------------------------------------------

    def add_routes(self, app: web.Application) -> None:
        """Serve the node's HTTP API on ``app``."""
        add_routes(
            app,
            api.ROUTES["node"],
            {
                api.PING: self._handle_ping,
                api.PLAN_CERTIFICATE: self._handle_plan,
                api.VERIFICATION_ORDER: self._handle_verify,
                api.DATA: self.engine.acceptor.handle,
            },
        )

    async def _handle_ping(self, request: web.Request) -> web.Response:
        return web.json_response({"node": self._identity.address})

    async def _handle_plan(self, request: web.Request) -> web.Response:
        certificate = await read_unsigned(request, api.PLAN_CERTIFICATE)
        execution_id = certificate.plan.request.execution_id
        accepting = self._accepting.get(execution_id)
        if accepting is None:
            accepting = asyncio.create_task(self._accept_plan(certificate))
            self._accepting[execution_id] = accepting
            accepting.add_done_callback(lambda _: self._accepting.pop(execution_id, None))
        await asyncio.shield(accepting)
        return web.json_response({})

    async def _accept_plan(self, certificate: PlanCertificate) -> None:
        """Check a plan and begin its execution. Members and clients send it, more than once."""
        plan = certificate.plan
        execution_id = plan.request.execution_id
        running = self.engine.executions.get(execution_id)
        if running is not None and running.certificate.plan.root() == plan.root():
            return
        if self.engine.is_known(execution_id):
            raise Refused(f"execution {execution_id} is over on this node", status=409)
        if plan.request.market != self._chain.deployment.market:
            raise PeerFault(f"the plan of {execution_id} is for another market")
        if plan.request.deadline <= self._chain.clock.now_s():
            raise PeerFault(f"the deadline of {execution_id} has passed")
        plan.node_of(self._identity.address)
        await self._committees.check_certificate(certificate)
        manifest = await self._cache.fetch_manifest(plan.request.model_id)
        try:
            self._health.check()
            async with contextlib.AsyncExitStack() as stack:  # none is traded before the start
                for index, executor in enumerate(plan.executors()):
                    if executor == self._identity.address and index < len(manifest.tasks):
                        use = self._loaded_tasks.use(plan.request.model_id, index)
                        await stack.enter_async_context(use)
                self.engine.start(certificate, manifest)
        except SplitUpError as error:
            self.engine.refuse(certificate, str(error))
            raise

    async def _handle_verify(self, request: web.Request) -> web.Response:
        order = await read_unsigned(request, api.VERIFICATION_ORDER)
        await self._verifier.accept(order)
        return web.json_response({})

    def on_begun(self, execution: Execution) -> None:
        """Note an assignment, so that it is missed after a crash (called by the engine)."""
        value = {"certificate": execution.certificate.model_dump(mode="json")}
        self._spawn(self._note(execution, value))

    async def _note(self, execution: Execution, value: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._journal.put, "assignment", execution.id, value)
        except Unavailable as error:
            self._health.note_journal(error)
            self.engine.fail(execution.id, 0, 0, self._health.trouble)

    def on_ended(self, execution: Execution) -> None:
        """Note an execution's end, so that no crash loses the work (called by the engine)."""
        self._spawn(self._note_end(execution, make_end_value(execution)))

    async def _note_end(self, execution: Execution, value: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._journal.put, "ended", execution.id, value)
        except SplitUpError as error:
            _log.error("the journal cannot note the end of %s: %s", execution.id, error)

    def on_finished(self, execution: Execution) -> None:
        """Report a finished execution (called by the engine)."""
        submission = None
        if execution.steps:  # nothing computed, nothing paid
            salt = secrets.token_bytes(32)
            completion = execution.make_completion(salt)
            exposure = compute_exposure(
                execution.parts,
                execution.manifest,
                execution.certificate.plan.request.steps,
                self._economics,
            )
            submission = self._reporter.submit(completion, execution.deadline_s, exposure)
        self._spawn(self._report(execution, submission))

    def on_failed(self, execution: Execution) -> None:
        """Forget a failed execution's assignment (called by the engine)."""
        self._spawn(self._report(execution, None))

    async def _report(
        self, execution: Execution, submission: Coroutine[Any, Any, None] | None
    ) -> None:
        try:
            if submission is not None:
                await submission
            for kind in ("assignment", "ended"):
                await asyncio.to_thread(self._journal.delete, kind, execution.id)
        except SplitUpError as error:
            _log.error("execution %s cannot be reported: %s", execution.id, error)

    # ---- loops ---------------------------------------------------------------------------------

    async def _flush_logs(self) -> None:
        self.engine.flush()

    async def _keep_house(self) -> None:
        self.engine.sweep(self._chain.clock.now_s())
        await self._health.look()
        self._write_status(running=True)

    async def _refresh_committee(self) -> None:
        self._committee = await self._committees.fetch_current()

    async def _watch_worker(self) -> None:
        """Replace a worker that is lost, load its tasks again, and go on."""
        pause_s = tuning.LINK_RETRY_MIN_S
        while True:
            await self._supervisor.wait_lost()
            self._loaded_tasks.forget_programs()
            self.engine.on_worker_lost("the worker process ended")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, tuning.RPC_BACKOFF_MAX_S)
            try:
                self.device = await self._supervisor.restart()
                await self._loaded_tasks.reload()
            except WorkerLost as error:
                _log.error("%s; starting it again", error)
                continue
            self.engine.resume()

    # ---- the rest ------------------------------------------------------------------------------

    def _open_store(
        self, certificate: PlanCertificate, manifest: Manifest, executor_map: ExecutorMap
    ) -> GrantedLogs:
        return open_logs(
            self._gateway,
            lambda: self._http.session,
            certificate,
            executor_map,
            has_large_tensors=has_large_tensors(manifest),
            now_s=self._chain.clock.now_s,
        )

    def _write_status(self, *, running: bool) -> None:
        status = {
            "running": running,
            "pid": os.getpid(),
            "address": self._identity.address,
            "endpoint": self.endpoint,
            "relay": self.reach.relay if self.reach is not None else "",
            "reach_problem": self.reach.problem if self.reach is not None else "",
            "boot_id": self._presence.boot_id,
            "device": self.device,
            "resident": [
                {"task_id": t.task_id, "label": t.label, "vram_bytes": t.vram_bytes}
                for t in self._loaded_tasks.tasks
            ],
            "loading": self._loaded_tasks.loading,
            "trades": list(self._presence.trades),
            "vram_bytes": int(self._config.vram),
            "vram_used_bytes": self._loaded_tasks.used_bytes,
            "queue_ms": self.engine.runs.queue_ms,
            "speed_mflops": self.engine.runs.speed_mflops,
            "bandwidth_kbps": self._cache.bandwidth_kbps,
            "executions": sum(not e.is_over for e in self.engine.executions.values()),
            "sessions": sum(bool(compute_state_bytes(e)) for e in self.engine.executions.values()),
            "state_bytes": sum(map(compute_state_bytes, self.engine.executions.values())),
            "state_limit_bytes": self._loaded_tasks.state_limit_bytes,
            "verified": self._verifier.done,
            "work": self.engine.runs.live.to_dict(),
            "work_again": self.engine.runs.background.to_dict(),
            "verifications": list(self._verifier.latest),
            "worker_restarts": self._supervisor.restarts,
            "warnings": self._health.warnings,
        }
        write_status(self._config.data_dir, status)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def run_node(
    config: NodeConfig,
    *,
    worker_argv: Sequence[str] = WORKER_ARGV,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT, or until ``stop`` is set.

    Raises ConfigurationError (keys, port, data directory, no stake), ChainUnavailable.
    """
    stop = stop or asyncio.Event()
    identity = config.load_identity()
    deployment = Deployment.load(config.deployment)
    async with contextlib.AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
            stack.callback(loop.remove_signal_handler, number)
        config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal = stack.enter_context(Journal.open(config.data_dir))
        chain = await Chain.connect(config.rpc_url, deployment, private_key=identity.private_key)
        stack.push_async_callback(chain.close)
        entry = await check_registration(chain, identity, config)
        http = await stack.enter_async_context(SignedClient(identity))
        supervisor = Workers(
            [
                Supervisor(
                    config.data_dir,
                    memory_bytes=memory_bytes,
                    device=device,
                    threads=config.threads,
                    name=f"worker-{number}" if number else "worker",
                    cache_directory=config.kernel_cache,
                    worker_argv=worker_argv,
                )
                for number, (device, memory_bytes) in enumerate(config.device_shares)
            ]
        )
        stack.push_async_callback(supervisor.close)
        committees = Committees(chain)
        parts = _Parts(config, identity, journal, chain, committees, http, supervisor)
        node = Node(
            parts,
            committee=await committees.fetch_current(),
            economics=await fetch_economics(chain),
            device=await supervisor.start(),
        )
        app = make_app()
        node.add_routes(app)
        if config.offer_relay:
            relay = Relay(lambda: node.endpoint, functools.partial(fetch_node_key, chain))
            relay.add_routes(app)
            stack.push_async_callback(relay.close)
        server = await serve_app(app, config.host, config.port)
        stack.push_async_callback(server.close)
        await node.settle(server, entry["endpoint"])
        _log.info("node %s serves on %s; %s", identity.address, server.url, node.device["reason"])
        await node.run(stop)
