"""A node: takes plans and verification orders, keeps its loops going, reports what it computed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.chain.models import RecordedModels
from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks, cancel
from splitup.core.errors import ConfigurationError, PeerFault, Refused, SplitUpError, Unavailable
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.completions import SignedTakeover, Takeovers
from splitup.messages.frames import make_order
from splitup.messages.plans import PlanCertificate
from splitup.net.http import SignedClient
from splitup.net.http_server import Server, add_routes, read_unsigned
from splitup.net.tunnel import Tunnel
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.journal import Journal
from splitup.storage.log_store import (
    GrantedLogs,
    LogPatience,
    has_large_tensors,
    open_logs,
    open_verification_logs,
)
from splitup.storage.task_cache import TaskCache
from splitup_node.committee.committee_client import CommitteeClient
from splitup_node.committee.presence import Presence
from splitup_node.committee.reachability import Reachability
from splitup_node.config import NodeConfig
from splitup_node.execution.engine import Engine
from splitup_node.execution.kept.executions import Execution
from splitup_node.health import Health
from splitup_node.settlement.account import find_low_stake
from splitup_node.settlement.recovery import Recovery, Unreported, make_end_value, read_unreported
from splitup_node.settlement.reports import Reporter
from splitup_node.settlement.verifier import Verifier
from splitup_node.status_file import REWRITE_S, write_status
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.worker.supervisor import WorkerLost
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node")


class NodeDaemon:
    """A running node. Made by ``splitup_node.daemon.run_node``."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        journal: Journal,
        chain: Chain,
        committees: Committees,
        http: SignedClient,
        workers: Workers,
        *,
        committee: CommitteeView,
        device: dict[str, str],
    ) -> None:
        """Take what a node works with, which was opened in this order."""
        self._config, self._identity, self._journal = config, identity, journal
        self._chain, self._committees = chain, committees
        self._http, self._workers = http, workers
        self._committee = committee
        self.device = device
        self.reachability: Reachability | None = None  # known once the server listens
        self._written: dict[str, Any] = {}  # the status file's content
        self._write_again_at = 0.0
        self._accepting: dict[str, asyncio.Task[None]] = {}
        # by execution, and by whether this node was replaced: takeovers that members are to hear of
        self._untold: dict[tuple[str, bool], list[SignedTakeover]] = {}
        self._watched: set[str] = set()  # executions of which this node took tasks over
        self._background = BackgroundTasks()
        self._gateway = GatewayClient(self._config.gateway_urls, self._identity, http=self._http)
        self._cache = TaskCache(
            self._config.data_dir / "cache",
            self._gateway,
            self._http.session,
            RecordedModels(self._chain).check,
        )
        self._loaded_tasks = LoadedTasks(
            self._workers, self._cache, lambda: self.engine.step_loop.speed
        )
        self.engine = Engine(
            self._identity,
            self._workers,
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
            is_leaving=self._is_leaving,
        )
        committee_client = CommitteeClient(
            self._http, self._committees.fetch_of, self._chain.clock.now_s
        )
        self._reporter = Reporter(self._journal, self._chain, committee_client)
        self._recovery = Recovery(
            self._identity.address,
            self.engine,
            self._workers,
            self._loaded_tasks,
            self._cache,
            self._open_store,
            self._chain.clock.now_s,
        )
        self._verifier = Verifier(
            identity=self._identity,
            engine=self.engine,
            workers=self._workers,
            loaded_tasks=self._loaded_tasks,
            cache=self._cache,
            committee_client=committee_client,
            open_store=lambda order, sources: open_verification_logs(
                *(self._gateway, lambda: self._http.session, order, sources),
                now_s=self._chain.clock.now_s,
            ),
            patience=LogPatience(is_drawn=True, now_s=self._chain.clock.now_s),
            committees=self._committees,
        )

    @property
    def endpoint(self) -> str:
        """Return the endpoint at which others reach the node, "" while there is none."""
        return self.reachability.endpoint if self.reachability is not None else ""

    # ---- running -------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set; an unexpected error in one of the loops ends the node."""
        if (reachability := self.reachability) is None:
            raise ConfigurationError("find_endpoint must be called before run")
        self._resume()
        loops = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in (
                ("heartbeats", self._presence.send_heartbeats()),
                ("logs", self._every(tuning.FLUSH_PERIOD_S, self._flush_logs)),
                ("housekeeping", self._every(limits.HEARTBEAT_PERIOD_S, self._keep_house)),
                ("clock", self._every(tuning.CLOCK_PERIOD_S, self._chain.fetch_head)),
                ("committee", self._every(tuning.COMMITTEE_CACHE_S, self._refresh_committee)),
                ("placement", self._presence.place_tasks()),
                ("worker", self._watch_worker()),
                ("reports", self._reporter.run()),
                ("stake", self._every(tuning.DISTRIBUTE_PERIOD_S, self._look_at_stake)),
                ("verification", self._verifier.run()),
                ("endpoint", reachability.follow()),
                ("reachability", reachability.run()),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *loops], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            stopping.cancel()
            running = sum(
                not one.life.is_over for one in self.engine.table.by_id.values() if one.parts
            )
            _log.info("stopping; executions that run here: %d", running)
            if all(not task.done() for task in loops):  # stopped on request, not by an error
                await self.engine.leave()
            await self.engine.close()
            _log.info("stopping; the connections of executions are closed")
            await reachability.close()
            if self._background.tasks:  # completions are being written to the journal
                await asyncio.wait(self._background.tasks, timeout=tuning.WORKER_STOP_S)
            await cancel(*loops, *self._background.tasks, *self._accepting.values())
            with contextlib.suppress(SplitUpError):
                self._write_status(running=False)
            _log.info("stopped")

    async def find_endpoint(self, server: Server, listed: str) -> None:
        """Find out how the node is reached; have the registry list that instead of ``listed``."""
        self.reachability = Reachability(
            self._identity.address,
            Tunnel(self._identity, self.engine.acceptor, server.local_url),
            self._http,
            self._chain,
            lambda: self._committee,
            mode=self._config.relay,
            direct=self._config.endpoint or server.url,
            listed=listed,
        )
        await self.reachability.choose()
        await self.reachability.list_endpoint()

    def _resume(self) -> None:
        """Take up what the journal holds: complete ended executions, report completed ones."""
        for lost in read_unreported(self._journal, self._chain.clock.now_s()):
            execution_id = lost.certificate.plan.request.execution_id
            _log.warning(
                "execution %s was interrupted by the end of the node's last run", execution_id
            )
            self.engine.refuse(lost.certificate, "the node was restarted and lost its state")
            if lost.end is not None and lost.end.end.steps:
                self._background.start(self._recover(lost))
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
        self._presence.note_ping()
        return web.json_response({"node": self._identity.address})

    async def _handle_plan(self, request: web.Request) -> web.Response:
        certificate = await read_unsigned(request, api.PLAN_CERTIFICATE)
        digest = certificate.digest("splitup/certificate/v1")  # a forged one is another task
        accepting = self._accepting.get(digest)
        if accepting is None:
            accepting = asyncio.create_task(self._accept_plan(certificate))
            self._accepting[digest] = accepting
            accepting.add_done_callback(lambda _: self._accepting.pop(digest, None))
            accepting.add_done_callback(_log_refusal)
        await asyncio.wait({accepting}, timeout=tuning.PLAN_ANSWER_S)
        if not self.engine.is_expected(certificate):
            await asyncio.shield(accepting)
        return web.json_response({})  # a client asks the engine how far loading is

    async def _accept_plan(self, certificate: PlanCertificate) -> None:
        """Check a plan and begin its execution. Members and clients may send it more than once."""
        plan = certificate.plan
        execution_id = plan.request.execution_id
        running = self.engine.table.by_id.get(execution_id)
        if running is not None and running.certificate.plan.root() == plan.root():
            return
        if self.engine.table.is_known(execution_id):
            raise Refused(f"execution {execution_id} is over on this node", status=409)
        if plan.request.market != self._chain.deployment.market:
            raise PeerFault(f"the plan of {execution_id} is for another market")
        if plan.request.deadline <= self._chain.clock.now_s():
            raise PeerFault(f"the deadline of {execution_id} has passed")
        plan.node_of(self._identity.address)
        await self._committees.check_certificate(certificate)
        with self.engine.table.parties.expect(certificate):
            manifest = await self._cache.fetch_manifest(plan.request.model_id)
            try:
                self._health.check()
                # the tasks stay loaded until the engine has started the execution
                async with contextlib.AsyncExitStack() as stack:
                    for index, executor in enumerate(plan.executors()):
                        if executor == self._identity.address and index < len(manifest.tasks):
                            use = self._loaded_tasks.use(plan.request.model_id, index)
                            await stack.enter_async_context(use)
                    if not self.engine.table.is_known(
                        execution_id
                    ):  # by another of its certificates
                        self.engine.start(certificate, manifest)
            except SplitUpError as error:
                self.engine.refuse(certificate, str(error))
                raise

    async def _handle_verify(self, request: web.Request) -> web.Response:
        order = await read_unsigned(request, api.VERIFICATION_ORDER)
        await self._verifier.accept(order)
        return web.json_response({})

    def on_begun(self, execution: Execution) -> None:
        """Write an assignment to the journal, so that a restart finds it (called by the engine)."""
        value = {"certificate": execution.certificate.model_dump(mode="json")}
        self._background.start(self._note(execution, value))

    async def _note(self, execution: Execution, value: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._journal.put, "assignment", execution.id, value)
        except Unavailable as error:
            self._health.note_journal(error)
            self.engine.table.fail(execution.id, 0, 0, self._health.trouble)

    def on_taken(self, execution: Execution, signed: SignedTakeover) -> None:
        """Tell the members that this node takes a task over (called by the engine)."""
        self._tell_takeover(execution, signed, is_replaced=False)
        if execution.id not in self._watched:
            self._watched.add(execution.id)
            self._background.start(self._watch_taken(execution, signed))

    def on_replaced(self, execution: Execution, signed: SignedTakeover) -> None:
        """Answer the members, who wait for it (called by the engine)."""
        self._tell_takeover(execution, signed, is_replaced=True)

    async def _watch_taken(self, execution: Execution, signed: SignedTakeover) -> None:
        def stop() -> None:
            task, step = signed.takeover.task, signed.takeover.first_step
            self.engine.table.fail(
                execution.id, task, step, "the execution has been settled already"
            )

        try:
            await self._reporter.watch_taken(
                execution.id, execution.deadline_s, lambda: execution.life.is_over, stop
            )
        finally:
            self._watched.discard(execution.id)

    def _tell_takeover(
        self, execution: Execution, signed: SignedTakeover, *, is_replaced: bool
    ) -> None:
        """Tell the members of a takeover at once, and of those that follow soon together.

        A client may sign thousands.
        """
        key = execution.id, is_replaced
        if key in self._untold:
            self._untold[key].append(signed)
            return
        self._untold[key] = []
        self._send_takeovers(execution, (signed,), is_replaced=is_replaced)
        self._background.start(self._tell_rest(execution, is_replaced=is_replaced))

    async def _tell_rest(self, execution: Execution, *, is_replaced: bool) -> None:
        await asyncio.sleep(tuning.TAKEOVERS_GATHER_S)
        rest = self._untold.pop((execution.id, is_replaced))
        for start in range(0, len(rest), limits.MAX_TASKS):
            some = rest[start : start + limits.MAX_TASKS]
            self._send_takeovers(execution, some, is_replaced=is_replaced)

    def _send_takeovers(
        self, execution: Execution, takeovers: Sequence[SignedTakeover], *, is_replaced: bool
    ) -> None:
        """Send members takeovers; a node that was replaced shows how many steps are signed for."""
        claims = execution.claims
        message = Takeovers(
            execution_id=execution.id,
            node=execution.node,
            takeovers=tuple(takeovers),
            order=make_order(claims.order) if is_replaced and claims.order is not None else "",
            end=claims.acknowledged if is_replaced else None,
        )
        self._background.start(self._reporter.tell_takeovers(message, execution.deadline_s))

    def on_ended(self, execution: Execution) -> None:
        """Write an execution's end to the journal, so that a restart can complete it."""
        self._background.start(self._note_end(execution, make_end_value(execution)))

    async def _note_end(self, execution: Execution, value: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._journal.put, "ended", execution.id, value)
        except SplitUpError as error:
            _log.error("the end of %s cannot be written to the journal: %s", execution.id, error)

    def on_finished(self, execution: Execution) -> None:
        """Report a finished execution (called by the engine)."""
        self._submit(execution, is_held=not execution.parts)

    def _submit(self, execution: Execution, *, is_held: bool = False) -> None:
        submission = None
        claims = execution.claims
        if completions := claims.make_completions(partial(secrets.token_bytes, 32)):
            order = "" if claims.order is None else make_order(claims.order)
            submission = self._reporter.submit(
                completions, execution.deadline_s, order, is_held=is_held
            )
        self._background.start(self._report(execution, submission))

    def on_failed(self, execution: Execution) -> None:
        """Report what a failed execution earned before; forget its assignment (by the engine)."""
        claims = execution.claims
        if execution.life.is_over and (signed := claims.find_substitute()) is not None:
            self._send_takeovers(execution, (), is_replaced=True)
            claims.conclude(signed)
            self._submit(execution, is_held=True)
        else:
            self._background.start(self._report(execution, None))

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

    async def _is_leaving(self) -> bool:
        """Return whether the owner wants the stake back, or has taken it."""
        entry = await self._chain.call("nodes", "nodeOf", self._identity.address)
        return bool(entry["unbondingAt"]) or not entry["stake"]

    async def _look_at_stake(self) -> None:
        entry = await self._chain.call("nodes", "nodeOf", self._identity.address)
        if problem := await find_low_stake(self._chain, entry, self._config):
            _log.warning("this node gets no work: %s", problem)
        await self._reporter.release_stake(entry)

    async def _refresh_committee(self) -> None:
        self._committee = await self._committees.fetch_current()

    async def _watch_worker(self) -> None:
        """Replace a worker that died, load its tasks again, and go on with the devices there are.

        A device that stays away is tried again and again, while the others work.
        """
        pause_s = tuning.LINK_RETRY_MIN_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s if self._workers.problem else None):
                    await self._workers.wait_lost()
                    self._loaded_tasks.forget_programs()
                    self._health.note_workers(self._workers.problem)
                    self.engine.on_worker_lost(self._workers.problem)
                    await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, tuning.RPC_BACKOFF_MAX_S)
            self.device = await self._workers.restart()
            self._health.note_workers(self._workers.problem)
            if not self._workers.is_running:
                continue
            try:
                await self._loaded_tasks.reload()
            except WorkerLost as error:
                _log.error("%s; another worker is started", error)
                continue
            self.engine.resume()

    # ---- status ---------------------------------------------------------------------------------

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
        """Write what has changed; without a change, that the daemon still runs."""
        values, now = {"running": running, **self.get_status()}, time.monotonic()
        if values != self._written or now >= self._write_again_at:
            try:
                write_status(self._config.data_dir, values)
            except Unavailable:
                if self._health.trouble:  # which was logged, once
                    return
                raise
            self._written, self._write_again_at = values, now + REWRITE_S

    def get_status(self) -> dict[str, Any]:
        """Return what the node does, as a JSON object."""
        return {
            "pid": os.getpid(),
            "address": self._identity.address,
            "endpoint": self.endpoint,
            "relay": self.reachability.relay if self.reachability is not None else "",
            "reach_problem": self.reachability.problem if self.reachability is not None else "",
            "boot_id": self._presence.boot_id,
            "device": self.device,
            "resident": [
                {"task_id": t.task_id, "label": t.label, "vram_bytes": t.vram_bytes}
                for t in self._loaded_tasks.tasks
            ],
            "loading": self._loaded_tasks.loading,
            "not_loaded": self._presence.list_problems(),
            "trades": list(self._presence.trades),
            "vram_bytes": int(self._config.vram),
            "vram_used_bytes": self._loaded_tasks.used_bytes,
            "queue_ms": self.engine.step_loop.queue_ms,
            "speed_mflops": self.engine.step_loop.speed_mflops,
            "bandwidth_kbps": self._cache.bandwidth_kbps,
            "executions": sum(not e.life.is_over for e in self.engine.table.by_id.values()),
            "sessions": sum(bool(e.state_bytes) for e in self.engine.table.by_id.values()),
            "state_bytes": sum(e.state_bytes for e in self.engine.table.by_id.values()),
            "state_limit_bytes": self._loaded_tasks.state_limit_bytes,
            "verified": self._verifier.done,
            "work": self.engine.step_loop.live.to_dict(),
            "work_again": self.engine.step_loop.background.to_dict(),
            "verifications": list(self._verifier.latest),
            "worker_restarts": self._workers.restarts,
            "warnings": self._health.warnings,
        }


def _log_refusal(accepting: asyncio.Task[None]) -> None:
    """Log why a plan was not accepted, also when its sender has its answer already."""
    error = None if accepting.cancelled() else accepting.exception()
    if error is not None:
        is_known = isinstance(error, SplitUpError)
        _log.warning("a plan is not run here: %s", error, exc_info=None if is_known else error)
