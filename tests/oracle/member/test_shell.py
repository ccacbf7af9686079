"""A member goes on when another party refuses its request."""

from __future__ import annotations

from typing import Any

from splitup_oracle.member.shell import Member

from splitup.core.errors import Refused
from splitup.protocol.committee.events import Event, RttMeasured


class RefusingClient:
    """An HTTP client whose every server refuses."""

    async def post_json(self, url: str, body: Any, *, timeout_s: float) -> dict[str, Any]:
        raise Refused("not now", status=409)

    async def get_json(self, url: str, *, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        raise Refused("not here", status=404)


def make_member(events: list[Event]) -> Member:
    member = object.__new__(Member)  # no chain, no journal: only what sends requests to nodes
    member._node_http = RefusingClient()  # type: ignore[assignment]
    member.feed = events.append  # type: ignore[method-assign]
    return member


async def test_a_plan_that_a_node_refuses_counts_as_not_delivered() -> None:
    assert not await make_member([])._post("http://node", {}, 1.0)


async def test_a_node_that_refuses_a_ping_is_unreachable() -> None:
    events: list[Event] = []
    await make_member(events).probe("0xab", "http://node")
    assert events == [RttMeasured("0xab", None)]
