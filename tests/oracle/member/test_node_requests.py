"""A node that refuses a request of a member counts as not reached."""

from __future__ import annotations

from typing import Any

from splitup_oracle.member.node_requests import NodeRequests

from splitup.core.errors import Refused, Unavailable
from splitup.protocol.committee.commands import PushPlan
from tests.protocol.machines import EXECUTION, make_plan_context


class RefusingClient:
    """An HTTP client whose every server refuses."""

    async def post_json(self, url: str, body: Any, *, timeout_s: float) -> dict[str, Any]:
        raise Refused("not now", status=409)

    async def get_json(self, url: str, *, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        raise Refused("not here", status=404)


class BusyClient(RefusingClient):
    """An HTTP client whose server is too busy at first."""

    pings = 0

    async def get_json(self, url: str, *, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        self.pings += 1
        if self.pings == 1:
            raise Unavailable(f"{url} did not answer within {timeout_s} s")
        return {}


def make_requests(client: Any = None) -> NodeRequests:
    return NodeRequests(client or RefusingClient(), chain=None)  # type: ignore[arg-type]


async def test_a_plan_that_a_node_refuses_counts_as_not_delivered() -> None:
    certificate = make_plan_context().certificate
    nodes = certificate.plan.nodes
    pushed = await make_requests().push_plan(PushPlan(certificate, nodes))
    assert pushed.execution_id == EXECUTION
    assert pushed.unreached == tuple(node.node for node in nodes)


async def test_a_node_that_refuses_a_ping_is_unreachable() -> None:
    assert await make_requests().measure_rtt("0xab", "http://node") is None


async def test_a_node_that_missed_one_ping_is_reachable() -> None:
    """Else one busy moment would keep all work from it until the next probe, seconds later."""
    assert await make_requests(BusyClient()).measure_rtt("0xab", "http://node") is not None
