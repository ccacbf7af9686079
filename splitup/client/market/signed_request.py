"""Signed requests: executions on a frozen balance, planned before a block contains the request.

The members accept one such request of an account at a time, until the chain contains it. The
client sends them one at a time, and the next as soon as the one before is on chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from splitup.chain.client import Chain
from splitup.chain.market import Status
from splitup.client.market.plan_requests import Wanted, fetch_certificate
from splitup.client.market.receipts import fetch_status
from splitup.core.background import cancel
from splitup.core.errors import InvalidInput, PeerFault, Refused, SplitUpError
from splitup.crypto.keys import Identity
from splitup.messages import api
from splitup.messages.plans import PlanCertificate, Request, SignedRequest
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from splitup.protocol.planning.signed_requests import is_same, sign_request

_RETRY_S: Final = 0.1  # a member may not have seen yet that our last request is on chain
_POLL_S: Final = 0.25
_PATIENCE_S: Final = 5.0  # after the deadline: one block, and the delay of the RPC endpoint


async def is_frozen(chain: Chain, account: str, deadline: int, now_s: int) -> bool:
    """Return whether the account's balance is frozen for signed requests until after ``deadline``.

    Raises InvalidInput when it is frozen, but not for long enough.
    """
    until = int(await chain.call("market", "frozenUntil", account))
    if until <= now_s:
        return False
    if until <= deadline:
        raise InvalidInput(
            f"your balance is frozen for {until - now_s} s more, and the deadline is "
            f"{deadline - now_s} s away; freeze it for longer (splitup deposit --freeze), or wait"
        )
    return True


async def make_request(chain: Chain, identity: Identity, request: Request) -> SignedRequest:
    """Return the request on the latest snapshot, signed."""
    latest = await chain.call("committee", "latestSnapshot")
    snapshot = {"snapshot_sequence": latest["sequence"], "snapshot_root": latest["root"]}
    return sign_request(identity, request.model_copy(update=snapshot))


async def fetch_signed_plan(
    http: SignedClient,
    fetch_committee: Callable[[], Awaitable[CommitteeView]],
    wanted: Wanted,
    signed: SignedRequest,
    *,
    timeout_s: float,
) -> PlanCertificate:
    """Send a signed request to all members and return its plan.

    Raises InvalidInput when f + 1 members refuse it, Unavailable when there is no plan in time,
    PeerFault for a plan of something else.
    """
    committee = await fetch_committee()
    tolerated = (len(committee.members) - 1) // 3
    refusals: list[str] = []
    refused = asyncio.Event()

    async def tell(member: MemberView) -> None:
        while True:
            try:
                await http.post_json(api.SIGNED_REQUEST.url(member.endpoint), signed)
                return
            except Refused as error:
                refusals.append(str(error))
                if len(refusals) > tolerated:
                    refused.set()
                return
            except SplitUpError:
                await asyncio.sleep(_RETRY_S)

    telling = [asyncio.create_task(tell(member)) for member in committee.members]
    listening = asyncio.create_task(
        fetch_certificate(http, fetch_committee, wanted, timeout_s=timeout_s)
    )
    refusal = asyncio.create_task(refused.wait())
    try:
        await asyncio.wait([listening, refusal], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            raise InvalidInput(refusals[-1])
        certificate = listening.result()
        if not is_same(certificate.plan.request, signed.request):
            raise PeerFault(f"the plan of {wanted.execution_id} is for another request than ours")
        return certificate
    finally:
        await cancel(*telling, listening, refusal)


async def wait_until_open(chain: Chain, wanted: Wanted) -> bool:
    """Wait for an execution to be on chain; return False when its deadline passed before."""
    while True:
        try:
            if await fetch_status(chain, wanted.execution_id) is not Status.UNKNOWN:
                return True
            if (await chain.fetch_head()).timestamp > wanted.request.deadline + _PATIENCE_S:
                return False
        except SplitUpError:
            pass  # ask again; until it answers no other request may be signed
        await asyncio.sleep(_POLL_S)
