"""What members show: plans and snapshots, each from the first that has a valid one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from splitup.chain.client import Chain
from splitup.core.errors import PeerFault, SplitUpError, Unavailable
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import PlanCertificate
from splitup.messages.snapshots import Snapshot
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView, MemberView, check_certificate

T = TypeVar("T")


async def ask_in_turn(
    members: Sequence[MemberView], what: str, ask: Callable[[MemberView], Awaitable[T]]
) -> T:
    """Return the first answer that ``ask`` accepts; raise Unavailable with the last problem."""
    problem = "the committee has no members"
    for member in members:
        try:
            return await ask(member)
        except SplitUpError as error:
            problem = str(error)
    raise Unavailable(f"no member shows {what}: {problem}")


async def fetch_plan(
    http: SignedClient, committee: CommitteeView, execution_id: str
) -> PlanCertificate:
    """Return an execution's certificate from the first member that has a valid one.

    Raises Unavailable when none has it: members keep only the plans of recent executions.
    """

    async def ask(member: MemberView) -> PlanCertificate:
        value = await http.get_json(api.PLAN.url(member.endpoint, execution_id=execution_id))
        certificate = PlanCertificate.from_value(value)
        if certificate.plan.request.execution_id != execution_id:
            raise PeerFault(f"member {member.account} shows the plan of another execution")
        check_certificate(certificate, committee)
        return certificate

    return await ask_in_turn(committee.members, f"the plan of {execution_id}", ask)


async def fetch_snapshot(http: SignedClient, members: Sequence[MemberView], root: str) -> Snapshot:
    """Return the snapshot with this root from the first member that has it; raise Unavailable."""

    async def ask(member: MemberView) -> Snapshot:
        url = api.SNAPSHOT.url(member.endpoint, root=root)
        value = await http.get_json(url, max_bytes=api.SNAPSHOT.max_reply_bytes)
        snapshot = await asyncio.to_thread(Snapshot.from_value, value)
        if snapshot.root() != root:
            raise PeerFault(f"member {member.account} shows another snapshot than {root}")
        return snapshot

    return await ask_in_turn(members, f"the snapshot {root}", ask)


async def fetch_latest_snapshot(
    chain: Chain, http: SignedClient, members: Sequence[MemberView]
) -> Snapshot | None:
    """Return the latest list of live nodes on chain, None before the first; raise Unavailable."""
    root = str((await chain.call("committee", "latestSnapshot"))["root"])
    if root == ZERO_BYTES32:
        return None
    return await fetch_snapshot(http, members, root)
