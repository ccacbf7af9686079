"""Recomputes tasks that the committee drew, from stored inputs and zero state.

The result is committed to before anybody reveals anything, and revealed with everybody else's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from splitup import limits
from splitup.crypto.keys import Identity
from splitup.errors import PeerFault, SplitUpError, Unavailable
from splitup.graph.manifest import Manifest
from splitup.protocol.certificates import CommitteeView, check_certificate, check_draw
from splitup.protocol.keys import Segment, decode_record, iter_segments, measure_record
from splitup.protocol.routes import get_sources
from splitup.protocol.selection import rank_validators
from splitup.protocol.verification import is_sampled
from splitup.tensors import TensorSpec
from splitup.wire import (
    CLIENT,
    EMPTY_DIGEST,
    Grant,
    Grants,
    VerificationCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup_node.cache import Cache
from splitup_node.engine import Engine
from splitup_node.heralds import Herald
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
    herald: Herald
    ask_grants: Callable[[VerificationOrder], Awaitable[Grants]]
    get_object: Callable[[Grant, int, str | None], Awaitable[bytes]]
    get_committee: Callable[[], CommitteeView]


class Verifier:
    """Takes orders that prove themselves, one after the other."""

    def __init__(self, tools: Tools, sampling_bps: int) -> None:
        self._tools = tools
        self._sampling_bps = sampling_bps
        self._orders: asyncio.Queue[VerificationOrder] = asyncio.Queue(limits.MAX_ORDERS)
        self._known: dict[tuple[str, int], None] = {}
        self._reporting: set[asyncio.Task[None]] = set()
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
        """Work off orders, for ever. Results wait for their time beside the next order."""
        try:
            while True:
                order = await self._orders.get()
                result = await self._verify(order)
                task = asyncio.create_task(self._report(order, result))
                self._reporting.add(task)
                task.add_done_callback(self._on_reported)
        finally:
            for task in self._reporting:
                task.cancel()
            await asyncio.gather(*self._reporting, return_exceptions=True)

    async def _verify(self, order: VerificationOrder) -> VerificationResult:
        request = order.certificate.plan.request
        found: tuple[tuple[str, ...], tuple[str, ...], str] = ((), (), EMPTY_DIGEST)
        error = ""
        try:
            found = await self._recompute(order)
        except SplitUpError as failure:
            error = str(failure)[:500]
            _log.warning("task %d of %s: %s", order.task, request.execution_id, error)
        return VerificationResult(
            execution_id=request.execution_id,
            task=order.task,
            validator=self._tools.identity.address,
            inputs=found[0],
            outputs=found[1],
            state=found[2],
            salt="0x" + secrets.token_hex(32),
            error=error,
        )

    async def _recompute(
        self, order: VerificationOrder
    ) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """Replay all steps; return the digests of inputs, outputs and final state."""
        tools = self._tools
        model_id = order.certificate.plan.request.model_id
        manifest = await tools.cache.fetch_manifest(model_id)
        task = manifest.tasks[order.task]
        program = await tools.residents.ensure(model_id, order.task)
        grants = await tools.ask_grants(order)
        streams = [
            self._read_steps(order, source, port.spec, grants)
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
            state = EMPTY_DIGEST
            if task.state_bytes and order.steps:
                state = await tools.supervisor.digest_state(session)
        finally:
            tools.supervisor.drop([session])
            for stream in streams:
                await stream.aclose()
        return digests.inputs, digests.outputs, state

    async def _read_steps(
        self, order: VerificationOrder, source: tuple[int, int], spec: TensorSpec, grants: Grants
    ) -> AsyncGenerator[memoryview, None]:
        """Yield one port's tensors step by step, one segment in memory at a time."""
        request = order.certificate.plan.request
        task, port = source
        tensor_bytes = measure_record(spec)
        for segment in iter_segments(request.execution_id, task, port, tensor_bytes, request.steps):
            data = memoryview(await self._fetch(segment, grants))
            for step in range(segment.steps):
                record = data[step * tensor_bytes : (step + 1) * tensor_bytes]
                yield decode_record(record, spec)

    async def _fetch(self, segment: Segment, grants: Grants) -> bytes:
        data = await self._tools.get_object(
            grants.find("GET", segment.key), segment.length, None
        )  # what the digest has to be, the committee compares
        if len(data) != segment.length:
            who = "the client" if segment.task == CLIENT else f"task {segment.task}"
            raise PeerFault(f"the log of {who} at {segment.key} has {len(data)} bytes")
        return data

    async def _report(self, order: VerificationOrder, result: VerificationResult) -> None:
        """Commit to a result, and show it when it is due; a failure is told at once."""
        herald = self._tools.herald
        give_up_s = order.certificate.plan.request.deadline + limits.GRANT_GRACE_S
        promise = VerificationCommitment(
            execution_id=result.execution_id,
            task=result.task,
            validator=result.validator,
            root=result.root(),
        )
        if result.error or await herald.wait_until_due(result.execution_id, promise, give_up_s):
            await herald.spread("/v1/verification", RESULT_TYP, result, give_up_s)
            self.done += 1

    def _on_reported(self, task: asyncio.Task[None]) -> None:
        self._reporting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a verification could not be reported", exc_info=error)


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
