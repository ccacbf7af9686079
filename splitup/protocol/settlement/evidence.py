"""What a settlement rests on: the root that the chain keeps, and the form that anybody can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from splitup.core.codec import compute_digest, encode_canonical
from splitup.messages.verification import Draw, Evidence, TaskVerdict
from splitup.protocol.settlement.proof_of_sampling import Verdict


def compute_evidence_root(evidence: Evidence) -> str:
    """Return what the chain keeps of the evidence: commitments, randomness, verdicts."""
    verdicts = [verdict.model_dump(mode="json") for verdict in evidence.verdicts]
    value = {"draw": evidence.draw.signature, "verdicts": verdicts}
    return "0x" + compute_digest(b"splitup/evidence/v3\0" + encode_canonical(value))


def make_evidence(draw: Draw, verdicts: Sequence[Verdict]) -> Evidence:
    """Return draw and verdicts as members show them to anybody."""
    fields = (asdict(verdict) | {"outcome": verdict.outcome.value} for verdict in verdicts)
    return Evidence(draw=draw, verdicts=tuple(TaskVerdict(**one) for one in fields))
