"""Recomputes tasks that the committee drew, from stored inputs and zero state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from splitup import limits
from splitup.crypto.keys import Identity
from splitup.errors import PeerFault, SplitUpError, Unavailable
from splitup.graph.manifest import Manifest
from splitup.net.http import SignedClient
from splitup.protocol.certificates import CommitteeView, check_certificate, check_draw
from splitup.protocol.keys import Segment, iter_segments
from splitup.protocol.routes import get_sources
from splitup.protocol.selection import rank_validators
from splitup.protocol.verification import is_sampled
from splitup.wire import CLIENT, Grant, Grants, VerificationOrder, VerificationResult
from splitup_node.cache import Cache
from splitup_node.engine import Engine
from splitup_node.logs import Digests
from splitup_node.residents import Residents
from splitup_node.supervisor import WorkerLost
from splitup_node.workers import Workers

RESULT_TYP = "splitup-verification-result"

_log = logging.getLogger("splitup.node.verifier")


@dataclass(frozen=True, slots=True)
class Tools:
    """What the verifier uses of the node."""

    identity: Identity
    engine: Engine
    supervisor: Workers
    residents: Residents
    cache: Cache
    http: SignedClient
    ask_grants: Callable[[VerificationOrder], Awaitable[Grants]]
    get_object: Callable[[Grant, int, str | None], Awaitable[bytes]]
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
        task = manifest.tasks[order.task]
        program = await tools.residents.ensure(model_id, order.task)
        grants = await tools.ask_grants(order)
        streams = [
            self._read_steps(order, source, port.nbytes, grants)
            for source, port in zip(get_sources(manifest, order.task), task.inputs, strict=True)
        ]
        digests = Digests(len(task.inputs), len(task.outputs))
        session, worker = tools.engine.new_session(), tools.supervisor.restarts
        try:
            for _ in range(order.steps):
                inputs = [await anext(stream) for stream in streams]
                if tools.supervisor.restarts != worker:  # zero state now would accuse the honest
                    raise WorkerLost("the worker was lost during a verification")
                answer = await tools.engine.run_background(session, program, inputs)
                digests.add_inputs(list(inputs))
                digests.add_outputs(list(answer.outputs))
        finally:
            tools.supervisor.drop([session])
            for stream in streams:
                await stream.aclose()
        return digests.inputs, digests.outputs

    async def _read_steps(
        self, order: VerificationOrder, source: tuple[int, int], tensor_bytes: int, grants: Grants
    ) -> AsyncGenerator[memoryview, None]:
        """Yield one port's tensors step by step, one segment in memory at a time."""
        request = order.certificate.plan.request
        task, port = source
        for segment in iter_segments(request.execution_id, task, port, tensor_bytes, request.steps):
            data = memoryview(await self._fetch(segment, grants))
            for step in range(segment.steps):
                yield data[step * tensor_bytes : (step + 1) * tensor_bytes]

    async def _fetch(self, segment: Segment, grants: Grants) -> bytes:
        data = await self._tools.get_object(
            grants.find("GET", segment.key), segment.length, None
        )  # what the digest has to be, the committee compares
        if len(data) != segment.length:
            who = "the client" if segment.task == CLIENT else f"task {segment.task}"
            raise PeerFault(f"the log of {who} at {segment.key} has {len(data)} bytes")
        return data

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
    if not is_sampled(draw.seed, order.task, sampling_bps):
        raise PeerFault(f"{where}: the draw does not pick this task")
    if node not in rank_validators(draw.seed, order.task, plan, order.snapshot, manifest):
        raise PeerFault(f"{where}: {node} is not among its validators")
    check_certificate(order.certificate, committee)
    check_draw(draw, committee)
