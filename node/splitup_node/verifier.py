"""Recomputes tasks that the committee drew, from stored inputs and zero state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from splitup import limits
from splitup.crypto.keys import Identity
from splitup.errors import PeerFault, SplitUpError, Unavailable
from splitup.graph.manifest import Manifest
from splitup.net.http import SignedClient
from splitup.net.logs import LogStore
from splitup.protocol.certificates import CommitteeView, check_certificate, check_draw
from splitup.protocol.selection import rank_validators
from splitup.protocol.verification import is_sampled
from splitup.wire import VerificationOrder, VerificationResult
from splitup_node.cache import Cache
from splitup_node.engine import Engine
from splitup_node.recompute import recompute
from splitup_node.residents import Residents
from splitup_node.supervisor import Supervisor

RESULT_TYP = "splitup-verification-result"

_log = logging.getLogger("splitup.node.verifier")


@dataclass(frozen=True, slots=True)
class Tools:
    """What the verifier uses of the node."""

    identity: Identity
    engine: Engine
    supervisor: Supervisor
    residents: Residents
    cache: Cache
    http: SignedClient
    open_store: Callable[[VerificationOrder], LogStore]
    get_committee: Callable[[], CommitteeView]


class Verifier:
    """Takes orders that prove themselves, one after the other; tells every member the result."""

    def __init__(self, tools: Tools, sampling_bps: int) -> None:
        self._tools = tools
        self._sampling_bps = sampling_bps
        self._orders: asyncio.Queue[VerificationOrder] = asyncio.Queue(limits.MAX_ORDERS)
        self._known: dict[tuple[str, int], None] = {}
        self.done = 0

    async def accept(self, order: VerificationOrder) -> None:
        """Queue an order; one that is known already changes nothing.

        Raises PeerFault or BadSignature unless certificate and draw are the committee's and name
        this node, Unavailable when too many orders wait.
        """
        key = (order.certificate.plan.request.execution_id, order.task)
        if key in self._known:
            return
        manifest = await self._tools.cache.fetch_manifest(order.certificate.plan.request.model_id)
        await asyncio.to_thread(
            check_order,
            order,
            manifest,
            self._tools.get_committee(),
            self._sampling_bps,
            self._tools.identity.address,
        )
        if key in self._known:
            return
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            raise Unavailable("this node has too many verifications waiting; ask another") from None
        self._known[key] = None
        while len(self._known) > limits.MAX_FINISHED:
            self._known.pop(next(iter(self._known)))

    async def run(self) -> None:
        """Work off orders, for ever."""
        while True:
            order = await self._orders.get()
            result = await self._verify(order)
            await self._report(result)
            self.done += 1

    async def _verify(self, order: VerificationOrder) -> VerificationResult:
        request = order.certificate.plan.request
        inputs: tuple[str, ...] = ()
        outputs: tuple[str, ...] = ()
        error = ""
        try:
            inputs, outputs = await self._recompute(order)
        except SplitUpError as failure:
            error = str(failure)[:500]
            _log.warning("task %d of %s: %s", order.task, request.execution_id, error)
        return VerificationResult(
            execution_id=request.execution_id,
            task=order.task,
            validator=self._tools.identity.address,
            inputs=inputs,
            outputs=outputs,
            error=error,
        )

    async def _recompute(self, order: VerificationOrder) -> tuple[tuple[str, ...], tuple[str, ...]]:
        tools = self._tools
        model_id = order.certificate.plan.request.model_id
        manifest = await tools.cache.fetch_manifest(model_id)
        program = await tools.residents.ensure(model_id, order.task)
        plan = order.certificate.plan
        digests = await recompute(
            tools.engine,
            tools.supervisor,
            tools.open_store(order),
            plan.request,
            manifest,
            order.executors or plan.executors(),
            order.task,
            program,
            order.steps,
        )
        return digests.inputs, digests.outputs

    async def _report(self, result: VerificationResult) -> None:
        committee = self._tools.get_committee()
        token = self._tools.http.sign(RESULT_TYP, committee.domain.committee, result)
        missing = list(committee.members)
        for attempt in range(limits.RPC_TRIES):
            answers = await asyncio.gather(
                *(
                    self._tools.http.post_token(f"{m.endpoint}/v1/verification", token)
                    for m in missing
                ),
                return_exceptions=True,
            )
            pairs = list(zip(missing, answers, strict=True))
            for member, answer in pairs:
                if isinstance(answer, SplitUpError):
                    _log.info("member %s and a verification result: %s", member.account, answer)
                elif isinstance(answer, BaseException):
                    raise answer
            missing = [member for member, answer in pairs if isinstance(answer, SplitUpError)]
            if not missing:
                return
            await asyncio.sleep(limits.REPORT_RETRY_S * 2**attempt)


def check_order(
    order: VerificationOrder,
    manifest: Manifest,
    committee: CommitteeView,
    sampling_bps: int,
    node: str,
) -> None:
    """Check all that an order claims. Raises PeerFault, BadSignature. Milliseconds of CPU."""
    plan, draw = order.certificate.plan, order.draw
    request = plan.request
    where = f"verification of task {order.task} of {request.execution_id}"
    if draw.execution_id != request.execution_id:
        raise PeerFault(f"{where}: the draw is for another execution")
    if len(plan.tasks) != len(manifest.tasks) or order.task >= len(plan.tasks):
        raise PeerFault(f"{where}: the model has no such task")
    if order.steps > request.steps:
        raise PeerFault(f"{where}: {order.steps} steps are more than were paid for")
    if order.snapshot.root() != request.snapshot_root:
        raise PeerFault(f"{where}: the snapshot is not the one on chain")
    if order.executors and len(order.executors) != len(plan.tasks):
        raise PeerFault(f"{where}: it does not name an executor of every task")
    if not is_sampled(draw.seed, order.task, sampling_bps):
        raise PeerFault(f"{where}: the draw does not pick this task")
    ranking = rank_validators(
        draw.seed, order.task, plan, order.snapshot, manifest, order.executors
    )
    if node not in ranking:
        raise PeerFault(f"{where}: {node} is not among its validators")
    check_certificate(order.certificate, committee)
    check_draw(draw, committee)
