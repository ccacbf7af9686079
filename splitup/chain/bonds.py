"""Bringing a member's contradiction to the Bonds contract."""

from __future__ import annotations

from typing import Any

from splitup.protocol.messages import Equivocation, PlanVote, SnapshotVote


def make_report(evidence: Equivocation) -> tuple[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the function of ``bonds`` and its arguments that take the liar's bond."""
    first, second = evidence.first, evidence.second
    if isinstance(first, PlanVote) and isinstance(second, PlanVote):
        return "reportPlans", (_open_plan_vote(first), _open_plan_vote(second))
    if isinstance(first, SnapshotVote) and isinstance(second, SnapshotVote):
        return "reportSnapshots", (_open_snapshot_vote(first), _open_snapshot_vote(second))
    raise TypeError("an equivocation holds two votes of one kind; its validator says so")


def _open_plan_vote(vote: PlanVote) -> dict[str, Any]:
    return {
        "executionId": vote.execution_id,
        "planRoot": vote.root,
        "tail": bytes.fromhex(vote.seed[2:] + vote.exposures_hash[2:]),
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
