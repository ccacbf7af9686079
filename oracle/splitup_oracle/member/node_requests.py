"""Requests from a committee member to nodes: plans, verification orders, probes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from splitup.chain.client import Chain
from splitup.chain.committee_reader import fetch_node_key
from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault, Refused, Unavailable
from splitup.messages import api
from splitup.messages.snapshots import ReachRequest
from splitup.net.http import SignedClient
from splitup.protocol.committee.commands import PushPlan, PushVerification
from splitup.protocol.committee.events import PlanPushed

log = logging.getLogger("splitup.oracle")


class NodeRequests:
    """Calls nodes at the endpoints that they chose themselves. ``http`` is made for strangers."""

    def __init__(self, http: SignedClient, chain: Chain) -> None:
        self._http = http
        self._chain = chain

    async def push_plan(self, command: PushPlan) -> PlanPushed:
        """Post the certificate to the nodes, all at once; return who did not answer."""
        nodes, certificate = command.nodes, command.certificate
        data = certificate.model_dump(mode="json")
        sent = await asyncio.gather(
            *(
                self._post(api.PLAN_CERTIFICATE.url(node.endpoint), data, tuning.RTT_TIMEOUT_S)
                for node in nodes
            )
        )
        unreached = tuple(node.node for node, ok in zip(nodes, sent, strict=True) if not ok)
        return PlanPushed(certificate.plan.request.execution_id, unreached)

    async def push_verification(self, command: PushVerification) -> None:
        data = command.order.model_dump(mode="json")
        execution_id = command.order.draw.execution_id
        log.info(
            "node %s is to verify task %d of %s", command.node, command.order.task, execution_id
        )
        route = api.VERIFICATION_ORDER
        await self._post(route.url(command.endpoint), data, route.timeout_s)

    async def _post(self, url: str, data: dict[str, Any], timeout_s: float) -> bool:
        try:
            await self._http.post_json(url, data, timeout_s=timeout_s)
        except (PeerFault, Refused, Unavailable) as error:
            log.warning("%s was not accepted: %s", url, error)
            return False
        return True

    async def measure_rtt(self, node: str, endpoint: str) -> int | None:
        """Return a node's round trip in ms on an open connection, None if it is not reachable.

        One failure says little: either side may have been too busy for a moment, and no task goes
        to a node that members cannot reach. So it is tried twice.
        """
        url = api.PING.url(endpoint)
        for tries_left in (1, 0):
            try:
                await self._ping(url)
                started = time.perf_counter()
                await self._ping(url)
                return max(1, round((time.perf_counter() - started) * 1000))
            except (PeerFault, Refused, Unavailable) as error:
                if not tries_left:
                    log.info("node %s is not reachable: %s", node, error)
        return None

    async def _ping(self, url: str) -> dict[str, Any]:
        return await self._http.get_json(url, timeout_s=tuning.RTT_TIMEOUT_S, max_bytes=limits.KIB)

    async def try_reach(self, request: ReachRequest, key: str) -> str:
        """Return why a node cannot be reached at its endpoint, "" when it can.

        Raises BadSignature unless the node itself asks.
        """
        if await fetch_node_key(self._chain, request.node) != key:
            raise BadSignature(f"{key} is not the key of an active node {request.node}")
        try:
            answer = await self._ping(api.PING.url(request.endpoint))
        except (PeerFault, Refused, Unavailable) as error:
            return str(error)[: tuning.MAX_ERROR_CHARS]
        if answer.get("node") != request.node:  # a router hands its port to one of several
            return f"another host than the node answers at {request.endpoint}"
        return ""
