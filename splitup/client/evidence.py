"""What a settlement rests on: asked of the members, checked against the chain."""

from __future__ import annotations

from splitup.client.outcome import Receipt
from splitup.errors import PeerFault, SplitUpError, Unavailable
from splitup.net.http import SignedClient
from splitup.protocol.cases import compute_evidence_root
from splitup.protocol.certificates import CommitteeView, check_draw
from splitup.protocol.verification import Outcome, Verdict
from splitup.wire import Evidence


def check_evidence(evidence: Evidence, receipt: Receipt, committee: CommitteeView) -> None:
    """Check that this is the evidence whose root the chain holds; raise PeerFault."""
    if evidence.draw.execution_id != receipt.execution_id:
        raise PeerFault(f"the evidence is not of execution {receipt.execution_id}")
    verdicts = [
        Verdict(entry.task, Outcome(entry.outcome), entry.validators, entry.liars)
        for entry in evidence.verdicts
    ]
    if compute_evidence_root(evidence.draw, verdicts) != receipt.evidence_root:
        raise PeerFault(f"the evidence of {receipt.execution_id} is not what the chain holds")
    check_draw(evidence.draw, committee)


async def fetch_evidence(
    http: SignedClient, committee: CommitteeView, receipt: Receipt
) -> Evidence:
    """Return the draw and verdicts of a settled execution from the first member that has them.

    Raises Unavailable when no member does: they keep what was settled lately.
    """
    problem = "it was not settled"
    for member in committee.members if receipt.status == "settled" else ():
        try:
            value = await http.get_json(f"{member.endpoint}/v1/evidence/{receipt.execution_id}")
            evidence = Evidence.from_value(value)
            check_evidence(evidence, receipt, committee)
        except SplitUpError as error:
            problem = str(error)
            continue
        return evidence
    raise Unavailable(f"no member shows the evidence of {receipt.execution_id}: {problem}")
