"""From a request to its plan: asks all members at once and checks every certificate they send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from splitup.core import limits
from splitup.core.background import cancel
from splitup.core.errors import InvalidInput, PeerFault, Refused, SplitUpError, Unavailable
from splitup.messages import api
from splitup.messages.plans import PlanCertificate, Request
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView, check_certificate

_WAIT_S: Final = 5  # how long a member waits for the plan before it answers 404
_LOOK_S: Final = 2.0  # how often we look whether the committee has changed
_PAUSE_S: Final = 0.2  # before a member that failed is asked again


# of a request: what its plan repeats, and how errors call it
_REPEATED: Final = {
    "execution_id": "execution",
    "chain_id": "chain",
    "market": "market",
    "model_id": "model",
    "client": "client",
    "client_key": "client key",
    "steps": "steps",
    "max_price_micro_usdc": "price",
    "deadline": "deadline",
    "verify_bps": "share of verified tasks",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client requested, of a model with so many tasks; snapshot and block are open."""

    request: Request
    task_count: int

    @property
    def execution_id(self) -> str:
        """Return the id of the execution."""
        return self.request.execution_id


def check_plan(certificate: PlanCertificate, wanted: Wanted, committee: CommitteeView) -> None:
    """Check a certificate against the chain's committee and against what was asked for.

    Raises PeerFault, BadSignature.
    """
    pairs = [("tasks", len(certificate.plan.tasks), wanted.task_count)]
    requests = certificate.plan.request, wanted.request
    pairs += [(what, *(getattr(r, name) for r in requests)) for name, what in _REPEATED.items()]
    for what, given, asked in pairs:
        if given != asked:
            raise PeerFault(
                f"the plan of {wanted.execution_id} has another {what} than we asked for "
                f"({given} instead of {asked})"
            )
    check_certificate(certificate, committee)


async def fetch_certificate(
    http: SignedClient,
    fetch_committee: Callable[[], Awaitable[CommitteeView]],
    wanted: Wanted,
    *,
    timeout_s: float,
) -> PlanCertificate:
    """Return the first valid certificate that any member gives; asks all of them at once.

    ``fetch_committee`` returns the execution's committee, which may change while we wait. Raises
    InvalidInput when f+1 members, of whom one is honest, say that the request cannot be planned,
    Unavailable when no member has a plan within ``timeout_s``.
    """
    problems: dict[str, str] = {}
    committee = await fetch_committee()
    ends = asyncio.get_running_loop().time() + timeout_s
    asking = asyncio.create_task(_ask_all(http, committee, wanted, problems))
    try:
        while (left_s := ends - asyncio.get_running_loop().time()) > 0:
            done, _ = await asyncio.wait([asking], timeout=min(left_s, _LOOK_S))
            if done:
                return asking.result()
            renewed = await fetch_committee()
            if renewed != committee:
                committee = renewed
                await cancel(asking)
                asking = asyncio.create_task(_ask_all(http, committee, wanted, problems))
    finally:
        await cancel(asking)
    raise Unavailable(_explain_silence(committee, wanted, list(problems.values())))


async def _ask_all(
    http: SignedClient, committee: CommitteeView, wanted: Wanted, problems: dict[str, str]
) -> PlanCertificate:
    """Ask every member until one has a valid certificate; collect their errors in ``problems``."""
    tolerated = (len(committee.members) - 1) // 3
    reasons: dict[str, str] = {}

    async def ask(endpoint: str) -> PlanCertificate:
        url = api.PLAN.url(endpoint, execution_id=wanted.execution_id, wait_s=_WAIT_S)
        most = limits.PLAN_BYTES + wanted.task_count * limits.PLAN_TASK_BYTES
        while True:
            asked_s = asyncio.get_running_loop().time()
            try:
                value = await http.get_json(url, timeout_s=_WAIT_S + 5, max_bytes=most)
                certificate = PlanCertificate.from_value(value)
                check_plan(certificate, wanted, committee)
                return certificate
            except Refused as error:
                if error.status == 409:
                    reasons[endpoint] = str(error)
                    if len(reasons) > tolerated:
                        raise InvalidInput(str(error)) from None
                    await asyncio.sleep(_WAIT_S)
                elif error.status != 404:
                    problems[endpoint] = str(error)
                    await asyncio.sleep(_PAUSE_S)
                else:  # it has waited for the plan already, or should have
                    waited_s = asyncio.get_running_loop().time() - asked_s
                    await asyncio.sleep(0 if waited_s > _PAUSE_S else _PAUSE_S)
            except SplitUpError as error:
                problems[endpoint] = str(error)
                await asyncio.sleep(_PAUSE_S)

    asking = [asyncio.create_task(ask(member.endpoint)) for member in committee.members]
    try:
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await cancel(*asking)


def _explain_silence(committee: CommitteeView, wanted: Wanted, problems: Sequence[str]) -> str:
    detail = f"; the last error: {problems[-1]}" if problems else ""
    return (
        f"none of the {len(committee.members)} committee members had a plan for "
        f"{wanted.execution_id} in time{detail}; see which members answer: splitup status"
    )
