"""The evidence behind a settlement: fetched from the members, checked against the chain."""

from __future__ import annotations

import asyncio
from typing import Final

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.client.market.member_answers import ask_in_turn
from splitup.client.market.receipts import Receipt
from splitup.core.errors import PeerFault, Unavailable
from splitup.messages import api
from splitup.messages.verification import Evidence
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView, MemberView, check_draw
from splitup.protocol.settlement.evidence import compute_evidence_root
from splitup.protocol.settlement.proof_of_sampling import get_sampled_tasks

PATIENCE_S: Final = 5.0  # a member looks at its chain many times in this time
_PAUSE_S: Final = 0.1


def check_evidence(
    evidence: Evidence, receipt: Receipt, task_count: int, committee: CommitteeView
) -> None:
    """Raise PeerFault unless the evidence has the root that the receipt took from the chain.

    There must be a verdict on every task that the draw picks of the model's ``task_count`` with the
    share that the client asked for. Tasks that misled their readers have one without a draw.
    """
    if evidence.draw.execution_id != receipt.execution_id:
        raise PeerFault(f"the evidence is not of execution {receipt.execution_id}")
    if evidence.draw.steps != receipt.steps:
        raise PeerFault(f"{receipt.execution_id} was settled for other steps than were drawn")
    if compute_evidence_root(evidence) != receipt.evidence_root:
        raise PeerFault(f"the evidence of {receipt.execution_id} is not what the chain holds")
    check_draw(evidence.draw, committee)
    draw = evidence.draw
    drawn = set(get_sampled_tasks(draw, task_count, receipt.verify_bps))
    if draw.executors:  # who did not commit has nothing that could be verified, and no pay
        committed = dict(draw.commitments)
        drawn -= {t for t, node in enumerate(draw.executors) if node not in committed}
    if not drawn <= {verdict.task for verdict in evidence.verdicts}:
        raise PeerFault(f"the evidence of {receipt.execution_id} lacks a task that was drawn")


async def find_evidence(
    chain: Chain, committees: Committees, http: SignedClient, receipt: Receipt
) -> Evidence:
    """Return the drawn tasks of a settled execution and their verdicts, checked.

    Raises Unavailable as ``fetch_evidence``, and ChainUnavailable.
    """
    committee, model = await asyncio.gather(
        committees.fetch_of(receipt.execution_id),
        chain.call("models", "modelOf", receipt.model_id),
    )
    return await fetch_evidence(http, committee, receipt, model["taskCount"])


async def fetch_evidence(
    http: SignedClient, committee: CommitteeView, receipt: Receipt, task_count: int
) -> Evidence:
    """Return the draw and verdicts of a settled execution from the first member that has them.

    A member may see the settling block a moment after we did, so all are asked again for a while.
    Raises Unavailable when no member has them: they keep only recent settlements.
    """
    if receipt.status != "settled":
        raise Unavailable(f"execution {receipt.execution_id} was not settled: it has no evidence")

    async def ask(member: MemberView) -> Evidence:
        url = api.EVIDENCE.url(member.endpoint, execution_id=receipt.execution_id)
        evidence = Evidence.from_value(await http.get_json(url))
        check_evidence(evidence, receipt, task_count, committee)
        return evidence

    give_up = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            what = f"the evidence of {receipt.execution_id}"
            return await ask_in_turn(committee.members, what, ask)
        except Unavailable:
            if asyncio.get_running_loop().time() > give_up:
                raise
        await asyncio.sleep(_PAUSE_S)
