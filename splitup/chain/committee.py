"""Reading the committee: one consistent view of what the Committee contract says."""

from __future__ import annotations

import asyncio
from typing import Any

from splitup.chain.client import Chain
from splitup.crypto.bls import decode_public_key_eip2537
from splitup.crypto.quorum import Domain
from splitup.errors import ChainUnavailable
from splitup.protocol.certificates import CommitteeMember, CommitteeView
from splitup.protocol.messages import Equivocation, PlanVote, SnapshotVote

_TRIES = 3


def make_report(evidence: Equivocation) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return which function of the Bonds contract takes an equivocation, and its two votes."""
    votes = [_make_vote(vote) for vote in (evidence.first, evidence.second)]
    function = "reportSnapshots" if isinstance(evidence.first, SnapshotVote) else "reportPlans"
    return function, votes[0], votes[1]


def _make_vote(vote: SnapshotVote | PlanVote) -> dict[str, Any]:
    signature = bytes.fromhex(vote.signature[2:])
    if isinstance(vote, SnapshotVote):
        return {
            "configuration": vote.configuration,
            "sequence": vote.sequence,
            "epoch": vote.epoch,
            "root": vote.root,
            "signature": signature,
        }
    return {
        "executionId": vote.execution_id,
        "planRoot": vote.root,
        "tail": bytes.fromhex(vote.seed[2:]) + vote.executors.to_bytes(32),
        "signature": signature,
    }


async def fetch_committee(chain: Chain) -> CommitteeView:
    """Return members, quorum and group key of one configuration; raise ChainUnavailable."""
    for _ in range(_TRIES):
        before, members, quorum, group_key, after = await asyncio.gather(
            chain.call("committee", "configuration"),
            chain.call("committee", "members"),
            chain.call("committee", "quorum"),
            chain.call("committee", "groupKey"),
            chain.call("committee", "configuration"),
        )
        if before == after:
            break
    else:
        raise ChainUnavailable("the committee's members keep changing; try again in a minute")
    return CommitteeView(
        configuration=before,
        members=tuple(
            CommitteeMember(
                account=member["account"],
                signing_key=member["signingKey"],
                endpoint=member["endpoint"],
            )
            for member in members
        ),
        quorum=quorum,
        group_key=decode_public_key_eip2537(group_key) if group_key else "",
        domain=Domain(
            chain_id=chain.deployment.chain_id, committee=chain.deployment.committee.lower()
        ),
    )
