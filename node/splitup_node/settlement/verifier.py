"""Recomputes tasks that the committee drew for verification, from stored inputs and zero state.

A validator commits to its result before anybody reveals, and reveals it together with all others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitup.chain.committee_reader import Committees
from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.errors import PeerFault, SplitUpError, Unavailable
from splitup.core.latest import Latest
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.storage import LogName
from splitup.messages.verification import (
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.protocol.committee.certificates import check_plan
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.task_queue import PortId
from splitup.protocol.planning.validators import check_validators, compares_numbers
from splitup.protocol.settlement.proof_of_sampling import is_sampled
from splitup.storage.log_store import LogPatience, LogStore, LogWriter
from splitup.storage.task_cache import TaskCache
from splitup_node.committee.committee_client import CommitteeClient
from splitup_node.execution.engine import Engine
from splitup_node.execution.kept.digests import Digests
from splitup_node.settlement.task_replay import TaskReplay, append_output, recompute
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node.verifier")


@dataclass(eq=False)
class Verifier:
    """Takes verification orders, each with its proof, and works them off one after the other."""

    identity: Identity
    engine: Engine
    workers: Workers
    loaded_tasks: LoadedTasks
    cache: TaskCache
    committee_client: CommitteeClient
    open_store: Callable[[VerificationOrder, Sequence[PortId]], LogStore]
    patience: LogPatience
    committees: Committees

    def __post_init__(self) -> None:
        self._orders: asyncio.Queue[VerificationOrder] = asyncio.Queue(tuning.MAX_ORDERS)
        self._known: Latest[tuple[str, int], None] = Latest(tuning.MAX_FINISHED)
        self._reporting = BackgroundTasks()
        self.done = 0
        self.latest: deque[dict[str, str | int]] = deque(maxlen=tuning.SHOWN_VERIFICATIONS)

    async def accept(self, order: VerificationOrder) -> None:
        """Queue an order; an order that is known already changes nothing.

        Raises PeerFault or BadSignature unless certificate and draw are the committee's and name
        this node, Unavailable when too many orders wait.
        """
        key = (order.certificate.plan.request.execution_id, order.task)
        if key in self._known:
            return
        committee = await self.committees.check_certificate(order.certificate)
        await self.committees.check_draw(order.draw, committee)
        # now: a stranger must not make this node fetch and parse manifests of its choice
        manifest = await self.cache.fetch_manifest(order.certificate.plan.request.model_id)
        node = self.identity.address
        await asyncio.to_thread(check_order, order, manifest, node)
        if key in self._known:
            return
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            raise Unavailable(
                "too many verifications wait on this node; ask another validator"
            ) from None
        self._known[key] = None

    async def run(self) -> None:
        """Work off orders, for ever. The next one begins while a result waits to be revealed."""
        try:
            while True:
                order = await self._orders.get()
                self._reporting.start(self._report(order, await self._verify(order)))
        finally:
            await self._reporting.close()

    async def _verify(self, order: VerificationOrder) -> VerificationResult:
        request = order.certificate.plan.request
        found, error = Digests(0, 0), ""
        try:
            found = await self._recompute(order)
        except SplitUpError as failure:
            error = str(failure)[:500]
            _log.warning("task %d of %s: %s", order.task, request.execution_id, error)
        return VerificationResult(
            execution_id=request.execution_id,
            task=order.task,
            validator=self.identity.address,
            inputs=found.inputs,
            outputs=found.outputs,
            state=found.state,
            salt="0x" + secrets.token_hex(32),
            error=error,
        )

    async def _recompute(self, order: VerificationOrder) -> Digests:
        model_id = order.certificate.plan.request.model_id
        manifest = await self.cache.fetch_manifest(model_id)
        sources, request = get_sources(manifest, order.task), order.certificate.plan.request
        store = self.open_store(order, sources)
        replay = TaskReplay(
            store, request, manifest, order.executors, order.task, order.steps, self.patience
        )
        node = self.identity.address
        writer = LogWriter(request.execution_id, node, store)

        async def log(step: int, outputs: Sequence[bytes | memoryview]) -> None:
            for port, data in enumerate(outputs):
                name = LogName.of(order.task, port, node, step, apart=True)
                await append_output(writer, store, name, data)

        keep = log if compares_numbers(order, manifest) else None
        try:
            async with self.loaded_tasks.use(model_id, order.task) as program:
                found = await recompute(self.engine, self.workers, program, replay, keep)
            await writer.finish()  # before the commitment: who cannot show it has none
        finally:
            await writer.close()
        return found

    async def _report(self, order: VerificationOrder, result: VerificationResult) -> None:
        """Commit to a result and reveal it when that is due; a failure is sent at once."""
        give_up_s = order.certificate.plan.request.deadline + limits.VERIFICATION_GRACE_S
        validator_commitment = ValidatorCommitment(
            execution_id=result.execution_id,
            task=result.task,
            validator=result.validator,
            root=result.root(),
        )
        if result.error or await self.committee_client.wait_until_due(
            result.execution_id, validator_commitment, give_up_s
        ):
            await self.committee_client.spread(api.VERIFICATION_RESULT, result, give_up_s)
            self.done += 1
            self.latest.append(
                {
                    "execution_id": result.execution_id,
                    "task": result.task,
                    "at_s": int(time.time()),
                    "error": result.error,
                }
            )


def check_order(order: VerificationOrder, manifest: Manifest, node: str) -> None:
    """Check everything in an order except its signatures. Raises PeerFault."""
    plan, draw = order.certificate.plan, order.draw
    request = plan.request
    where = f"verification of task {order.task} of {request.execution_id}"
    check_plan(plan)
    if draw.execution_id != request.execution_id:
        raise PeerFault(f"{where}: the draw is for another execution")
    if len(plan.tasks) != len(manifest.tasks) or order.task >= len(plan.tasks):
        raise PeerFault(f"{where}: the model has no such task")
    if not plan.has_candidates(draw.executors):
        raise PeerFault(f"{where}: the draw does not name a candidate for every task")
    if not is_sampled(draw.seed, order.task, request.verify_bps):
        raise PeerFault(f"{where}: the draw does not pick this task")
    task_id, executor = manifest.tasks[order.task].task_id, order.executors[order.task]
    if node not in check_validators(order.snapshot, plan, executor, task_id):
        raise PeerFault(f"{where}: {node} is not among its validators")
