"""Members' bonds: posting them, and evidence for the Bonds contract, which slashes them."""

from __future__ import annotations

from typing import Any

from splitup.chain.client import Chain
from splitup.messages.plans import PlanCertificate
from splitup.protocol.committee.peer_messages import Equivocation, PlanVote, SnapshotVote


def make_report(evidence: Equivocation) -> tuple[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the function of ``bonds``, and its arguments, that slashes who signed both votes."""
    first, second = evidence.first, evidence.second
    if isinstance(first, PlanVote) and isinstance(second, PlanVote):
        return "reportPlans", (_open_plan_vote(first), _open_plan_vote(second))
    if isinstance(first, SnapshotVote) and isinstance(second, SnapshotVote):
        return "reportSnapshots", (_open_snapshot_vote(first), _open_snapshot_vote(second))
    raise TypeError("an equivocation holds two votes of one kind, as its validator checks")


def make_plan_votes(certificate: PlanCertificate, configuration: int) -> dict[str, dict[str, Any]]:
    """Return every signature under a plan of a committee as the contract takes it, by member."""
    plan, executors = certificate.plan, len(set(certificate.plan.executors()))
    return {
        entry.member: _open_plan_vote(
            PlanVote(
                configuration=configuration,
                execution_id=plan.request.execution_id,
                request_hash=plan.request.hash(),
                root=plan.root(),
                seed=plan.seed,
                executors=executors,
                member=entry.member,
                signature=entry.signature,
            )
        )
        for entry in certificate.signatures
    }


def _open_plan_vote(vote: PlanVote) -> dict[str, Any]:
    return {
        "configuration": vote.configuration,
        "executionId": vote.execution_id,
        "requestHash": vote.request_hash,
        "planRoot": vote.root,
        "tail": bytes.fromhex(vote.seed[2:]) + vote.executors.to_bytes(32),
        "signature": vote.signature,
    }


def _open_snapshot_vote(vote: SnapshotVote) -> dict[str, Any]:
    return {
        "configuration": vote.configuration,
        "sequence": vote.sequence,
        "epoch": vote.epoch,
        "root": vote.root,
        "signature": vote.signature,
    }


async def post_bond(chain: Chain, amount_micro_usdc: int) -> None:
    """Post a member's bond from its wallet; raise ChainRejected when it holds too little."""
    # waited for: not every endpoint simulates the second on pending transactions
    await chain.send("usdc", "approve", chain.deployment.bonds, amount_micro_usdc)
    await chain.send("bonds", "post", amount_micro_usdc)
